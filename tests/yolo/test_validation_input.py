"""Every validation pass shows each image once and in the same way, for any number of workers and any storage."""

from typing import Any

import numpy as np
import pytest
import torch

from flatout.errors import ConfigError
from flatout.feed import Store, StoreConfig
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.evaluate.validation_input import ValidationBatch, open_validation, together
from flatout.yolo.metrics import labels_in_images
from tests.yolo.small_sets import files_of

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 64


@pytest.fixture(scope="module")
def image_set(tmp_path_factory) -> ImageSet:
    return files_of(tmp_path_factory.mktemp("set"))


def passes(image_set: ImageSet, *, num_passes: int = 1, **more) -> list[list[ValidationBatch]]:
    """Copies of the batches of `num_passes` passes."""
    settings: dict[str, Any] = {"size": SIZE, "batch_size": 4, "workers": 0, "device": "cpu"} | more
    with open_validation(image_set, **settings) as batches:
        return [[copied(batch) for batch in batches.epoch(0)] for _ in range(num_passes)]


def copied(batch: ValidationBatch) -> ValidationBatch:
    return batch._replace(images=batch.images.clone(), targets_T6=batch.targets_T6.clone())


def assert_equal(one: list[ValidationBatch], other: list[ValidationBatch], pixels: int = 0) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert mine.images.shape == theirs.images.shape
        assert int((mine.images.int() - theirs.images.int()).abs().max()) <= pixels
        assert torch.equal(mine.targets_T6, theirs.targets_T6)
        assert all(torch.equal(a, b) for a, b in zip(mine.letterbox, theirs.letterbox, strict=True))
        assert mine.paths == theirs.paths


def test_every_image_comes_once_with_its_own_labels(image_set):
    (batches,) = passes(image_set)
    assert sorted(index for batch in batches for index in batch.indices) == list(range(len(image_set)))
    for batch in batches:
        assert batch.paths == tuple(image_set.paths[index] for index in batch.indices)
        count_B = np.diff(image_set.labels.first_N)[batch.indices]
        np.testing.assert_array_equal(batch.counts_B, count_B)
        np.testing.assert_array_equal(batch.targets_T6[:, 0], np.repeat(np.arange(len(count_B)), count_B))


@pytest.mark.parametrize("persistent", [True, False])
def test_workers_stay_between_passes_or_end_with_each(image_set, persistent):
    settings: dict[str, Any] = {"size": SIZE, "batch_size": 4, "workers": 1, "device": "cpu"}
    with open_validation(image_set, **settings, persistent_workers=persistent) as batches:
        left = []
        for _ in range(2):
            assert len(list(batches.epoch())) == len(batches)
            left.append(dict(batches._batches.feed.worker_pids))
    assert left == ([left[0]] * 2 if persistent else [{}, {}])


def test_batches_are_as_small_as_their_images_allow_plus_half_a_stride(image_set):
    (batches,) = passes(image_set)
    aspect_N = image_set.size_wh_N2[:, 1] / image_set.size_wh_N2[:, 0]
    for batch in batches:
        low, high = aspect_N[batch.indices].min(), aspect_N[batch.indices].max()
        shape = (high if high < 1 else 1, 1 / low if low > 1 else 1)
        assert batch.input_hw == tuple(int(np.ceil(side * SIZE / 32 + 0.5)) * 32 for side in shape)
    assert len({batch.input_hw for batch in batches}) > 1


@pytest.mark.parametrize("workers", [0, 2])
def test_every_pass_is_the_same_for_any_number_of_workers(image_set, workers):
    (expected,) = passes(image_set)
    for batches in passes(image_set, num_passes=3, workers=workers):
        assert_equal(batches, expected)


def test_an_abandoned_pass_does_not_change_the_next(image_set):
    (expected,) = passes(image_set)
    with open_validation(image_set, size=SIZE, batch_size=4, workers=1, device="cpu") as batches:
        for _ in range(2):
            next(iter(batches.epoch(0)))
        assert_equal([copied(batch) for batch in batches.epoch(0)], expected)
        assert (len(batches), batches.num_images) == (len(expected), len(image_set))


def test_labels_are_where_the_files_say_for_any_shape_of_batch(image_set):
    (batches,) = passes(image_set)
    for batch in batches:
        found = labels_in_images(batch.targets_T6, batch.letterbox, batch.input_hw)
        for row, index in enumerate(batch.indices.tolist()):
            label_n5, size_wh = image_set.labels.of(index), image_set.size_wh_N2[index]
            centre, half = label_n5[:, 1:3] * size_wh, label_n5[:, 3:] * size_wh / 2
            limit = np.tile(size_wh, 2)
            expected = np.clip(np.concatenate((centre - half, centre + half), 1), 0, limit)
            # One gain for both axes, and sides cut to whole pixels: off by a pixel of the resized image.
            np.testing.assert_allclose(found.box_L4[found.image_L == row], expected, atol=1.5 * limit.max() / SIZE)


def test_a_store_gives_the_same_images_and_decodes_each_once(image_set, tmp_path):
    (expected,) = passes(image_set)
    resized = ResizedImages(image_set, size=SIZE, augment=False)
    config = StoreConfig(folder=tmp_path, workers=1, backend="thread", progress=False)
    with Store.open(resized, config) as store:
        for batches in passes(image_set, num_passes=2, store=store):
            assert_equal(batches, expected)
        assert store.statistics().misses == 0
    with pytest.raises(ConfigError, match="The store holds 11 images, but the image set has 3"):
        open_validation(
            ImageSet(image_set.paths[:3], image_set.size_wh_N2[:3], image_set.labels, image_set.names),
            size=SIZE,
            batch_size=2,
            device="cpu",
            store=store,
        )


@pytest.mark.parametrize("images_at_once", [0, 1, 4, 5, 100])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_consecutive_batches_of_one_shape_are_joined_and_known_apart(image_set, batch_size, images_at_once):
    (expected,) = passes(image_set, batch_size=batch_size)
    pixels = images_at_once * max(batch.images[0, 0].numel() for batch in expected)
    with open_validation(image_set, size=SIZE, batch_size=batch_size, workers=0, device="cpu") as batches:
        joined = [(copied(batch), [*map(copied, parts)]) for batch, parts in together(batches.epoch(0), pixels)]
    assert_equal([part for _, parts in joined for part in parts], expected)
    if images_at_once < 2 * batch_size:
        assert len(joined) == len(expected)
    elif batch_size < 4:  # there are consecutive batches of one shape
        assert len(joined) < len(expected)
    for batch, parts in joined:
        assert {part.input_hw for part in parts} == {batch.input_hw}
        assert len(parts) == 1 or batch.images[0, 0].numel() * len(batch.images) <= pixels
    assert_equal([batch for batch, _ in joined], [with_images(expected, batch.paths) for batch, _ in joined])


def with_images(batches: list[ValidationBatch], paths: tuple[str, ...]) -> ValidationBatch:
    """The batch of these images, put together image by image."""
    own = [(batch, row) for path in paths for batch in batches for row, name in enumerate(batch.paths) if name == path]
    targets = []
    for number, (batch, row) in enumerate(own):
        row_T6 = batch.targets_T6[batch.targets_T6[:, 0] == row].clone()
        row_T6[:, 0] = number
        targets.append(row_T6)
    return ValidationBatch(
        images=torch.stack([batch.images[row] for batch, row in own]),
        targets_T6=torch.cat(targets),
        letterbox=type(own[0][0].letterbox)(
            *(torch.stack([batch.letterbox[field][row] for batch, row in own]) for field in range(3))
        ),
        indices=np.array([batch.indices[row] for batch, row in own]),
        counts_B=np.array([batch.counts_B[row] for batch, row in own]),
        paths=paths,
    )


def test_images_that_stay_on_the_device_look_the_same(image_set):
    (expected,) = passes(image_set)
    for batches in passes(image_set, on_device=True, num_passes=2):
        assert_equal(batches, expected, pixels=1)


def test_a_single_class_is_class_0(image_set):
    (batches,) = passes(image_set, single_cls=True)
    classes = torch.cat([batch.targets_T6[:, 1] for batch in batches])
    assert len(classes) > 5
    assert not classes.any()
    assert image_set.labels.class_box_T5[:, 0].any(), "the image set itself must not change"


def test_a_batch_larger_than_the_set_holds_the_set(image_set):
    (batches,) = passes(image_set, batch_size=64)
    assert [len(batch.indices) for batch in batches] == [len(image_set)]
