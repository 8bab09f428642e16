"""From the network's output to candidates: one row per box and class worth a look, the best of each image first.

The arithmetic keeps the precision of the prediction (a half-precision output gives half-precision products and
corners), because that is where YOLOv7 rounds; what comes out is float32.

Dimension key:  B images   N boxes of an image   O = 5 + C numbers: cx cy w h objectness classes   C classes
                R rows with enough objectness   K = C or 1 scores of a row   M candidates   E = R * K
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flatout.yolo.boxes import cxcywh_to_xyxy
from flatout.yolo.nms.config import NmsConfig
from flatout.yolo.ranking import best_first


class Candidates(NamedTuple):
    """Images ascending, inside an image by descending score, equal scores in input order."""

    box_M4: Tensor
    """float32 corners in input pixels."""

    score_M: Tensor
    """float32."""

    class_M: Tensor
    image_M: Tensor


class _Rows(NamedTuple):
    """Boxes with enough objectness, in input order."""

    row_RO: Tensor
    image_R: Tensor


def find_candidates(prediction_BNO: Tensor, config: NmsConfig, labels: Sequence[Tensor] | None = None) -> Candidates:
    """At most `config.max_nms` candidates of each image.

    `labels` are certain boxes to add, per image [n, 5] of class, cx, cy, w, h in input pixels.
    """
    rows = _confident_rows(prediction_BNO, config.conf_thres)
    if labels is not None:
        rows = _with_labels(rows, labels)
    row_RO, image_R = rows
    score_RK, class_RK = _scores(row_RO, config.multi_label)
    wanted_RK = score_RK > config.conf_thres
    if config.classes is not None:
        wanted_RK &= torch.isin(class_RK, torch.tensor(config.classes, device=class_RK.device))
    _cut_floods(wanted_RK, score_RK, image_R, len(prediction_BNO), config.max_nms)
    place_M = _places(wanted_RK)
    score_M = score_RK.reshape(-1).index_select(0, place_M).float()
    image_M = image_R.index_select(0, place_M // score_RK.shape[1])
    order_M = best_first(image_M, score_M, len(prediction_BNO))
    place_M = place_M.index_select(0, order_M)
    row_M = place_M // score_RK.shape[1]
    class_M = place_M % score_RK.shape[1] if config.multi_label else class_RK[:, 0].index_select(0, row_M)
    box_R4 = cxcywh_to_xyxy(row_RO[:, :4]).float()
    # Sorting moves nothing from one image to another, so that image_M stays as it is.
    return Candidates(box_R4.index_select(0, row_M), score_M.index_select(0, order_M), class_M, image_M)


def _scores(row_RO: Tensor, multi_label: bool) -> tuple[Tensor, Tensor]:
    """Scores and their classes, of every class or of the best (the first of equals), [R, K]."""
    # With one class the score is the objectness alone.
    score_RC = row_RO[:, 4:5] if row_RO.shape[1] == 6 else row_RO[:, 5:] * row_RO[:, 4:5]
    if multi_label:
        return score_RC, torch.arange(score_RC.shape[1], device=score_RC.device).expand_as(score_RC)
    score_R1, class_R1 = score_RC.max(1, keepdim=True)
    return score_R1, class_R1


def _confident_rows(prediction_BNO: Tensor, conf_thres: float) -> _Rows:
    place_R = _places(prediction_BNO[..., 4] > conf_thres)
    row_RO = prediction_BNO.reshape(-1, prediction_BNO.shape[2]).index_select(0, place_R)
    return _Rows(row_RO, place_R // prediction_BNO.shape[1])


def _with_labels(rows: _Rows, labels: Sequence[Tensor]) -> _Rows:
    """Each image's labels behind its own rows, with objectness and class probability 1."""
    label_L5 = torch.cat([label.reshape(-1, 5) for label in labels]).to(rows.row_RO)
    counts = torch.tensor([len(label) for label in labels])
    image_L = torch.repeat_interleave(counts).to(rows.image_R)
    row_LO = label_L5.new_zeros(len(label_L5), rows.row_RO.shape[1])
    row_LO[:, :4] = label_L5[:, 1:]
    row_LO[:, 4] = 1
    row_LO.scatter_(1, 5 + label_L5[:, :1].long(), 1)
    image_R, order_R = torch.sort(torch.cat((rows.image_R, image_L)), stable=True)
    return _Rows(torch.cat((rows.row_RO, row_LO))[order_R], image_R)


def _cut_floods(wanted_RK: Tensor, score_RK: Tensor, image_R: Tensor, num_images: int, max_nms: int) -> None:
    """Unmark what exceeds the `max_nms` highest scores of an image.

    Before the places are listed: a place takes 8 bytes, a mark one.
    """
    if wanted_RK.numel() <= max_nms or int(wanted_RK.count_nonzero()) <= max_nms:
        return
    begins = torch.searchsorted(image_R, torch.arange(num_images + 1, device=image_R.device)).tolist()
    for begin, end in pairwise(begins):
        _keep_highest(wanted_RK[begin:end].view(-1), score_RK[begin:end].reshape(-1), max_nms)


def _keep_highest(wanted_E: Tensor, score_E: Tensor, limit: int) -> None:
    """Unmark all but the `limit` highest scores; of equal scores the first stay."""
    if len(wanted_E) <= limit or int(wanted_E.count_nonzero()) <= limit:
        return
    score_E = score_E.float().masked_fill(~wanted_E, -1)
    lowest = _nth_highest(score_E, limit)
    torch.ge(score_E, lowest, out=wanted_E)
    surplus = int(wanted_E.count_nonzero()) - limit
    if surplus:
        wanted_E[_places(score_E == lowest)[-surplus:]] = False


def _nth_highest(score_E: Tensor, rank: int) -> float:
    if not score_E.is_cpu:
        return float(score_E.topk(rank, sorted=False).values.min())
    # Eight times faster than torch's topk on the host.
    return float(np.partition(score_E.numpy(), len(score_E) - rank)[len(score_E) - rank])


def _places(mark: Tensor) -> Tensor:
    """Where a mask is set, as positions in the flattened mask, ascending int64. On a GPU the host waits."""
    if not mark.is_cpu:
        return mark.reshape(-1).nonzero().flatten()
    # Five times faster than torch where few are set.
    return torch.from_numpy(np.flatnonzero(mark.numpy()))
