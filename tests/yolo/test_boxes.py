"""Box formats convert both ways, and IoU and its variants give YOLOv7's numbers and gradients."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from flatout.yolo.boxes import cxcywh_to_xyxy, paired_ciou, pairwise_iou, xyxy_to_cxcywh
from tests.golden_cases import golden_cases
from tests.reference.boxes_of_yolov7 import paired_diou, paired_giou, paired_iou

MEASURES = {"iou": paired_iou, "giou": paired_giou, "diou": paired_diou, "ciou": paired_ciou}
INPUTS = {"pred_xywh", "target_xywh"}


def measures_of(path: Path) -> Iterable[tuple[str, tuple[Path, str]]]:
    with np.load(path) as arrays:
        names = sorted(name.removesuffix("_grad_pred") for name in arrays.files if name not in INPUTS)
    return [(name, (path, name)) for name in dict.fromkeys(names)]


@pytest.mark.parametrize("case", golden_cases("yolov7-loss/iou_family.npz", measures_of))
def test_a_measure_and_its_gradient_match_the_golden(case):
    path, name = case
    with np.load(path) as arrays:
        stored = {key: torch.from_numpy(arrays[key]) for key in arrays.files}
    box_N4 = stored["pred_xywh"].clone().requires_grad_()
    value_N = MEASURES[name](box_N4, stored["target_xywh"])
    value_N.sum().backward()
    if name in stored:
        torch.testing.assert_close(value_N.detach(), stored[name], rtol=1e-5, atol=1e-6)
    if f"{name}_grad_pred" in stored:
        expected = stored[f"{name}_grad_pred"]
        torch.testing.assert_close(box_N4.grad, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))


def test_formats_convert_both_ways():
    box_cxcywh = torch.rand(50, 4, dtype=torch.float64)
    torch.testing.assert_close(xyxy_to_cxcywh(cxcywh_to_xyxy(box_cxcywh)), box_cxcywh)


def test_a_box_overlaps_itself_completely_and_distant_boxes_not_at_all():
    box_cxcywh = torch.tensor([[10.0, 20.0, 4.0, 6.0], [100.0, 20.0, 4.0, 6.0]])
    iou_22 = pairwise_iou(cxcywh_to_xyxy(box_cxcywh), cxcywh_to_xyxy(box_cxcywh))
    torch.testing.assert_close(iou_22, torch.eye(2))
    for measure in MEASURES.values():
        torch.testing.assert_close(measure(box_cxcywh, box_cxcywh), torch.ones(2), atol=1e-5, rtol=0)


def test_distance_and_aspect_penalties_only_lower_the_iou():
    generator = torch.Generator().manual_seed(3)
    box, true = (torch.rand(200, 4, generator=generator) * 10 + 0.1 for _ in range(2))
    assert (paired_diou(box, true) <= paired_iou(box, true)).all()
    assert (paired_ciou(box, true) <= paired_diou(box, true)).all()
    assert (paired_giou(box, true) <= paired_iou(box, true)).all()


def test_an_empty_box_gives_finite_numbers_and_gradients():
    box = torch.zeros(1, 4).requires_grad_()
    for measure in MEASURES.values():
        value = measure(box, torch.zeros(1, 4))
        (gradient,) = torch.autograd.grad(value.sum(), box)
        assert value.isfinite().all()
        assert gradient.isfinite().all()
