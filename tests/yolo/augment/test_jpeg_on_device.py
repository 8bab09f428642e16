"""JPEG files decoded by a device: plain ones there, all others by the CPU, each in its place."""

import logging
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from torch import Tensor

from flatout.feed import DecodeError
from flatout.images import header_of
from flatout.yolo.augment.gpu.jpeg import DeviceDecoded, decoded_on_device, nvjpeg, resize_bgr
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.letterbox import resize_long_side
from tests.feed.test_device import needs_gpu
from tests.yolo.augment.scenes import labels_of

SIZE = 64


def fake_decoder(files: list[Tensor]) -> list[Tensor]:
    """A decoder like nvJPEG: uint8 [3, H, W], RGB, no orientation; RuntimeError for damaged files."""
    decoded = []
    for file in files:
        image = cv2.imdecode(file.numpy(), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
        if image is None:
            raise RuntimeError("damaged")
        decoded.append(torch.from_numpy(np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1))))
    return decoded


def smooth(height: int, width: int, seed: int, step_px: int = 8) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 256, (height // step_px, width // step_px, 3), np.uint8)
    return np.asarray(cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC))


def set_of(paths: list[Path]) -> ImageSet:
    sizes = np.array([header_of(path.read_bytes()).size_wh for path in paths], np.int32)
    return ImageSet(tuple(map(str, paths)), sizes, labels_of([np.zeros((0, 5))] * len(paths)), ("a",))


def with_orientation(jpeg: bytes, orientation: int) -> bytes:
    tiff = b"MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + bytes([0, orientation, 0, 0]) + b"\0\0\0\0"
    body = b"Exif\0\0" + tiff
    return jpeg[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + jpeg[2:]


@pytest.fixture
def files(tmp_path) -> list[Path]:
    """Two plain files and three that are not, all of different sizes."""
    for number, (height, width) in enumerate([(96, 128), (64, 48)]):
        cv2.imwrite(str(tmp_path / f"{number}.jpg"), smooth(height, width, number))
    cv2.imwrite(str(tmp_path / "2-grey.jpg"), smooth(80, 120, 2)[..., 0])
    cv2.imwrite(str(tmp_path / "3.png"), smooth(72, 56, 3))
    upright = cv2.imencode(".jpg", smooth(48, 64, 4))[1].tobytes()
    (tmp_path / "4-turned.jpg").write_bytes(with_orientation(upright, 6))
    return sorted(tmp_path.iterdir())


def test_plain_files_go_to_the_device_and_the_others_to_the_cpu(files):
    image_set = set_of(files)
    decoded = DeviceDecoded(image_set, fake_decoder, size=SIZE)
    expected = ResizedImages(image_set, size=SIZE, augment=True)
    assert decoded.num_on_device == 2
    for index in range(len(files)):
        difference = np.abs(decoded[index].astype(int) - expected[index])
        assert difference.max() <= (1 if index < 2 else 0), files[index]
    assert "2 images decoded by the GPU" in str(decoded) and "by the CPU" in str(decoded)
    assert decoded.levels_off < 1


def test_a_decoder_whose_pixels_differ_too_much_is_not_used(files, monkeypatch, caplog):
    def wrong(content: list[Tensor]) -> list[Tensor]:
        return [255 - image for image in fake_decoder(content)]

    monkeypatch.setattr("flatout.yolo.augment.gpu.jpeg.nvjpeg", lambda device: wrong)
    with caplog.at_level(logging.WARNING):
        assert decoded_on_device(set_of(files), size=SIZE, device=torch.device("cpu"), budget_bytes=None) is None
    text = caplog.records[-1].getMessage()
    assert "pixels decoded by the GPU differ from the CPU's by" in text
    assert text.endswith("levels on average (at most 4.0 is accepted). The CPU builds a store of the readable images.")


def test_more_files_than_a_group_find_their_places(files):
    image_set = set_of(files * 60)
    decoded = DeviceDecoded(image_set, fake_decoder, size=SIZE)
    for index in (0, 131, 299):
        np.testing.assert_array_equal(decoded[index], decoded[index % 5])


def test_a_group_on_which_the_device_fails_is_decoded_by_the_cpu(files):
    def failing(content: list[Tensor]) -> list[Tensor]:
        raise RuntimeError("nvjpegDecodeBatched failed")

    image_set = set_of(files)
    decoded = DeviceDecoded(image_set, failing, size=SIZE)
    assert decoded.num_on_device == 0
    expected = ResizedImages(image_set, size=SIZE, augment=True)
    for index in range(len(files)):
        np.testing.assert_array_equal(decoded[index], expected[index])


def test_a_truncated_file_is_left_to_the_cpus_decoder(files):
    image_set = set_of(files)
    content = files[0].read_bytes()
    files[0].write_bytes(content[: len(content) // 2])
    with pytest.raises(DecodeError, match="missing"):
        DeviceDecoded(image_set, fake_decoder, size=SIZE)


def test_a_file_whose_size_changed_since_the_scan_is_named(files):
    image_set = set_of(files)
    cv2.imwrite(str(files[1]), smooth(40, 64, 9))
    with pytest.raises(
        DecodeError,
        match=r"1\.jpg is \d+ x \d+ px .* should be \d+ x \d+ .* it scans changed files\.$",
    ):
        DeviceDecoded(image_set, fake_decoder, size=SIZE)


@pytest.mark.parametrize("hw", [(75, 100), (200, 131), (64, 64)])
def test_images_are_resized_as_for_training_within_a_level(hw):
    image = smooth(hw[0] + hw[0] % 8, hw[1] + hw[1] % 8, 1)[: hw[0], : hw[1]]
    expected = resize_long_side(image, SIZE, augment=True).image
    planes = torch.from_numpy(np.ascontiguousarray(image[..., ::-1].transpose(2, 0, 1)))
    found = resize_bgr(planes, expected.shape[:2]).numpy()
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_without_a_gpu_nothing_is_decoded_there():
    assert nvjpeg("cpu") is None
    image_set = ImageSet(("a",), np.array([[4, 4]], np.int32), labels_of([np.zeros((0, 5))]), ("a",))
    assert decoded_on_device(image_set, size=SIZE, device=torch.device("cpu"), budget_bytes=None) is None


def test_images_that_do_not_fit_are_left_to_the_cpu(files, monkeypatch):
    monkeypatch.setattr("flatout.yolo.augment.gpu.jpeg.nvjpeg", lambda device: fake_decoder)
    image_set, device = set_of(files), torch.device("cpu")
    assert decoded_on_device(image_set, size=SIZE, device=device, budget_bytes=1000) is None
    assert decoded_on_device(image_set, size=SIZE, device=device, budget_bytes=10**6) is not None


def test_an_unreadable_file_leaves_all_files_to_the_cpu(files, monkeypatch, caplog):
    monkeypatch.setattr("flatout.yolo.augment.gpu.jpeg.nvjpeg", lambda device: fake_decoder)
    image_set = set_of(files)
    files[3].unlink()
    with caplog.at_level(logging.WARNING):
        assert decoded_on_device(image_set, size=SIZE, device=torch.device("cpu"), budget_bytes=None) is None
    assert "The CPU builds a store" in caplog.text


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("sampling", "colour_px"), [("444", 8), ("420", 32)])
def test_nvjpeg_is_within_about_a_level_of_the_cpu(sampling, colour_px, tmp_path):
    """The two upsample subsampled colours differently, so colours change slowly in the images for 4:2:0."""
    decode = nvjpeg("cuda")
    if decode is None:
        pytest.skip("torchvision with nvJPEG is not installed")
    paths = [tmp_path / f"{number}.jpg" for number in range(6)]
    how = [cv2.IMWRITE_JPEG_QUALITY, 95]
    how += [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{sampling}")]
    for number, path in enumerate(paths):
        grey = smooth(240, 320 - 8 * number, number)[..., :1] // 2
        cv2.imwrite(str(path), grey + smooth(240, 320 - 8 * number, number, colour_px) // 2, how)
    image_set = set_of(paths)
    decoded, expected = DeviceDecoded(image_set, decode, size=160), ResizedImages(image_set, size=160, augment=True)
    assert decoded.num_on_device == len(paths)
    difference = np.concatenate([np.abs(decoded[k].astype(int) - expected[k]).ravel() for k in range(len(paths))])
    assert difference.mean() <= 1.5
