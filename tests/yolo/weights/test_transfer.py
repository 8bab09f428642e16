"""Weights are transferred if name and shape agree; the other entries are reported, and nothing is lost silently."""

import pytest
import torch
from torch import nn

from flatout.yolo.weights import transfer


class Head(nn.Module):
    anchors: torch.Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.m = nn.Conv2d(4, 3 * (5 + num_classes), 1)
        self.ia = nn.Conv2d(4, 4, 1, bias=False)
        self.register_buffer("anchors", torch.rand(3, 2))
        self.register_buffer("anchor_grid", torch.rand(1, 3, 2))
        self.register_buffer("num_batches_tracked", torch.tensor(1))


@pytest.fixture
def head() -> Head:
    torch.manual_seed(1)
    return Head(2)


def test_equal_networks_transfer_everything_in_the_precision_of_the_target(head: Head):
    source = Head(2).half()
    report = transfer(head, source.state_dict(), skip_anchors=False)
    assert (report.kept, report.total) == (6, 6)
    assert report.missing == report.unexpected == report.mismatched == report.skipped == []
    for key, value in head.state_dict().items():
        assert value.dtype == (torch.int64 if "tracked" in key else torch.float32)
        assert torch.equal(value, source.state_dict()[key].to(value.dtype))
    assert report.line("yolov7.pt") == "Transferred 6/6 items from yolov7.pt"


def test_with_another_number_of_classes_the_other_layers_are_transferred(head: Head):
    before = {key: value.clone() for key, value in head.state_dict().items()}
    source = Head(80).state_dict()
    report = transfer(head, source, skip_anchors=False)
    assert report.mismatched == ["m.weight", "m.bias"]
    assert report.line("x.pt") == "Transferred 4/6 items from x.pt"
    for key, value in head.state_dict().items():
        assert torch.equal(value, before[key] if key.startswith("m.") else source[key])


def test_anchors_stay_when_a_config_was_given(head: Head):
    before = head.anchors.clone()
    report = transfer(head, Head(2).state_dict(), skip_anchors=True)
    assert report.skipped == ["anchors", "anchor_grid"]
    assert report.kept == 4
    assert report.missing == report.mismatched == []
    assert torch.equal(head.anchors, before)


def test_keys_of_one_side_only_are_reported(head: Head):
    source = Head(2).state_dict()
    source["aux.weight"] = source.pop("ia.weight")
    report = transfer(head, source, skip_anchors=False)
    assert (report.missing, report.unexpected) == (["ia.weight"], ["aux.weight"])


def test_a_counter_does_not_take_a_float(head: Head):
    report = transfer(head, {"num_batches_tracked": torch.tensor(0.5)}, skip_anchors=False)
    assert report.mismatched == ["num_batches_tracked"]
    assert head.num_batches_tracked == 1


def test_a_mapping_is_compared_and_not_changed(head: Head):
    own = head.state_dict()
    before = {key: value.clone() for key, value in own.items()}
    report = transfer(own, Head(2).state_dict(), skip_anchors=False)
    assert report.kept == 6
    assert all(torch.equal(own[key], before[key]) for key in own)
