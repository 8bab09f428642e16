"""Every target of a batch knows its label: ids travel through mosaics, warps, copies and pastes, on host and device."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("cv2", reason="the host's side needs OpenCV")

from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.augment.gpu.input import training_input
from flatout.yolo.augment.source import TrainingSource, quad
from flatout.yolo.data.image_set import ImageSet
from tests.yolo.augment.test_device_input import AS_BYTES, AUGMENT, SIZE, host_batches, plan_of, resized_set

pytestmark = pytest.mark.usefixtures("one_thread")
UNCHANGED = AugmentConfig(mosaic=0, mixup=0, paste_in=0, degrees=0, translate=0, scale=0, fliplr=0)
WITH_IDS = replace(AS_BYTES, label_ids=True)


def id_batches(image_set: ImageSet, resized: list[np.ndarray], augment: AugmentConfig) -> list[tuple[np.ndarray, ...]]:
    """Targets and label ids of every batch, from the host's source."""
    source = TrainingSource(image_set, resized, augment, size=SIZE, label_ids=True)
    return [(batch["targets"], batch["label_ids"][:, 0]) for batch in host_batches(source, plan_of(image_set))]


def test_the_ids_of_images_that_are_shown_as_they_are_name_their_labels_in_order():
    image_set, resized = resized_set(1, augment=True)
    plan = plan_of(image_set)
    source = TrainingSource(image_set, resized, UNCHANGED, size=SIZE, label_ids=True)
    first_N = image_set.labels.first_N
    for batch in host_batches(source, plan):
        expected = [np.arange(first_N[index], first_N[index + 1]) for index in batch.indices]
        assert batch["label_ids"][:, 0].tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize("polygons", ["none", "some", "all"])
def test_a_target_has_the_class_of_its_label_and_pasted_objects_have_none(polygons):
    image_set, resized = resized_set(2, augment=True, polygons=polygons)
    class_T = image_set.labels.class_box_T5[:, 0]
    batches = id_batches(image_set, resized, replace(AUGMENT, paste_in=0.7, copy_paste=0.5))
    ids = np.concatenate([ids for _, ids in batches])
    for targets, label_T in batches:
        assert len(targets) == len(label_T)
        own = label_T >= 0
        assert (targets[own, 1] == class_T[label_T[own]]).all()
    assert len(np.unique(ids[ids >= 0])) > len(class_T) / 2
    assert (ids < 0).any() == (polygons != "none")  # only objects with polygons are pasted or copied


@pytest.mark.parametrize("polygons", ["none", "some"])
@pytest.mark.parametrize("bucket", [None, 16])
def test_the_device_delivers_the_ids_of_the_host(polygons, bucket):
    image_set, resized = resized_set(3, augment=True, polygons=polygons)
    augment = replace(AUGMENT, paste_in=0.5)
    expected = id_batches(image_set, resized, augment)
    config = replace(WITH_IDS, target_bucket=bucket)
    with training_input(
        image_set, resized, augment, plan_of(image_set), size=SIZE, device="cpu", config=config
    ) as batches:
        found = [(batch["targets"].numpy().copy(), batch["label_ids"][:, 0].numpy().copy()) for batch in batches]
    assert len(found) == len(expected)
    for (target_T6, label_T), (_, expected_T) in zip(found, expected, strict=True):
        assert len(target_T6) == len(label_T)
        assert label_T[target_T6[:, 0] >= 0].tolist() == expected_T.tolist()


def test_joined_groups_of_four_keep_the_rows_of_their_targets():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 3, 4, 4), dtype=np.uint8)
    targets = rng.random((12, 6), dtype=np.float32)
    targets[:, 0] = np.sort(rng.integers(0, 8, 12))
    _, joined, row_T = quad(images, targets, np.array([0.1, 0.9]))
    assert joined[:, 1].tolist() == targets[row_T, 1].tolist()
    assert (targets[row_T, 0] // 4).tolist() == joined[:, 0].tolist()
    assert set(targets[row_T, 0]) == set(targets[:, 0]) - {1, 2, 3}  # the first group shows its first image only
