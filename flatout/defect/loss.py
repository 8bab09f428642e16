"""The focal loss over pixels: easy ones, which are nearly all, count for little.

    p  probability of the true class,  q = p (1 - 2 s) + 2 s,  loss = mean of -weight (1 - q)^gamma ln q

Dimension key:  B samples   H W patch
"""

import torch
from torch import Tensor

SMOOTH = 1e-5
_LEAST = 1e-12
"""Rounding may put q a hair above 1, and a root of what then remains is no number, nor is its slope at zero."""


def focal_loss(
    logit_B2HW: Tensor, mask_B1HW: Tensor, *, gamma: float, weight_background: float = 1.0, weight_defect: float = 1.0
) -> Tensor:
    """Scalar; float32 inside unless the logits are float64. `mask` is 1 on defects, of any dtype.

    Classes are weighted by name. The scalar alpha of older trainings meant: background alpha, defect 1 - alpha.
    """
    logit_B2HW = logit_B2HW if logit_B2HW.dtype == torch.float64 else logit_B2HW.float()
    is_defect_BHW = mask_B1HW[:, 0] > 0
    margin_BHW = logit_B2HW[:, 1] - logit_B2HW[:, 0]
    # Softmax over two classes is a sigmoid of their difference.
    p_BHW = torch.sigmoid(torch.where(is_defect_BHW, margin_BHW, -margin_BHW))
    q_BHW = p_BHW * (1 - 2 * SMOOTH) + 2 * SMOOTH
    loss_BHW = -((1 - q_BHW).clamp(min=_LEAST) ** gamma) * torch.log(q_BHW)
    if weight_background != 1 or weight_defect != 1:
        loss_BHW = loss_BHW * torch.where(is_defect_BHW, weight_defect, weight_background)
    return loss_BHW.mean()
