"""Samples through the feed: the same bytes for any number of workers and every painter, labels on their objects."""

import pickle
import subprocess
import sys
from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest

from flatout.errors import ConfigError
from flatout.feed import Batch, DecodeError, Feed, FeedConfig, Plan, Store, StoreConfig, Unreadable
from flatout.yolo.augment import draw
from flatout.yolo.augment.draw import AugmentConfig, ClassAware
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.augment.source import TrainingSource, ValidationSource
from flatout.yolo.data.letterbox import rect_batches, resize_long_side, resized_hw
from tests.feed.comparing import digest, digests
from tests.yolo.augment.scenes import Damaged, busy_set, image_set_of, labels_of, written
from tests.yolo.pattern import pattern

SIZE = 64
EVERYTHING = AugmentConfig(
    degrees=10, scale=0.6, shear=4, flipud=0.5, mosaic=0.8, mixup=0.4, copy_paste=0.5, paste_in=0.5, gamma=0.5
)


def source_of(config: AugmentConfig = EVERYTHING, *, polygons: str = "some", seed: int = 0, **more) -> TrainingSource:
    images, labels = busy_set(12, seed=seed, polygons=polygons)
    resized = [resize_long_side(image, SIZE, augment=True).image for image in images]
    return TrainingSource(image_set_of(images, labels), resized, config, size=SIZE, **more)


def batches_of(source: Any, *, workers: int, epochs: int = 1, batch_size: int = 5, **more: Any) -> list[Batch]:
    plan = Plan(num_samples=len(source), seed=3, batch_size=batch_size, last="short", **more)
    with Feed(source, plan, FeedConfig(workers=workers)) as feed:
        return [batch.copy() for _ in range(epochs) for batch in feed]


@pytest.fixture(scope="module")
def alone() -> list:
    return batches_of(source_of(), workers=0, epochs=2)


@pytest.mark.parametrize("workers", [1, 2])
def test_any_number_of_workers_gives_the_same_bytes(alone, workers):
    for mine, theirs in zip(batches_of(source_of(), workers=workers, epochs=2), alone, strict=True):
        for name in ("images", "targets", "shapes"):
            np.testing.assert_array_equal(mine[name], theirs[name], err_msg=name)
        np.testing.assert_array_equal(mine.counts["targets"], theirs.counts["targets"])
        np.testing.assert_array_equal(mine.indices, theirs.indices)


@pytest.mark.parametrize("polygons", ["none", "some", "all"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gamma": 0.0},
        {"perspective": 0.001},
        {"mosaic": 0.0},
        {"degrees": 0, "shear": 0, "copy_paste": 0},
        {"degrees": 0, "shear": 0, "copy_paste": 0, "aspect": 0.8},
    ],
)
def test_all_painters_give_the_same_bytes(polygons, change):
    config = AugmentConfig(**{name: getattr(EVERYTHING, name) for name in EVERYTHING.__dataclass_fields__} | change)
    classic, *others = (
        batches_of(source_of(config, polygons=polygons, painter=painter), workers=0)
        for painter in ("classic", "fast", "opencv")
    )
    for batches in others:
        for mine, theirs in zip(batches, classic, strict=True):
            np.testing.assert_array_equal(mine["images"], theirs["images"])
            np.testing.assert_array_equal(mine["targets"], theirs["targets"])


def test_targets_carry_the_number_of_their_image_and_lie_inside(alone):
    assert sum(len(batch["targets"]) for batch in alone) > 20
    for batch in alone:
        targets = batch["targets"]
        np.testing.assert_array_equal(
            np.bincount(targets[:, 0].astype(int), minlength=5)[: len(batch)], batch.counts["targets"]
        )
        low, high = targets[:, 2:4] - targets[:, 4:] / 2, targets[:, 2:4] + targets[:, 4:] / 2
        assert (low >= -1e-6).all() and (high <= 1 + 1e-6).all()
        assert set(np.unique(targets[:, 1])) <= {0, 1}


def test_a_label_stays_on_its_object():
    """One bright square per image: after warp and flips, every box must be around a bright square."""
    image = np.full((60, 60, 3), 40, np.uint8)
    image[20:40, 15:45] = 250
    labels = labels_of([np.array([[1, 0.5, 0.5, 0.5, 1 / 3]], np.float32)] * 6)
    config = AugmentConfig(hsv_h=0, hsv_s=0, hsv_v=0, scale=0.2, translate=0.1, flipud=0.5, mixup=0, paste_in=0)
    resized = [resize_long_side(image, SIZE, augment=True).image] * 6
    source = TrainingSource(image_set_of([image] * 6, labels), resized, config, size=SIZE)
    checked = 0
    for batch in batches_of(source, workers=0, epochs=4):
        bright = batch["images"][:, 0] > 180
        for number, _, x, y, w, h in batch["targets"] * [1, 1, SIZE, SIZE, SIZE, SIZE]:
            inside = bright[int(number), round(y - h / 2) : round(y + h / 2), round(x - w / 2) : round(x + w / 2)]
            assert inside.mean() > 0.75
            checked += 1
        assert (
            abs(bright.sum() - (batch["targets"][:, 4] * batch["targets"][:, 5]).sum() * SIZE**2) < 0.35 * bright.sum()
        )
    assert checked > 20


def test_single_images_record_their_position_and_mosaics_do_not(alone):
    plain = batches_of(source_of(AugmentConfig(mosaic=0, mixup=0)), workers=0)
    assert all((batch["shapes"][:, :4] > 0).all() for batch in plain)
    only_mosaics = batches_of(source_of(AugmentConfig(mosaic=1)), workers=0)
    assert all((batch["shapes"] == 0).all() for batch in only_mosaics)


def test_validation_shows_every_image_in_the_shape_of_its_step():
    images, labels = busy_set(11, seed=4)
    image_set = image_set_of(images, labels)
    rect = rect_batches(image_set.size_wh_N2, batch_size=4, img_size=SIZE, pad=0.5)
    resized = [resize_long_side(image, SIZE, augment=False).image for image in images]
    source = ValidationSource(image_set, resized, size=SIZE, largest_hw=tuple(rect.shape_hw_S2.max(0).tolist()))
    found = batches_of(
        source,
        workers=0,
        batch_size=4,
        order=rect.order_N,
        shapes=lambda epoch, step: {"images": (3, *rect.shape_hw_S2[step].tolist())},
    )
    assert [index for batch in found for index in batch.indices] == rect.order_N.tolist()
    assert len({batch["images"].shape[2:] for batch in found}) > 1
    for batch, shape in zip(found, rect.shape_hw_S2.tolist(), strict=True):
        assert list(batch["images"].shape[2:]) == shape
        for row, index in enumerate(batch.indices):
            h0, w0, ratio_h, ratio_w, pad_x, pad_y = batch["shapes"][row]
            assert (h0, w0) == images[index].shape[:2]
            left, top = round(pad_x - 0.1), round(pad_y - 0.1)
            height, width = resized[index].shape[:2]
            inner = batch["images"][row][:, top : top + height, left : left + width]
            np.testing.assert_array_equal(inner.transpose(1, 2, 0)[..., ::-1], resized[index])
            assert (ratio_h, ratio_w) == (height / h0, width / w0)
        boxes = np.concatenate([labels.of(index) for index in batch.indices])
        np.testing.assert_array_equal(batch["targets"][:, 1], boxes[:, 0])


def test_training_without_mosaic_takes_the_shape_of_its_step():
    shapes = {"shapes": lambda epoch, step: {"images": (3, SIZE, 32 + 32 * (step % 2))}}
    calm = AugmentConfig(mosaic=0, mixup=0, paste_in=0, degrees=5)
    classic, fast = (
        batches_of(source_of(calm, painter=painter), workers=0, **shapes) for painter in ("classic", "fast")
    )
    assert {batch["images"].shape[2:] for batch in fast} == {(64, 32), (64, 64)}
    for mine, theirs in zip(fast, classic, strict=True):
        np.testing.assert_array_equal(mine["images"], theirs["images"])
        centre_T2 = mine["targets"][:, 2:4]
        assert ((centre_T2 > 0) & (centre_T2 < 1)).all()
    with pytest.raises(Exception, match="use mosaic=0 with rectangular batches"):
        batches_of(source_of(AugmentConfig(mosaic=1)), workers=0, **shapes)


@pytest.mark.parametrize("size", [64, 320, 480, 640, 1280])
def test_sizes_of_all_images_are_those_of_each(size):
    wh = np.random.default_rng(size).integers(1, 2500, (2000, 2))
    expected = [resized_hw((h, w), size)[::-1] for w, h in wh.tolist()]
    np.testing.assert_array_equal(resized_wh(wh, size), np.maximum(expected, 1))


def test_an_image_that_changed_since_the_scan_is_named():
    images = [pattern(60, 50, 0), pattern(50, 60, 1)]
    source = TrainingSource(
        image_set_of(images, labels_of([np.zeros((0, 5))] * 2)),
        [images[1], images[1]],
        AugmentConfig(mosaic=0, mixup=0),
        size=60,
    )
    with pytest.raises(Exception, match="image 0") as error:
        batches_of(source, workers=0, batch_size=1)
    assert "the file has changed since" in f"{error.value}{error.value.__cause__}"
    assert issubclass(DecodeError, ValueError)


@pytest.mark.parametrize(
    ("wrong", "text"), [({"size": 63}, "must be even"), ({"painter": "oil"}, "'classic' or 'fast'")]
)
def test_invalid_settings_of_a_source_are_refused(wrong, text):
    images, labels = busy_set(2, seed=0)
    with pytest.raises(ConfigError, match=text):
        TrainingSource(image_set_of(images, labels), images, AugmentConfig(), **{"size": 64} | wrong)


DAMAGED = {3, 7, 8}
MANY = {*DAMAGED, 12, 15}
CALM = {"mosaic": 0.0, "mixup": 0.0, "paste_in": 0.0, "scale": 0.6}
USES: dict[str, dict[str, Any]] = {
    "single images": CALM,
    "mosaics": {**CALM, "mosaic": 1.0},
    "mosaics of nine": {**CALM, "mosaic": 1.0, "nine": True},
    "mixup": {**CALM, "mosaic": 1.0, "mixup": 1.0},
    "paste-in": {**CALM, "mosaic": 1.0, "paste_in": 1.0},
    "copy-paste": {**CALM, "mosaic": 1.0, "copy_paste": 0.5},
    "perspective": {**CALM, "mosaic": 1.0, "perspective": 0.001},
    "class-aware": {**CALM, "mosaic": 1.0, "heads": True},
}


def damaged_source(*, nine: bool = False, heads: bool = False, damaged: set[int] = DAMAGED, **use: Any):
    """A source in which the labels of damaged images, and only those, are of class 1."""
    images, labels = busy_set(20, seed=5, polygons="some")
    image_T = np.repeat(np.arange(20), np.diff(labels.first_N))
    class_box_T5 = labels.class_box_T5.copy()
    class_box_T5[:, 0] = np.isin(image_T, list(DAMAGED))
    labels = replace(labels, class_box_T5=class_box_T5)
    by_heads = ClassAware.of(labels, np.array([0, 1]), np.array([0.0, 40.0]), np.array([0.0, 10.0]))
    resized = Damaged([resize_long_side(image, SIZE, augment=True).image for image in images], damaged)
    config = AugmentConfig(**use)
    return TrainingSource(
        image_set_of(images, labels), resized, config, size=SIZE, class_aware=by_heads if heads else None
    )


@pytest.mark.parametrize("use", USES)
def test_damaged_images_are_replaced_the_same_way_by_any_number_of_workers_and_after_a_resume(use, monkeypatch):
    if USES[use].get("nine"):
        monkeypatch.setattr(draw, "FOUR_SHARE", 0.0)
    source = damaged_source(**USES[use])
    plan = Plan(num_samples=len(source), seed=3, batch_size=5)
    alone, two, one = (
        FeedConfig(workers=workers, on_error="substitute", bad_share=0.2, start_method="fork", slots=2)
        for workers in (0, 2, 1)
    )
    with Feed(source, plan, alone) as feed:
        expected = digests(feed.epoch(0))
        assert feed.bad_samples == dict.fromkeys(DAMAGED, "DecodeError: a damaged image")
    with Feed(source, plan, two) as feed:
        batches = iter(feed)
        seen = [digest(next(batches)) for _ in range(2)]
        state = feed.state_dict()
    with Feed(source, plan, one) as feed:
        feed.load_state_dict(state)
        seen += digests(feed)
    assert seen == expected


def sample_of(source: TrainingSource, position: int, index: int, known: set[int]) -> tuple[dict[str, Any], set[int]]:
    """One sample by a reader that knows some damaged images and discovers others; and all that it knows afterwards."""
    while True:
        is_bad_N = np.isin(np.arange(len(source)), list(known))
        indices, positions = np.array([index]), np.array([position])
        unreadable = Unreadable(is_bad_N, seed=3, epoch=0, positions_M=positions)
        draws = source.substitute(indices, source.draw(3, 0, positions, indices), unreadable).draws
        found: set[int] = set()

        def fetch(item, read, found=found):
            try:
                return read()
            except DecodeError:
                found.add(item)

        sample = written(source, indices, draws, fetch=fetch)
        if not found:
            return sample, known
        assert not found & known
        known = known | found


@pytest.mark.parametrize("use", USES)
def test_substitutes_of_damaged_images_do_not_depend_on_what_was_known(use, monkeypatch):
    if USES[use].get("nine"):
        monkeypatch.setattr(draw, "FOUR_SHARE", 0.0)
    source = damaged_source(**USES[use], damaged=MANY)
    num_found = 0
    # In the last four, an invisible tile becomes visible when another one is replaced.
    for position in (*range(10), 129, 367, 463, 592):
        expected, found = sample_of(source, position, position % 20, set(MANY))
        for known in (set(), {3}, {8}, {12, 15}):
            sample, found = sample_of(source, position, position % 20, known)
            num_found += len(found - known)
            for name in sample:
                np.testing.assert_array_equal(sample[name], expected[name], err_msg=f"{name} {position} {known}")
    assert num_found > 10


@pytest.mark.parametrize("use", USES)
def test_no_label_of_a_damaged_image_is_shown_and_other_samples_are_untouched(use, monkeypatch):
    if USES[use].get("nine"):
        monkeypatch.setattr(draw, "FOUR_SHARE", 0.0)
    plan = Plan(num_samples=20, seed=3, batch_size=20)
    found = []
    for damaged in (set(), DAMAGED):
        config = FeedConfig(workers=0, on_error="substitute", bad_share=0.2)
        with Feed(damaged_source(damaged=damaged, **USES[use]), plan, config) as feed:
            batches = [batch.copy() for epoch in range(2) for batch in feed.epoch(epoch)]
            found.append((batches, feed.num_replaced))
    (healthy, _), (substituted, num_replaced) = found
    assert any((batch["targets"][:, 1] == 1).any() for batch in healthy)
    assert not any((batch["targets"][:, 1] == 1).any() for batch in substituted)
    assert not any(np.isin(batch.indices, list(DAMAGED)).any() for batch in substituted if use == "single images")
    same = [
        np.array_equal(mine["images"][row], theirs["images"][row])
        for mine, theirs in zip(substituted, healthy, strict=True)
        for row in range(20)
    ]
    assert 0 < sum(same) < 40
    assert num_replaced == 40 - sum(same) or use != "single images"


def test_one_damaged_image_of_many_does_not_end_an_epoch_of_mosaics():
    images, labels = busy_set(110, seed=1)
    resized = Damaged([resize_long_side(image, SIZE, augment=True).image for image in images], {37})
    source = TrainingSource(image_set_of(images, labels), resized, AugmentConfig(), size=SIZE)
    plan = Plan(num_samples=110, seed=3, batch_size=16)
    with Feed(source, plan, FeedConfig(workers=0, on_error="substitute")) as feed:
        assert sum(len(batch) for batch in feed) == 96
        assert feed.bad_samples.keys() == {37}


def test_a_source_is_pickled_without_its_buffers():
    source = source_of()
    small = len(pickle.dumps(source))
    batches_of(source, workers=0)
    assert len(pickle.dumps(source)) == small


def test_reading_imports_no_torch():
    code = "import sys, flatout.yolo.augment.source, flatout.yolo.augment.gpu.source"
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_store_of_files_gives_the_samples_of_the_files(tmp_path):
    images, labels = busy_set(6, seed=3)
    paths = tuple(str(tmp_path / f"{number}.png") for number in range(len(images)))
    for path, image in zip(paths, images, strict=True):
        cv2.imwrite(path, image)
    image_set = replace(image_set_of(images, labels), paths=paths)
    resized = ResizedImages(image_set, size=SIZE, augment=True)
    plain = AugmentConfig(paste_in=0)
    direct = batches_of(TrainingSource(image_set, resized, plain, size=SIZE), workers=0)
    config = StoreConfig(folder=tmp_path / "stores", workers=1, backend="thread", progress=False)
    with Store.open(resized, config) as store:
        stored = batches_of(TrainingSource(image_set, store, plain, size=SIZE), workers=0)
        assert store.statistics().items == len(images)
    for mine, theirs in zip(stored, direct, strict=True):
        np.testing.assert_array_equal(mine["images"], theirs["images"])
    assert resized.parameters != ResizedImages(image_set, size=SIZE, augment=False).parameters
