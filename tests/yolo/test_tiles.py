"""Detection by tiles: every object is found once and whole, and small images are detected as ever."""

import mmap
import os
import struct
import tracemalloc
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import ConfigError
from flatout.feed import DecodeError
from flatout.images import TileGrid, in_opencv_order, map_image, read_image, read_large, release
from flatout.images.decoding import read_facts
from flatout.progress import StepProgress
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.detector import Detector
from flatout.yolo.evaluate import Evaluate
from flatout.yolo.evaluate import test as run_test
from flatout.yolo.evaluate.tiles import TileConfig, TileDetector, TiledInput
from flatout.yolo.nms import NmsConfig
from flatout.yolo.nms.merge_tiles import TileRows, merge_tiles, suppress
from flatout.yolo.options import TestOptions
from flatout.yolo.predict.detect import detect as run_detect
from flatout.yolo.predict.files import Frame, Origin, already_read
from flatout.yolo.predict.options import DetectOptions, PredictOptions
from flatout.yolo.predict.result import Result
from flatout.yolo.predict.results import predictor_for, results_of
from flatout.yolo.weights import save_weights
from tests.yolo.predict.small_sources import confident_network, weights_file
from tests.yolo.test_load import weights_of
from tests.yolo.tile_scenes import RectangleNetwork, find_rectangles, random_boxes, scene, tiled_set

pytestmark = pytest.mark.usefixtures("one_thread")

TILE = 64


def detect(images: list[np.ndarray], *, overlap: float = 0.2, full_view: bool = False, at_once: int = 3, **nms):
    """Boxes with classes of each image, sorted, in whole pixels."""
    detector = TileDetector(
        find_rectangles,
        TileConfig(tile=TILE, overlap=overlap, full_view=full_view),
        size=TILE,
        stride=32,
        device=torch.device("cpu"),
        nms=NmsConfig(conf_thres=0.1, **nms),
        at_once=at_once,
    )
    found = [each for key, image in enumerate(images) for each in detector.add(key, image)]
    found += list(detector.rest())
    assert sorted(each.key for each in found) == list(range(len(images)))
    rows = {each.key: each.row_n6 for each in found}
    return [sorted(map(tuple, rows[key][:, [0, 1, 2, 3, 5]].round().astype(int).tolist())) for key in sorted(rows)]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.1, 0.2, 0.5]), st.integers(65, 230), st.integers(65, 230))
def test_every_object_is_found_once_and_whole_wherever_borders_cut_it(seed, overlap, height, width):
    rng = np.random.default_rng(seed)
    boxes = random_boxes(rng, height, width, count=12, sides=(5, 40), gap=8)
    assert detect([scene(height, width, boxes)], overlap=overlap) == [sorted(boxes)]


def test_the_rule_for_cut_boxes_is_what_finds_them_once():
    """The negative control: NMS alone keeps the parts."""
    boxes = [(57, 20, 69, 40, 0)]
    image, grid = scene(64, 115, boxes), TileGrid.overlapping((64, 115), TILE, 0.2)
    assert detect([image]) == [boxes]
    rows, tiles = [], []
    for number, (left, top, right, bottom) in enumerate(grid.window_T4.tolist()):
        inside = find_rectangles(torch.from_numpy(image[top:bottom, left:right].transpose(2, 0, 1))[None])[0]
        for cx, cy, w, h, score, *_ in inside[inside[:, 4] > 0].tolist():
            rows.append([cx - w / 2 + left, cy - h / 2 + top, cx + w / 2 + left, cy + h / 2 + top, score, 0])
            tiles.append(number)
    assert len(rows) == 2 and rows[0][2] == 64
    found = TileRows(np.array(rows, np.float32), np.array(tiles))
    assert len(merge_tiles(found, grid, iou_thres=0.7)) == 1
    assert len(suppress(found.row_D6, iou_thres=0.7, agnostic=False)) == 2


def test_an_object_longer_than_several_tiles_is_put_together():
    boxes = [(3, 30, 240, 38, 1), (20, 60, 28, 250, 0)]
    assert detect([scene(256, 250, boxes)]) == [sorted(boxes)]


def test_tiles_of_several_images_share_batches_without_mixing_them():
    rng = np.random.default_rng(5)
    sizes = [(200, 150), (64, 64), (40, 90), (150, 200), (64, 65)]
    scenes = [random_boxes(rng, *size, count=8, sides=(6, 30), gap=8) for size in sizes]
    images = [scene(*size, boxes) for size, boxes in zip(sizes, scenes, strict=True)]
    for at_once in (1, 5, 100):
        assert detect(images, at_once=at_once) == [sorted(boxes) for boxes in scenes]


def test_the_full_view_adds_objects_longer_than_the_overlap_only():
    boxes = [(8, 8, 20, 20, 0), (4, 28, 252, 200, 1)]
    assert detect([scene(256, 256, boxes)], full_view=True) == [sorted(boxes)]
    grid = TileGrid.overlapping((64, 230), TILE, 0.2)
    part, short, long = [40, 5, 64, 60, 0.9, 0], [5, 5, 15, 15, 0.9, 0], [40, 5, 140, 60, 0.3, 0]
    found = TileRows(np.array([part, short, long], np.float32), np.array([0, -1, -1]))
    assert merge_tiles(found, grid, iou_thres=0.45)[:, :4].tolist() == [long[:4]]


def test_classes_do_not_suppress_each_other_in_images_of_more_than_4096_px():
    grid = TileGrid.overlapping((64, 9000), TILE, 0.0)
    left = np.arange(0, 8192 + 1, 4096) + 10.0
    rows = np.stack((left, 0 * left + 5, left + 20, 0 * left + 25, 0 * left + 0.5, [2, 1, 0]), 1).astype(np.float32)
    tiles = np.array([int(np.searchsorted(grid.xs, x, side="right")) - 1 for x in left])
    assert len(merge_tiles(TileRows(rows, tiles), grid, iou_thres=0.45)) == 3


# Images that are not larger than a tile


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> Detector:
    return Detector(weights_file(tmp_path_factory.mktemp("weights") / "a.pt"), device="cpu")


@pytest.mark.parametrize("size_wh", [(96, 96), (50, 90), (96, 40)])
def test_an_image_not_larger_than_a_tile_gives_the_same_result_as_without_tiles(detector, size_wh):
    image = np.random.default_rng(3).integers(0, 255, (size_wh[1], size_wh[0], 3), np.uint8)
    plain = detector.predict(image, img_size=96, conf_thres=0.1)[0]
    tiled = detector.predict(image, img_size=96, conf_thres=0.1, tiles=96)[0]
    assert len(plain)
    for name in ("boxes", "scores", "classes"):
        np.testing.assert_array_equal(getattr(plain, name), getattr(tiled, name))


def test_results_are_those_of_whole_images_in_order(detector):
    rng = np.random.default_rng(1)
    images = [rng.integers(0, 255, (h, w, 3), np.uint8) for h, w in ((150, 200), (60, 60), (96, 300))]
    results = detector.predict(images, img_size=64, conf_thres=0.1, tiles=64, at_once=4)
    assert [result.image.shape for result in results] == [image.shape for image in images]
    for result in results:
        height, width = result.image.shape[:2]
        assert (result.boxes >= 0).all() and (result.boxes <= [width, height, width, height]).all()
        assert (np.diff(result.scores) <= 0).all()
    assert results[0].boxes[:, 2].max() > 100 and results[0].boxes[:, 3].max() > 100


# Scores on whole images


def test_scores_are_those_of_whole_images(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [(200, 300), (64, 64), (130, 90)]
    scenes = [random_boxes(rng, *size, count=10, sides=(8, 40), gap=8) for size in sizes]
    images = tiled_set(tmp_path / "set", scenes, sizes)
    tiles = TiledInput(images, TileConfig(tile=TILE), size=TILE, stride=32, device=torch.device("cpu"), threads=1)
    outcome = Evaluate(names=images.names).run(RectangleNetwork(), tiles, plots=tmp_path)
    evaluation = outcome.evaluation
    assert (evaluation.num_images, evaluation.num_labels) == (3, sum(map(len, scenes)))
    assert evaluation.map50_95 > 0.99 and evaluation.recall == 1.0
    plotted = cv2.imread(str(tmp_path / "test_batch0_pred.jpg"))
    assert plotted.shape[0] > 200 and plotted.shape[1] > 300, "an image of 200 x 300 px is not shrunk to a tile"
    # One missed object is missed in the score.
    fewer = tiled_set(tmp_path / "fewer", [scenes[0][1:], *scenes[1:]], sizes)
    missing = ImageSet(fewer.paths, images.size_wh_N2, images.labels, images.names)
    worse = Evaluate(names=images.names).run(
        RectangleNetwork(),
        TiledInput(missing, TileConfig(tile=TILE), size=TILE, stride=32, device=torch.device("cpu"), threads=1),
    )
    assert worse.evaluation.recall < 1


def test_ranks_share_the_images_and_find_together_what_one_finds(tmp_path):
    rng = np.random.default_rng(4)
    sizes = [(90, 70), (64, 100), (80, 80)]
    scenes = [random_boxes(rng, *size, count=5, sides=(8, 30), gap=8) for size in sizes]
    images = tiled_set(tmp_path, scenes, sizes)

    def found(rank: int, num_ranks: int) -> dict[int, list[list[float]]]:
        tiles = TiledInput(
            images,
            TileConfig(tile=TILE),
            size=TILE,
            stride=32,
            device=torch.device("cpu"),
            threads=1,
            rank=rank,
            num_ranks=num_ranks,
        )
        batches = tiles.detected(find_rectangles, NmsConfig())
        return {int(batch.indices[0]): detections.row_D6.tolist() for batch, detections in batches}

    first, second = found(0, 2), found(1, 2)
    assert sorted(first) == [0, 2] and sorted(second) == [1]
    assert first | second == found(0, 1)
    assert found(5, 8) == {}


# Large files


@pytest.mark.parametrize("suffix", ["bmp", "tif"])
def test_a_mapped_file_has_the_pixels_of_a_decoded_one(tmp_path, suffix):
    image = np.random.default_rng(0).integers(0, 255, (37, 51, 3), np.uint8)
    path = str(tmp_path / f"a.{suffix}")
    cv2.imwrite(path, image, [cv2.IMWRITE_TIFF_COMPRESSION, 1] if suffix == "tif" else [])
    mapped = map_image(path, read_facts(path).header)
    assert mapped is not None
    np.testing.assert_array_equal(mapped, read_image(path))
    release(mapped)
    np.testing.assert_array_equal(mapped, image)


@pytest.mark.parametrize("suffix", ["bmp", "tif"])
def test_a_mapped_file_in_another_order_is_copied_into_a_file_for_opencv(tmp_path, monkeypatch, suffix):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("flatout.images.decoded_file.BAND_PX", 20)
    path = str(tmp_path / f"a.{suffix}")
    cv2.imwrite(path, gradients(3), [cv2.IMWRITE_TIFF_COMPRESSION, 1] if suffix == "tif" else [])
    mapped = map_image(path, read_facts(path).header)
    assert mapped is not None and min(mapped.strides) < 0
    ordered = in_opencv_order(mapped)
    assert is_mapped(ordered) and min(ordered.strides) > 0 and in_opencv_order(ordered) is ordered
    np.testing.assert_array_equal(ordered, gradients(3))


LARGE_FROM = 1000
"""Pixels from which an image is large in these tests."""


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("flatout.images.large.most_pixels", lambda bits: LARGE_FROM)
    monkeypatch.setattr("flatout.images.decoded_file.STRIP_BYTES", 1500)  # several strips
    monkeypatch.setattr("flatout.images.decoded_file.PIECE_BYTES", 700)
    monkeypatch.setattr("flatout.images.decoded_file.BAND_PX", 20)


def is_mapped(image: np.ndarray) -> bool:
    base: object = image
    while isinstance(base, np.ndarray):
        base = base.base
    return isinstance(base, mmap.mmap)


def gradients(channels: int) -> np.ndarray:
    """70 x 51 px, smooth, so that a PNG uses filters that refer to the row above."""
    steps = np.random.default_rng(0).integers(-3, 4, (70, 51, channels)).cumsum(0).cumsum(1)
    return np.ascontiguousarray(steps.astype(np.uint8))


def assert_mapped_with_its_pixels(path: str) -> None:
    found = read_large(path)
    assert is_mapped(found) and not found.flags.writeable
    np.testing.assert_array_equal(found, read_image(path))
    release(found)
    np.testing.assert_array_equal(found, read_image(path))


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("flags", [(), (cv2.IMWRITE_PNG_COMPRESSION, 9)], ids=["one filter", "several filters"])
def test_a_large_png_is_decoded_into_a_file_with_the_same_pixels(tmp_path, channels, flags):
    path = str(tmp_path / "a.png")
    cv2.imwrite(path, gradients(channels), flags)
    assert_mapped_with_its_pixels(path)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("channels", [1, 3])
def test_a_large_jpeg_is_decoded_into_a_file_with_the_same_pixels(tmp_path, channels, orientation):
    path = tmp_path / "a.jpg"
    content = cv2.imencode(".jpg", gradients(channels))[1].tobytes()
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01" + struct.pack(">HHI", orientation, 0, 0)
    path.write_bytes(content[:2] + b"\xff\xe1" + struct.pack(">H", len(exif) + 2) + exif + content[2:])
    found = read_large(str(path))
    assert is_mapped(found)
    np.testing.assert_array_equal(found, read_image(str(path)))
    assert found.shape[:2] == ((51, 70) if orientation >= 5 else (70, 51))
    # Rows of tiles are read one after the other, never columns.
    assert abs(found.strides[0]) > abs(found.strides[1])


TIFF_COMPRESSIONS = {"none": 1, "lzw": 5, "jpeg": 7, "deflate": 8, "packbits": 32773}


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("compression", TIFF_COMPRESSIONS)
def test_a_large_tiff_is_decoded_into_a_file_with_the_same_pixels(tmp_path, channels, compression):
    path = str(tmp_path / "a.tif")
    flags = [cv2.IMWRITE_TIFF_COMPRESSION, TIFF_COMPRESSIONS[compression], cv2.IMWRITE_TIFF_ROWSPERSTRIP, 16]
    cv2.imwrite(path, gradients(channels), flags)
    assert_mapped_with_its_pixels(path)


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "way",
    [
        {"tile": (32, 32)},
        {"tile": (16, 32), "compression": "zlib", "predictor": True},
        {"tile": (32, 16), "compression": "zlib", "bigtiff": True, "byteorder": ">"},
        {"rowsperstrip": 1, "compression": "zlib", "bigtiff": True},
        {"rowsperstrip": 13, "byteorder": ">"},
        {},
    ],
    ids=str,
)
def test_a_large_tiff_of_other_programs_is_decoded_into_a_file_with_the_same_pixels(tmp_path, bits, channels, way):
    import tifffile

    path = str(tmp_path / "a.tif")
    image = gradients(channels).astype(np.uint16) * 257 + 3 if bits == 16 else gradients(channels)
    tifffile.imwrite(path, image.squeeze(), photometric="rgb" if channels == 3 else "minisblack", **way)
    found = read_large(path)
    assert is_mapped(found) and not found.flags.writeable
    np.testing.assert_array_equal(found, read_image(path))


@pytest.mark.usefixtures("small_limits")
def test_a_damaged_large_file_is_judged_by_the_usual_decoders(tmp_path):
    for name, least in (("a.png", 200), ("a.jpg", 300), ("a.tif", 300)):
        whole = cv2.imencode(name, gradients(3))[1].tobytes()
        path = tmp_path / name
        for content in (whole[: len(whole) // 2], whole[:least] + bytes([whole[least] ^ 255]) + whole[least + 1 :]):
            path.write_bytes(content)
            outcomes = []
            for read in (read_large, read_image):
                try:
                    outcomes.append(read(str(path)).tobytes())
                except DecodeError as error:
                    outcomes.append(str(error))
            assert outcomes[0] == outcomes[1]


@pytest.mark.usefixtures("small_limits")
def test_without_room_on_the_disk_a_large_file_is_decoded_in_memory(tmp_path, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    cv2.imwrite(str(tmp_path / "a.png"), gradients(3))
    found = read_large(str(tmp_path / "a.png"))
    assert not is_mapped(found)
    np.testing.assert_array_equal(found, gradients(3))


@pytest.mark.usefixtures("small_limits")
def test_the_file_of_decoded_pixels_has_no_name_and_is_gone_with_the_image(tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), gradients(3))
    before = len(os.listdir("/proc/self/fd"))
    found = read_large(str(tmp_path / "a.png"))
    assert list((tmp_path / "cache").rglob("*.*")) == []
    del found
    assert len(os.listdir("/proc/self/fd")) == before


def test_compressed_and_truncated_files_are_not_mapped(tmp_path):
    image = np.zeros((40, 40, 3), np.uint8)
    for name, flags in (("a.png", []), ("a.tif", [cv2.IMWRITE_TIFF_COMPRESSION, 5])):
        path = str(tmp_path / name)
        cv2.imwrite(path, image, flags)
        assert map_image(path, read_facts(path).header) is None
        np.testing.assert_array_equal(read_large(path), image)


@pytest.mark.parametrize(("dtype", "most"), [(np.uint8, "1,000"), (np.uint16, "250")])
def test_an_image_above_the_limit_is_refused_with_the_flag_that_allows_it(tmp_path, monkeypatch, dtype, most):
    """The limit of images with 16 bits is lower, because their decoder takes more memory."""
    path = tmp_path / "a.png"
    side = 40 if dtype == np.uint8 else 20
    cv2.imwrite(str(path), np.random.default_rng(0).integers(0, 255, (side, side, 3), dtype))
    monkeypatch.setattr("flatout.images.decoding.MAX_PIXELS", 1000)
    with pytest.raises(Exception, match=rf"{side} x {side} pixels; at most {most} are decoded. Use --tiles"):
        read_image(str(path))
    assert read_large(str(path)).shape == (side, side, 3)


# Options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tiles": 8}, "--tiles 8: tiles have sides of 32 px or more"),
        ({"tiles": 64, "tile_overlap": 1.0}, "--tile-overlap 1.0 must be 0 or more and below 1"),
        ({"tile_full_view": True}, "--tile-full-view is a pass in addition to tiles: use it with --tiles"),
    ],
)
def test_mistakes_about_tiles_are_named(options, message):
    for kind in (PredictOptions, TestOptions):
        with pytest.raises(ConfigError, match=message):
            kind(**options)


def test_what_tiles_exclude_is_refused():
    with pytest.raises(ConfigError, match="--save-hybrid"):
        TestOptions(tiles=64, save_hybrid=True)
    with pytest.raises(ConfigError, match="--task study"):
        TestOptions(tiles=64, task="study")


# Commands


def test_detect_writes_labels_and_plots_of_the_whole_image(detector, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    image = np.random.default_rng(2).integers(0, 255, (150, 200, 3), np.uint8)
    cv2.imwrite("large.png", image)
    found: list[Result] = []
    options = DetectOptions(
        weights=(str(detector.weights),),
        source="large.png",
        img_size=64,
        tiles=64,
        conf_thres=0.1,
        save_txt=True,
        device="cpu",
    )
    outcome = run_detect(options, each=found.append)
    assert cv2.imread(str(outcome.folder / "large.png")).shape == image.shape
    rows = np.loadtxt(outcome.folder / "labels/large.txt")
    assert len(rows) == len(found[0]) > 0
    corner = (rows[:, 1:3] + rows[:, 3:5] / 2).max(0)
    np.testing.assert_allclose(corner * [200, 150], found[0].pixel_boxes[:, 2:].max(0), atol=1e-3)


def test_weights_that_were_trained_on_tiles_say_so_when_images_are_not_cut(tmp_path, caplog):
    save_weights(tmp_path / "a.pt", weights_of(confident_network(), tiles={"tile": 64, "overlap": 0.2}))
    model, image = Detector(tmp_path / "a.pt", device="cpu"), np.zeros((64, 64, 3), np.uint8)
    with caplog.at_level("INFO"):
        model(image, img_size=64, tiles=64)
        assert "trained on tiles" not in caplog.text
        model(image, img_size=64)
    assert "These weights were trained on tiles of 64 px: use --tiles 64 for larger images." in caplog.text


def test_detect_shows_the_tiles_of_an_image_that_takes_long(detector, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("large.png", np.zeros((64, 200, 3), np.uint8))
    options = DetectOptions(weights=(str(detector.weights),), source="large.png", img_size=64, tiles=64, device="cpu")
    progress = partial(StepProgress, every_s=0.0)
    monkeypatch.setattr("flatout.yolo.predict.detect.StepProgress", progress)
    with caplog.at_level("INFO"):
        run_detect(options)
    assert [f"tiles {done}/4" in caplog.text for done in (1, 2, 3, 4)] == [True] * 4
    # The time that is left counts parts of an image: the first ones give a bound, the others an estimate.
    monkeypatch.setattr("flatout.yolo.predict.detect.UPDATE_S", 0.0)
    caplog.clear()
    with caplog.at_level("INFO"):
        run_detect(options)
    lines = [line for line in caplog.messages if "tiles" in line]
    assert len(lines) == 4 and not any("just started" in line for line in lines)


def test_a_stop_does_not_wait_for_the_other_tiles_of_an_image(detector):
    device, model = detector._networks()
    predictor = predictor_for(model, device, PredictOptions(img_size=64, tiles=64, conf_thres=0.1))
    seen: list[int] = []
    images = [np.zeros((64, width, 3), np.uint8) for width in (64, 2000, 64)]
    frames = [partial(already_read, Frame(image, Origin(str(n), "array", n, 3))) for n, image in enumerate(images)]
    found = list(
        results_of(
            frames, predictor, threads=1, stopped=lambda: len(seen) >= 5, on_tile=lambda done, total: seen.append(total)
        )
    )
    assert seen == [1, 39, 39, 39, 39] and [result.path for result in found] == ["0"]


def test_test_scores_whole_images_and_says_so(detector, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    boxes = [(10, 10, 40, 40, 0), (60, 20, 90, 50, 1)]
    images = tiled_set(tmp_path / "images/val", [boxes], [(100, 150)])
    (tmp_path / "labels/val").mkdir(parents=True)
    lines = [" ".join(map(str, row)) for row in images.labels.class_box_T5.tolist()]
    (tmp_path / "labels/val/0.txt").write_text("\n".join(lines).replace("0.0 ", "0 ", 1).replace("1.0 ", "1 ", 1))
    (tmp_path / "data.yaml").write_text(f"val: {tmp_path / 'images/val'}\nnames: [dark, light]\n")
    options = TestOptions(
        weights=(str(detector.weights),), data="data.yaml", img_size=64, tiles=64, batch_size=4, workers=0, device="cpu"
    )
    result = run_test(options)
    assert "whole image, in tiles of 64 px, at batch-size 1" in result.text  # on a CPU, whatever --batch-size says
    assert (result.outcome.evaluation.num_images, result.outcome.evaluation.num_labels) == (1, 2)


# Memory


def test_detection_in_a_large_uncompressed_image_takes_the_memory_of_a_row_of_tiles(tmp_path):
    side, tile = 10_240, 1024
    path = tmp_path / "large.bmp"
    with path.open("wb") as file:
        file.write(b"BM" + struct.pack("<IHHI", 54 + 3 * side * side, 0, 0, 54))
        file.write(struct.pack("<IiiHHIIiiII", 40, side, side, 1, 24, 0, 0, 0, 0, 0, 0))
        file.truncate(54 + 3 * side * side)  # black, without taking room on the disk
    detector = TileDetector(
        lambda images: torch.zeros(len(images), 1, 7),
        TileConfig(tile=tile, overlap=0.0),
        size=tile,
        stride=32,
        device=torch.device("cpu"),
        nms=NmsConfig(),
    )
    tracemalloc.start()
    try:
        image = read_large(str(path))
        assert image.shape == (side, side, 3) and image.nbytes == 3 * side * side
        (found,) = detector.add(0, image)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found.row_n6) == 0
    assert peak_bytes < 3 * (3 * side * tile) < image.nbytes / 3


def test_the_progress_of_a_test_counts_tiles(tmp_path, monkeypatch, caplog):
    images = tiled_set(tmp_path / "set", [[], []], [(64, 200), (64, 64)])
    monkeypatch.setattr("flatout.progress.LINE_INTERVAL_S", 0.0)
    config = TileConfig(tile=64, full_view=True)
    tiles = TiledInput(images, config, size=64, stride=32, device=torch.device("cpu"), threads=1)
    with caplog.at_level("INFO"):
        Evaluate(names=images.names).run(RectangleNetwork(), tiles, show_progress=True)
    # Four tiles and the full view of the first image, one tile of the second; images may differ in size.
    lines = [line for line in caplog.messages if line.startswith("evaluating: ")]
    assert [line.split(",")[0] for line in lines] == [f"evaluating: {done}/6 tiles" for done in range(1, 7)]


def test_a_stop_during_a_validation_does_not_wait_for_the_other_tiles_of_an_image(tmp_path):
    images = tiled_set(tmp_path / "set", [[]], [(64, 2000)])
    tiles = TiledInput(images, TileConfig(tile=64), size=64, stride=32, device=torch.device("cpu"), threads=1)
    num_calls = 0

    def stop_at_third() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Evaluate(names=images.names).run(RectangleNetwork(), tiles, watch=stop_at_third)
    assert num_calls == 3
