"""Test-time augmentation and ensembles of networks."""

import pytest
import torch

from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import PADDING, Ensemble, predict_augmented, resize_and_pad
from tests.yolo.model.test_network import narrow, random_images


@pytest.mark.parametrize(
    ("size", "scale", "stride", "content", "padded"),
    [
        ((640, 640), 0.83, 32, (531, 531), (544, 544)),
        ((640, 640), 0.67, 32, (428, 428), (448, 448)),
        ((128, 192), 0.83, 64, (106, 159), (128, 192)),
        ((128, 192), 0.67, 64, (85, 128), (128, 192)),
        ((64, 96), 0.5, 32, (32, 48), (32, 64)),
    ],
)
def test_a_view_is_scaled_and_padded_on_the_right_and_at_the_bottom(size, scale, stride, content, padded):
    view = resize_and_pad(torch.ones(1, 3, *size), scale, stride)
    assert view.shape == (1, 3, *padded)
    assert ((view[..., : content[0], : content[1]] - 1).abs() < 1e-5).all()
    assert view.sum() == pytest.approx(
        3 * content[0] * content[1] * (1 - PADDING) + 3 * PADDING * padded[0] * padded[1]
    )


def test_a_view_of_the_same_scale_is_the_image_itself():
    x = random_images()
    assert resize_and_pad(x, 1.0, 32) is x


class BoxInTheMiddle(torch.nn.Module):
    """Predicts one box with the size of its input and a score."""

    def forward(self, x: torch.Tensor) -> Predictions:
        height, width = x.shape[-2:]
        return Predictions(torch.tensor([[[width / 4, height / 2, width, height, 0.5]]]), [])


def test_boxes_of_all_views_are_in_the_coordinates_of_the_image():
    boxes = predict_augmented(BoxInTheMiddle(), torch.zeros(1, 3, 64, 64), 32)[0]
    # Views of 64, 64 (flipped, scale 0.83) and 64 pixels (scale 0.67).
    expected = [
        [16, 32, 64, 64, 0.5],
        [64 - 16 / 0.83, 32 / 0.83, 64 / 0.83, 64 / 0.83, 0.5],
        [16 / 0.67, 32 / 0.67, 64 / 0.67, 64 / 0.67, 0.5],
    ]
    torch.testing.assert_close(boxes, torch.tensor(expected))


@torch.no_grad()
def test_an_ensemble_concatenates_the_boxes_of_its_members():
    members = [narrow(name, nc=2).eval() for name in ("yolov7-tiny", "yolov7")]
    members[-1].names = ["bolt", "nut"]
    ensemble = Ensemble(members)
    x = random_images()
    together = ensemble(x)
    assert torch.equal(together.decoded, torch.cat([member(x).decoded for member in members], 1))
    assert (together.raw, ensemble.names, ensemble.stride.tolist()) == ([], ["bolt", "nut"], [8, 16, 32])


def test_an_ensemble_of_different_classes_is_refused():
    members = [narrow("yolov7-tiny", nc=nc) for nc in (2, 80)]
    with pytest.raises(ValueError, match="must have the same number of classes, not 2, 80"):
        Ensemble(members)
