"""Images stored as 4:2:0: half of the bytes, exact greys, close colours, and every renderer reads the same pixels."""

import numpy as np
import pytest
import torch

from bench.augment_chroma import back_to_bgr
from flatout.errors import ConfigError
from flatout.feed import DecodeError, Plan
from flatout.feed.device_store import DeviceStore
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.chroma import Subsampled, kept_shapes, subsample
from flatout.yolo.augment.gpu.input import DeviceInputConfig, training_input
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.data.letterbox import resize_long_side
from flatout.yolo.options import TrainOptions
from tests.yolo.augment.scenes import busy_set, image_set_of
from tests.yolo.augment.test_render_torch import photographs
from tests.yolo.pattern import pattern

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 64


@pytest.mark.parametrize("hw", [(48, 64), (47, 64), (48, 63), (1, 1), (33, 51)])
def test_an_image_takes_half_of_its_bytes(hw):
    kept = subsample(pattern(*hw, 0))
    even_h, even_w = (side + side % 2 for side in hw)
    assert kept.nbytes == even_h * even_w * 3 / 2
    np.testing.assert_array_equal(kept_shapes(np.array([hw[::-1]]))[0], kept.shape)


def test_grey_comes_back_as_it_was():
    image = np.repeat(np.random.default_rng(0).integers(0, 256, (33, 51, 1), np.uint8), 3, 2)
    np.testing.assert_array_equal(back_to_bgr(subsample(image), (33, 51)), image)


def test_an_image_of_any_height_is_converted_row_pair_by_row_pair():
    image = np.random.default_rng(1).integers(0, 256, (300, 250, 3), np.uint8)  # several bands
    kept = subsample(image)
    for top in range(0, 300, 2):
        pair = subsample(image[top : top + 2])
        np.testing.assert_array_equal(kept[top : top + 2], pair[:2])
        np.testing.assert_array_equal(kept[300 + top // 2], pair[2])


def test_even_colours_come_back_within_two_levels():
    rng = np.random.default_rng(0)
    image = np.repeat(np.repeat(rng.integers(0, 256, (32, 32, 3), np.uint8), 2, 0), 2, 1)
    assert np.abs(back_to_bgr(subsample(image), (64, 64)).astype(int) - image).max() <= 2


def test_photographs_come_back_nearly():
    """The figures of bench/results/augment_chroma: 1.45 levels in the mean at 320 px, 99 % within 15."""
    images = [resize_long_side(image, 320, augment=True).image for image in photographs(20)]
    differences = [
        np.abs(back_to_bgr(subsample(image), image.shape[:2]).astype(int) - image).ravel() for image in images
    ]
    assert np.concatenate(differences).mean() <= 1.6
    assert np.quantile(np.concatenate(differences), 0.99) <= 16


@pytest.mark.parametrize("mosaic", [0.0, 1.0])
def test_samples_are_those_of_the_images_that_come_back(mosaic):
    """Tiles, mixture, copies and pasted objects all read the brightness and colour of their own pixel."""
    images, labels = busy_set(9, seed=1, polygons="all")
    image_set = image_set_of(images, labels)
    kept = [resize_long_side(image, SIZE, augment=True).image for image in images]
    assert any(image.shape[0] % 2 or image.shape[1] % 2 for image in kept), "odd sides are among them"
    back = [back_to_bgr(subsample(image), image.shape[:2]) for image in kept]
    augment = AugmentConfig(mosaic=mosaic, mixup=0.5 * mosaic, degrees=9, copy_paste=0.6, paste_in=0.8, flipud=0.5)
    plan = Plan(num_samples=len(images), batch_size=3, seed=3)
    found = []
    for resized, subsampled in ((kept, True), (back, False)):
        config = DeviceInputConfig(dtype=torch.uint8, workers=0, subsampled=subsampled)
        with training_input(image_set, resized, augment, plan, size=SIZE, device="cpu", config=config) as batches:
            found.append([(batch["images"].clone(), batch["targets"].clone()) for batch in batches])
    for (mine, my_targets), (theirs, their_targets) in zip(*found, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(my_targets, their_targets)


def test_a_store_knows_the_shapes_before_it_reads_an_image():
    read = []

    class Images(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    images = Images(pattern(20, 30, number) for number in range(3))
    DeviceStore(Subsampled(images, np.array([[30, 20]] * 3)), "cpu")
    assert sorted(read) == [0, 1, 2], "each once"


def test_it_is_only_for_images_on_the_device():
    with pytest.raises(ConfigError, match="use it with --device-augment or --fast"):
        TrainOptions(store_420=True)
    assert TrainOptions(store_420=True, fast=True).store_420


def test_an_image_that_changed_since_the_scan_is_refused():
    images = Subsampled([pattern(20, 30, 0)], resized_wh(np.array([[30, 21]]), 30))
    with pytest.raises(DecodeError, match=r"30 x 20 and not 30 x 21.*it scans changed files"):
        images[0]
