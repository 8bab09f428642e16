"""Deferred labels are finished on a device as on the host: the same ones are kept, in the same order, to the bit.

In torch, in Triton's interpreter and on a GPU.
"""

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.feed.device import DeviceBatch
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.input import DeviceInputConfig, training_input
from flatout.yolo.augment.gpu.labels_torch import DeviceLabels, TorchLabels
from flatout.yolo.augment.gpu.source import TILES, ParameterSource
from flatout.yolo.data.letterbox import rect_batches
from flatout.yolo.train.step import DetectionJob, StepInputs
from tests.feed.test_device import DEVICES, needs_gpu
from tests.triton_interpreter import check_in_interpreter, needs_triton
from tests.yolo.augment.scenes import written
from tests.yolo.augment.test_device_input import (
    AS_BYTES,
    CALM,
    SIZE,
    assert_same,
    host_batches,
    plan_of,
    rect_plan,
    resized_set,
)
from tests.yolo.augment.two_finishers import CHANGES, TILTED, awkward_draws, awkward_set, both_ways, random_ways

pytest.importorskip("cv2", reason="the host's side needs OpenCV")

from flatout.yolo.augment.source import TrainingSource

pytestmark = pytest.mark.usefixtures("one_thread")
AWKWARD = [(AugmentConfig(paste_in=0), 0.0), (TILTED, 0.0012)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("polygons", ["some", "all"])
@pytest.mark.parametrize("name", CHANGES)
def test_targets_finished_by_torch_equal_the_workers_to_the_bit(name, polygons, device):
    mine, theirs = random_ways(name, 24, TorchLabels, device, polygons=polygons)
    np.testing.assert_array_equal(mine, theirs)
    assert len(theirs) > 30


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("config", "tilt"), AWKWARD, ids=["affine", "tilted"])
def test_polygons_on_and_beyond_borders_are_handled_as_by_the_worker(config, tilt, device):
    mine, theirs = both_ways(awkward_set(), config, awkward_draws(tilt=tilt), TorchLabels, device)
    np.testing.assert_array_equal(mine, theirs)
    assert set(theirs[:, 0]) == set(range(7)), "every sample has targets"


def test_a_polygon_that_begins_on_the_border_keeps_its_whole_box():
    draws = {name: array[:1] for name, array in awkward_draws().items()}
    found, _ = both_ways(awkward_set(), AugmentConfig(paste_in=0), draws, TorchLabels, "cpu")
    # From 0.5 to 0.75 and 0.8 of an image whose middle is the output's corner.
    assert found[0].tolist() == pytest.approx([0, 0, 0.125, 0.15, 0.25, 0.3], abs=2e-3)
    assert found[0, 2] - found[0, 4] / 2 == 0 and found[0, 3] - found[0, 5] / 2 == 0


@needs_triton
def test_the_kernel_finishes_labels_as_the_worker_in_the_interpreter():
    check_in_interpreter("tests.yolo.augment.two_finishers")


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize("polygons", ["some", "all"])
@pytest.mark.parametrize("name", CHANGES)
def test_the_kernel_finishes_labels_as_the_worker_on_a_gpu(name, polygons):
    from flatout.yolo.augment.gpu.labels_triton import TritonLabels

    mine, theirs = random_ways(name, 200, TritonLabels, "cuda", polygons=polygons)
    np.testing.assert_array_equal(mine, theirs)
    assert len(theirs) > 300


@pytest.mark.gpu
@needs_gpu
@needs_triton
@pytest.mark.parametrize(("config", "tilt"), AWKWARD, ids=["affine", "tilted"])
def test_the_kernel_handles_polygons_on_and_beyond_borders_as_the_worker_on_a_gpu(config, tilt):
    from flatout.yolo.augment.gpu.labels_triton import TritonLabels

    mine, theirs = both_ways(awkward_set(), config, awkward_draws(tilt=tilt), TritonLabels, "cuda")
    np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CHANGES)
def test_batches_have_the_targets_of_the_host(name, device):
    config = AugmentConfig(**{"paste_in": 0} | CHANGES[name])
    image_set, resized = resized_set(2, augment=True, polygons="some")
    expected = host_batches(TrainingSource(image_set, resized, config, size=SIZE), plan_of(image_set))
    with training_input(
        image_set, resized, config, plan_of(image_set), size=SIZE, device=device, config=AS_BYTES
    ) as batches:
        assert_same(batches, expected, differing=1.0)  # other tests compare the pixels


@pytest.mark.parametrize("device", DEVICES)
def test_single_images_in_rectangles_use_their_boxes(device):
    image_set, resized = resized_set(5, augment=True, largest=60, polygons="all")
    rect = rect_batches(image_set.size_wh_N2, batch_size=5, img_size=SIZE)
    plan, host_plan = rect_plan(rect, image_set)
    expected = host_batches(TrainingSource(image_set, resized, CALM, size=SIZE), host_plan)
    with training_input(
        image_set, resized, CALM, plan, size=SIZE, device=device, config=AS_BYTES, rect=rect
    ) as batches:
        assert_same(batches, expected, differing=0.05)


def test_rows_are_padded_to_buckets():
    image_set, resized = resized_set(1, augment=True, polygons="some")
    config = replace(AS_BYTES, target_bucket=16)
    with training_input(
        image_set, resized, AugmentConfig(paste_in=0), plan_of(image_set), size=SIZE, device="cpu", config=config
    ) as batches:
        for batch in batches:
            assert len(batch["targets"]) % 16 == 0
            assert (batch["targets"][:, 0] >= 0).sum() == batch["num_targets"]


def test_samples_without_labels_have_no_targets():
    image_set = awkward_set()
    draws = {name: array[:1] for name, array in awkward_draws().items()} | {"tiles": np.full((1, 2, 9), 2)}
    found, expected = both_ways(image_set, AugmentConfig(paste_in=0), draws, TorchLabels, "cpu")
    assert found.shape == expected.shape == (0, 6)


def test_rows_name_the_tile_in_the_batch_wherever_their_micro_batch_begins():
    source = ParameterSource(awkward_set(), AugmentConfig(paste_in=0), size=SIZE, defer_labels=True)
    first, later = (written(source, np.zeros(7, np.int64), awkward_draws(), first_row=row)["targets"] for row in (0, 5))
    np.testing.assert_array_equal(first[:, 0] - later[:, 0], 5 * TILES)
    np.testing.assert_array_equal(first[:, 1:], later[:, 1:])
    assert set((-1 - first[:, 0]) // TILES) == set(range(7))


@pytest.mark.parametrize(
    ("augment", "config", "expected"),
    [
        (AugmentConfig(paste_in=0), AS_BYTES, "on cpu by torch"),
        (AugmentConfig(copy_paste=0.1), AS_BYTES, "by the workers: copy_paste needs all of them"),
        (AugmentConfig(), replace(AS_BYTES, polygons_on_device=False), "by the workers: polygons_on_device is off"),
    ],
)
def test_the_log_says_who_makes_labels_with_polygons(augment, config: DeviceInputConfig, expected, caplog):
    image_set, resized = resized_set(1, augment=True, polygons="all")
    with caplog.at_level(logging.INFO):
        training_input(image_set, resized, augment, plan_of(image_set), size=SIZE, device="cpu", config=config).close()
    assert f"Labels with polygons are made {expected}" in caplog.text


def test_nothing_is_logged_about_polygons_where_there_are_none(caplog):
    image_set, resized = resized_set(1, augment=True)
    with caplog.at_level(logging.INFO):
        training_input(
            image_set, resized, AugmentConfig(), plan_of(image_set), size=SIZE, device="cpu", config=AS_BYTES
        ).close()
    assert "olygons" not in caplog.text


def test_the_bytes_of_labels_on_the_device_are_counted():
    labels = awkward_set().labels
    expected = labels.class_box_T5.nbytes + labels.first_point_T.nbytes + labels.point_P2.nbytes
    assert DeviceLabels.of(labels, "cpu").nbytes == expected


def test_the_last_batch_may_be_counted_on_the_device():
    loss: Any = SimpleNamespace(kind=lambda epoch: "plain")
    job = DetectionJob(StepInputs(dtype=torch.float32, channels_last=False, size=SIZE, grid=32, seed=1), loss)
    fields = {"images": torch.zeros(1, 3, 8, 16), "targets": torch.zeros(9, 6)}
    count = torch.tensor([7], dtype=torch.int32)
    for more, counted in ({"num_targets": count}, 7), ({}, 9):
        batch = DeviceBatch(0, 0, 1, np.zeros(1), np.zeros(1), fields | more, {"targets": np.array([9])})
        job.inputs(batch, 0, 0)
        assert (int(job.last_targets), job.last_width_px) == (counted, 16)
