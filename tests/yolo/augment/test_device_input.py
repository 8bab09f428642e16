"""The complete input on a device gives the batches of the host: training, rectangles, validation, weights, heads."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flatout.errors import ConfigError, DataError
from flatout.feed import Batch, Feed, FeedConfig, Plan, Source
from flatout.feed.device import DeviceBatch
from flatout.feed.device_store import CHUNK_BYTES, chunks_of
from flatout.yolo.augment.draw import AugmentConfig, ClassAware
from flatout.yolo.augment.gpu.input import (
    DeviceInputConfig,
    MemoryBudget,
    plan_memory,
    training_input,
    validation_input,
)
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import RectBatches, rect_batches, resize_long_side
from tests.feed.test_device import DEVICES, needs_gpu
from tests.yolo.augment.scenes import Damaged, busy_set, image_set_of

cv2 = pytest.importorskip("cv2", reason="the host's side needs OpenCV")

from flatout.yolo.augment.source import TrainingSource, ValidationSource  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = 64
AUGMENT = AugmentConfig(mixup=0.4, degrees=10, scale=0.6, flipud=0.5, paste_in=0)
CALM = AugmentConfig(mosaic=0, mixup=0, paste_in=0, degrees=5)
AS_BYTES = DeviceInputConfig(dtype=torch.uint8, channels_last=False, workers=0)
IS_CV4 = cv2.__version__.startswith("4.")


def resized_set(seed: int, *, augment: bool, num: int = 14, **more: Any) -> tuple[ImageSet, list[np.ndarray]]:
    images, labels = busy_set(num, seed=seed, **more)
    return image_set_of(images, labels), [resize_long_side(each, SIZE, augment=augment).image for each in images]


def plan_of(image_set: ImageSet, **more: Any) -> Plan:
    settings: dict[str, Any] = {"num_samples": len(image_set), "batch_size": 5, "seed": 3, "last": "short"}
    return Plan(**settings | more)


def host_batches(source: Source, plan: Plan) -> list[Batch]:
    with Feed(source, plan, FeedConfig(workers=0)) as feed:
        return [batch.copy() for batch in feed]


def assert_same_targets(mine: DeviceBatch, theirs: Batch, *, size: int = SIZE) -> None:
    """Targets in the same order. Where the device finishes labels, rows that are not kept lie between them."""
    targets = mine["targets"].cpu().numpy()
    is_kept = targets[:, 0] >= 0
    np.testing.assert_allclose(targets[is_kept], theirs["targets"], rtol=0, atol=1e-4 / size)
    if "num_targets" not in mine.fields:
        assert is_kept.all()
        np.testing.assert_array_equal(mine.counts["targets"], theirs.counts["targets"])
        return
    assert (targets[~is_kept] == [-1, 0, 0, 0, 0, 0]).all()
    assert mine["num_targets"].tolist() == [is_kept.sum()]
    assert mine.counts["targets"].sum() == len(targets)
    assert (mine.counts["targets"] >= theirs.counts["targets"]).all()


def assert_same(batches: Any, expected: list[Batch], *, differing: float = 0.0) -> None:
    """Equal batches, up to a fraction `differing` of the bytes (single images that are stored one pixel short)."""
    count = 0
    for mine, theirs in zip(batches, expected, strict=True):
        assert_same_targets(mine, theirs)
        np.testing.assert_array_equal(mine.indices, theirs.indices)
        assert mine["images"].shape == theirs["images"].shape
        if IS_CV4:
            assert (mine["images"].cpu().numpy() != theirs["images"]).mean() <= differing
        count += 1
    assert count > 1


def rect_plan(rect: RectBatches, image_set: ImageSet) -> tuple[Plan, Plan]:
    """Plans for the device, which knows the shapes by image, and for the host, which knows them by step."""
    shapes = {"shapes": lambda epoch, step: {"images": (3, *rect.shape_hw_S2[step].tolist())}}
    return plan_of(image_set, order=rect.order_N), plan_of(image_set, order=rect.order_N, **shapes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("gamma", [0.0, 0.5])
@pytest.mark.parametrize("polygons", ["none", "some"])
def test_training_batches_are_those_of_the_host(device, polygons, gamma):
    image_set, resized = resized_set(1, augment=True, polygons=polygons)
    augment = replace(AUGMENT, gamma=gamma)
    expected = host_batches(TrainingSource(image_set, resized, augment, size=SIZE), plan_of(image_set))
    with training_input(
        image_set, resized, augment, plan_of(image_set), size=SIZE, device=device, config=AS_BYTES
    ) as batches:
        assert_same(batches, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pinned_share", [0.0, 0.3])
@pytest.mark.parametrize("workers", [0, 1])
def test_images_that_fit_nowhere_are_streamed_with_the_batches(device, pinned_share, workers):
    image_set, resized = resized_set(1, augment=True, polygons="some", num=40)
    augment = replace(AUGMENT, paste_in=0.5)
    plan = plan_of(image_set, batch_size=2)
    settings = {"image_set": image_set, "images": resized, "augment": augment, "plan": plan, "size": SIZE}
    needed_bytes = chunks_of(np.array([image.nbytes for image in resized])).sum() * CHUNK_BYTES
    tight = replace(
        AS_BYTES, workers=workers, budget_bytes=int(0.95 * needed_bytes), pinned_bytes=int(pinned_share * needed_bytes)
    )
    with training_input(**settings, device=device, config=AS_BYTES) as batches:
        expected = [{name: tensor.clone() for name, tensor in batch.fields.items()} for batch in batches]
    with training_input(**settings, device=device, config=tight) as batches:
        assert batches._store.num_streamed > (5 if pinned_share else 15)
        for mine, theirs in zip(batches, expected, strict=True):
            assert torch.equal(mine["images"], theirs["images"])
            assert torch.equal(mine["targets"], theirs["targets"])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("changes", [{}, {"mixup": 0.5}, {"perspective": 0.001}], ids=str)
def test_copied_objects_are_those_of_the_host(device, changes):
    # Some images have no polygons. Without changes of colour, a border pixel differs on its own.
    config = AugmentConfig(
        **{"mixup": 0, "paste_in": 0, "copy_paste": 0.6, "hsv_h": 0, "hsv_s": 0, "hsv_v": 0} | changes
    )
    image_set, resized = resized_set(4, augment=True, polygons="some", num=20)
    source, plan = TrainingSource(image_set, resized, config, size=SIZE), plan_of(image_set)
    expected = host_batches(source, plan)
    bare = host_batches(TrainingSource(image_set, resized, replace(config, copy_paste=0), size=SIZE), plan)
    num_changed = sum((one["images"] != other["images"]).mean() for one, other in zip(expected, bare, strict=True))
    assert num_changed > 0.1
    with training_input(image_set, resized, config, plan, size=SIZE, device=device, config=AS_BYTES) as batches:
        # Edges of polygons fall on different pixels in places.
        assert_same(batches, expected, differing=0.02)


@pytest.mark.parametrize("device", DEVICES)
def test_images_come_in_the_dtype_and_layout_of_the_network(device):
    image_set, resized = resized_set(1, augment=True)
    plain, wanted = AS_BYTES, DeviceInputConfig(workers=0)
    results = []
    for config in (plain, wanted):
        with training_input(
            image_set, resized, AUGMENT, plan_of(image_set), size=SIZE, device=device, config=config
        ) as batches:
            results.append([batch["images"].clone() for batch in batches])
    for as_bytes, images in zip(*results, strict=True):
        assert images.dtype == torch.bfloat16 and images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(images, (as_bytes / 255).to(torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
def test_padded_targets_have_few_shapes_and_marked_rows(device):
    image_set, resized = resized_set(1, augment=True)
    config = DeviceInputConfig(dtype=torch.uint8, workers=0, target_bucket=16)
    plan = plan_of(image_set, batch_size=3)
    expected = host_batches(TrainingSource(image_set, resized, AUGMENT, size=SIZE), plan)
    with training_input(image_set, resized, AUGMENT, plan, size=SIZE, device=device, config=config) as batches:
        for mine, theirs in zip(batches, expected, strict=True):
            targets, num = mine["targets"].cpu().numpy(), len(theirs["targets"])
            assert len(targets) % 16 == 0 and num <= len(targets) < num + 16 + 16 * (num == 0)
            np.testing.assert_allclose(targets[:num], theirs["targets"], rtol=0, atol=1e-4 / SIZE)
            assert (targets[num:, 0] == -1).all() and (targets[num:, 1:] == 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rectangular_training_batches_are_those_of_the_host(device):
    image_set, resized = resized_set(5, augment=True, largest=60)
    rect = rect_batches(image_set.size_wh_N2, batch_size=5, img_size=SIZE)
    plan, host_plan = rect_plan(rect, image_set)
    expected = host_batches(TrainingSource(image_set, resized, CALM, size=SIZE), host_plan)
    assert len({batch["images"].shape for batch in expected}) > 1
    for either in (plan, host_plan):
        with training_input(
            image_set, resized, CALM, either, size=SIZE, device=device, config=AS_BYTES, rect=rect
        ) as batches:
            assert_same(batches, expected, differing=0.05)
    with pytest.raises(ConfigError, match="use mosaic=0 with rectangular batches"):
        training_input(image_set, resized, AUGMENT, plan, size=SIZE, device=device, config=AS_BYTES, rect=rect)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_rect", [True, False])
def test_validation_batches_are_those_of_the_host(device, is_rect):
    image_set, resized = resized_set(4, augment=False)
    rect = rect_batches(image_set.size_wh_N2, batch_size=5, img_size=SIZE, pad=0.5) if is_rect else None
    plan, host_plan = rect_plan(rect, image_set) if rect else (plan_of(image_set, shuffle=False),) * 2
    largest_hw = tuple(rect.shape_hw_S2.max(0).tolist()) if rect else None
    expected = host_batches(ValidationSource(image_set, resized, size=SIZE, largest_hw=largest_hw), host_plan)
    with validation_input(image_set, resized, plan, size=SIZE, device=device, config=AS_BYTES, rect=rect) as batches:
        assert_same(batches, expected)
        for mine, theirs in zip(batches, expected, strict=True):
            np.testing.assert_array_equal(mine["shapes"].cpu(), theirs["shapes"])


@pytest.mark.parametrize("kept", [True, False])
def test_a_validation_has_workers_only_for_images_that_are_not_on_the_device(kept):
    image_set, resized = resized_set(1, augment=False, num=40)
    needed_bytes = chunks_of(np.array([image.nbytes for image in resized])).sum() * CHUNK_BYTES
    # Those of a batch need room, too.
    budget_bytes = int((2 if kept else 0.95) * needed_bytes)
    config = replace(AS_BYTES, workers=2, budget_bytes=budget_bytes, pinned_bytes=0)
    plan = plan_of(image_set, batch_size=2, shuffle=False)
    expected = host_batches(ValidationSource(image_set, resized, size=SIZE), plan)
    with validation_input(image_set, resized, plan, size=SIZE, device="cpu", config=config) as batches:
        assert (batches._store.num_streamed == 0) == kept
        assert_same(batches, expected)
        assert len(batches.feed.worker_pids) == (0 if kept else 2)


@pytest.mark.parametrize("device", DEVICES)
def test_objects_are_pasted_on_the_device_where_they_are_on_the_host(device):
    """Labels are equal; pixels nearly, since the device fills polygons by a rule of its own."""
    size = 2 * SIZE
    images, labels = busy_set(14, seed=1, polygons="all", largest=160)
    image_set, resized = image_set_of(images, labels), [resize_long_side(i, size, augment=True).image for i in images]
    pasting, plain = (AugmentConfig(mixup=0, flipud=0.5, paste_in=share) for share in (0.8, 0.0))
    plan = plan_of(image_set, batch_size=7)
    expected, without = (
        host_batches(TrainingSource(image_set, resized, each, size=size), plan) for each in (pasting, plain)
    )
    with training_input(image_set, resized, pasting, plan, size=size, device=device, config=AS_BYTES) as batches:
        for mine, theirs, before in zip(batches, expected, without, strict=True):
            assert_same_targets(mine, theirs, size=size)
            assert len(theirs["targets"]) > len(before["targets"])
            found, wanted = mine["images"].cpu().numpy().astype(int), theirs["images"].astype(int)
            changed = theirs["images"] != before["images"]
            if IS_CV4:
                assert changed.mean() > 0.02
                assert (np.abs(found - wanted)[changed] > 8).mean() < 0.03
                assert (found != wanted)[~changed].mean() < 0.002


def substituting(source: Source, plan: Plan) -> list[Batch]:
    with Feed(source, plan, FeedConfig(workers=0, on_error="substitute")) as feed:
        return [batch.copy() for batch in feed]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("polygons", ["none", "some"])
@pytest.mark.parametrize("damaged", [0, 5])
def test_a_damaged_image_is_replaced_as_on_the_host(device, polygons, damaged, caplog):
    image_set, intact = resized_set(1, augment=True, polygons=polygons)
    resized, plan = Damaged(intact, {damaged}), plan_of(image_set)
    expected = substituting(TrainingSource(image_set, resized, AUGMENT, size=SIZE), plan)
    caplog.clear()
    with training_input(
        image_set, resized, AUGMENT, plan, size=SIZE, device=device, config=replace(AS_BYTES, workers=1)
    ) as batches:
        assert_same(batches, expected)
        assert batches.feed.bad_samples == {damaged: "DecodeError: a damaged image"}
    assert any(f"File image {damaged} is replaced by a substitute" in text for text in caplog.messages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("change", [{"paste_in": 0.8}, {"copy_paste": 0.6}, {"perspective": 0.001}], ids=str)
def test_labels_of_samples_without_a_damaged_image_are_those_of_the_host(device, change):
    image_set, intact = resized_set(4, augment=True, polygons="some", num=20)
    resized, plan, config = Damaged(intact, {4}), plan_of(image_set), replace(AUGMENT, **change)
    expected = substituting(TrainingSource(image_set, resized, config, size=SIZE), plan)
    with training_input(image_set, resized, config, plan, size=SIZE, device=device, config=AS_BYTES) as batches:
        for mine, theirs in zip(batches, expected, strict=True):
            assert_same_targets(mine, theirs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_damaged_image_of_a_rectangular_batch_is_replaced_as_on_the_host(device):
    image_set, intact = resized_set(5, augment=True, largest=60)
    rect = rect_batches(image_set.size_wh_N2, batch_size=5, img_size=SIZE)
    plan, host_plan = rect_plan(rect, image_set)
    # The first image of a batch: the batch must not take the shape of the substitute.
    resized = Damaged(intact, {int(rect.order_N[5])})
    expected = substituting(TrainingSource(image_set, resized, CALM, size=SIZE), host_plan)
    with training_input(
        image_set, resized, CALM, plan, size=SIZE, device=device, config=AS_BYTES, rect=rect
    ) as batches:
        assert_same(batches, expected, differing=0.05)
    largest_hw = tuple(rect.shape_hw_S2.max(0).tolist())
    expected = substituting(ValidationSource(image_set, resized, size=SIZE, largest_hw=largest_hw), host_plan)
    with validation_input(image_set, resized, plan, size=SIZE, device=device, config=AS_BYTES, rect=rect) as batches:
        assert_same(batches, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("late", [False, True], ids=["from the start", "after the start"])
def test_a_damaged_image_that_is_streamed_is_replaced_like_one_in_the_store(device, late):
    image_set, intact = resized_set(1, augment=True, num=40)
    plan = plan_of(image_set, batch_size=2)
    needed_bytes = chunks_of(np.array([image.nbytes for image in intact])).sum() * CHUNK_BYTES
    tight = replace(AS_BYTES, budget_bytes=int(0.95 * needed_bytes), pinned_bytes=0)
    settings = {"image_set": image_set, "augment": AUGMENT, "plan": plan, "size": SIZE, "device": device}
    with training_input(images=Damaged(intact, {39}), config=AS_BYTES, **settings) as batches:
        expected = [{name: tensor.clone() for name, tensor in batch.fields.items()} for batch in batches]
    resized = Damaged(intact, () if late else {39})
    with training_input(images=resized, config=tight, **settings) as batches:
        assert batches._store.num_streamed > 15 and batches._store.unreadable.keys() == (set() if late else {39})
        resized.damaged = {39}
        for mine, theirs in zip(batches, expected, strict=True):
            assert torch.equal(mine["images"], theirs["images"])
            assert torch.equal(mine["targets"], theirs["targets"])
        assert batches.feed.bad_samples.keys() == {39}


def test_an_image_that_has_changed_since_the_scan_is_replaced_on_the_device_too():
    image_set, resized = resized_set(1, augment=True)
    resized[5] = resized[5][:-3]
    with training_input(
        image_set, resized, AUGMENT, plan_of(image_set), size=SIZE, device="cpu", config=AS_BYTES
    ) as batches:
        list(batches)
        assert "the file has changed since" in batches.feed.bad_samples[5]


def test_more_damaged_images_than_tolerated_end_a_training_on_the_device_with_their_names():
    image_set, intact = resized_set(1, augment=True)
    settings = {"size": SIZE, "device": "cpu", "config": AS_BYTES}
    with (
        pytest.raises(DataError, match=r"3 of 14 files .*image 3 \(.*image 5 \(.*image 9 \("),
        training_input(image_set, Damaged(intact, {3, 5, 9}), AUGMENT, plan_of(image_set), **settings) as batches,
    ):
        next(iter(batches))


def test_weights_and_heads_work_as_on_the_host():
    image_set, resized = resized_set(1, augment=True)
    heads = ClassAware.of(image_set.labels, np.array([0, 1]), np.array([0.0, 40.0]), np.array([0.0, 10.0]))
    plan = plan_of(image_set, weights=np.arange(len(image_set)))
    expected = host_batches(TrainingSource(image_set, resized, AUGMENT, size=SIZE, class_aware=heads), plan)
    with training_input(
        image_set, resized, AUGMENT, plan, size=SIZE, device="cpu", config=AS_BYTES, class_aware=heads
    ) as batches:
        assert_same(batches, expected)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("budget_bytes", [None, 3_000_000], ids=["resident", "staged"])
@pytest.mark.parametrize("polygons", ["none", "some"])
def test_the_host_never_waits_for_the_gpu(budget_bytes, polygons):
    image_set, resized = resized_set(1, augment=True, num=40, polygons=polygons)
    config = DeviceInputConfig(workers=2, budget_bytes=budget_bytes, target_bucket=64)
    plan = plan_of(image_set, order=np.arange(40).repeat(5), last="drop")
    with training_input(image_set, resized, AUGMENT, plan, size=SIZE, device="cuda", config=config) as batches:
        steps = iter(batches)
        for _ in range(4):
            next(steps)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            total = sum(next(steps)["images"].float().sum() for _ in range(20))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert float(total) > 0


def test_the_memory_plan_says_where_images_will_be_kept():
    sizes = np.tile([640, 480], (1000, 1))
    text = str(plan_memory(sizes, size=320, budget=MemoryBudget(10**9, 0), batch_items=100))
    assert text == "1000 images at 320 px, 230,400 bytes each: 1000 in device memory (0.23 GB)"
    text = str(plan_memory(sizes, size=640, budget=MemoryBudget(5 * 10**8, 10**9), batch_items=100))
    assert text.endswith("921,600 bytes each: 442 in device memory (0.41 GB), 558 in pinned RAM (0.51 GB)")
    text = str(plan_memory(sizes, size=640, budget=MemoryBudget(5 * 10**8, 10**8), batch_items=100))
    assert text.endswith("108 in pinned RAM (0.10 GB), 450 streamed by the workers from the host's store (0.41 GB)")


def test_a_bucket_of_no_rows_is_refused():
    with pytest.raises(ConfigError, match="target_bucket=0 must be 1 or more"):
        DeviceInputConfig(target_bucket=0)
