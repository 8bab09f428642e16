"""Images as stores keep them: decoded at full size, or at a fraction of it on request; and the keys of their stores."""

import struct
from pathlib import Path

import cv2
import numpy as np
import pytest

from flatout.feed import DecodeError
from flatout.feed.store.home import key_of
from flatout.images import header_of
from flatout.yolo.augment.layout import resized_wh
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet
from tests.yolo.augment.scenes import labels_of
from tests.yolo.data.drawn_set import encoded, exif


def smooth_jpeg(height: int, width: int, orientation: int = 1) -> bytes:
    """A JPEG without details that are lost at 96 px, where the ways to shrink differ most."""
    coarse = np.random.default_rng(0).integers(0, 256, (height // 80 + 2, width // 80 + 2, 3), np.uint8)
    plain = encoded(".jpg", cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC))
    block = b"Exif\0\0" + exif(orientation)
    return plain[:2] + b"\xff\xe1" + struct.pack(">H", len(block) + 2) + block + plain[2:]


def set_of(path: Path) -> ImageSet:
    size_wh = np.array([header_of(path.read_bytes()).size_wh], np.int32)
    return ImageSet((str(path),), size_wh, labels_of([np.zeros((0, 5))]), ("a",))


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("hw", [(600, 800), (480, 640), (601, 803), (999, 250), (333, 77)])
def test_a_shrunk_decode_changes_no_size_and_few_levels(hw, orientation, tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(smooth_jpeg(*hw, orientation))
    image_set = set_of(path)
    for size in (96, 128, 320, 500, max(hw), 1000):
        whole, shrunk = (
            ResizedImages(image_set, size=size, augment=True, shrunk=is_shrunk).decode(0) for is_shrunk in (False, True)
        )
        assert shrunk.shape[1::-1] == tuple(resized_wh(image_set.size_wh_N2, size)[0]) == whole.shape[1::-1]
        # Also where a side is not a multiple of 8 px, to which libjpeg rounds up: squeezing by that costs 6 levels.
        assert np.abs(shrunk.astype(int) - whole).mean() < 1
        if size >= max(hw):
            np.testing.assert_array_equal(shrunk, whole)


def test_other_formats_are_decoded_at_full_size(tmp_path):
    path = tmp_path / "a.png"
    path.write_bytes(encoded(".png", np.random.default_rng(1).integers(0, 256, (200, 300, 3), np.uint8)))
    whole, shrunk = (ResizedImages(set_of(path), size=64, augment=True, shrunk=s).decode(0) for s in (False, True))
    np.testing.assert_array_equal(shrunk, whole)


def test_a_truncated_file_is_refused_with_and_without_shrinking(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(smooth_jpeg(480, 640))
    image_set = set_of(path)
    path.write_bytes(path.read_bytes()[:-3000])
    for shrunk in (False, True):
        with pytest.raises(DecodeError, match=r"cut off: \d+% of its rows are missing"):
            ResizedImages(image_set, size=96, augment=True, shrunk=shrunk).decode(0)


def test_shrunk_images_have_a_store_of_their_own(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(smooth_jpeg(60, 80))
    names = {ResizedImages(set_of(path), size=64, augment=True, shrunk=s).parameters for s in (False, True)}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"augment": True}, "997da003c645294a-39988efb0ecb312a95a51bb58adbe440"),
        ({"augment": False}, "cc654ceff651dd05-9d9643023edeca0133f07e53f336992b"),
        ({"augment": True, "shrunk": True}, "850cea55eb0b765b-76677fec7f03ab78dfabce13b54fe4b0"),
    ],
)
def test_existing_stores_keep_the_names_they_had_before_the_class_was_renamed(settings, name, monkeypatch):
    monkeypatch.setattr(cv2, "__version__", "4.10.0")
    # Files that do not exist, so that sizes and times of files are not part of the key.
    paths = ("/nonexistent/flatout/a.jpg", "/nonexistent/flatout/b.jpg")
    image_set = ImageSet(paths, np.array([[64, 48]] * 2, np.int32), labels_of([np.zeros((0, 5))] * 2), ("a",))
    assert key_of(ResizedImages(image_set, size=64, **settings)).name == name


def test_a_renamed_class_keeps_its_stores_and_a_subclass_of_it_has_its_own(tmp_path):
    class Former:
        parameters = "as they are"

        def __len__(self) -> int:
            return 1

        def path(self, index: int) -> str:
            return str(tmp_path / "absent")

    class Renamed(Former):
        store_kind = Former.__qualname__

    class Derived(Renamed):
        pass

    assert key_of(Renamed()) == key_of(Former())
    assert key_of(Derived()) != key_of(Former())
