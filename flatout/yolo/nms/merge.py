"""Merge mode: a box becomes the mean of the candidates that overlap it.

Dimension key:  B images   M candidates   D boxes kept   K boxes kept of one image   n candidates of one image
"""

import torch
from torch import Tensor

from flatout.yolo.boxes import pairwise_iou
from flatout.yolo.nms.candidates import Candidates

MIN_CANDIDATES, MAX_CANDIDATES = 2, 2999


def merge_supported(
    found: Candidates, shifted_M4: Tensor, row_D6: Tensor, kept_D: Tensor, count_B: Tensor, threshold: float
) -> tuple[Tensor, Tensor]:
    """Rows and images after merging: boxes averaged by score, those without a second supporter dropped.

    Overlap is judged on the boxes moved apart by class. Image by image: this mode is for single pictures.
    """
    image_D = found.image_M[kept_D]
    rows, images = [], []
    end = 0
    for image, count in enumerate(count_B.tolist()):
        begin, end = end, end + count
        row_K6, kept_K = row_D6[image_D == image], kept_D[image_D == image]
        if MIN_CANDIDATES <= count <= MAX_CANDIDATES:
            support_Kn = pairwise_iou(shifted_M4[kept_K], shifted_M4[begin:end]) > threshold
            weight_Kn = support_Kn * found.score_M[None, begin:end]
            mean_K4 = (weight_Kn @ found.box_M4[begin:end]) / weight_Kn.sum(1, keepdim=True)
            row_K6 = torch.cat((mean_K4, row_K6[:, 4:]), dim=1)[support_Kn.sum(1) > 1]
        rows.append(row_K6)
        images.append(torch.full((len(row_K6),), image, device=image_D.device))
    return torch.cat(rows), torch.cat(images)
