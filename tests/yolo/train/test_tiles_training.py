"""Training on tiles: which labels and empty tiles are used, that pixels and labels agree, and that runs repeat."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flatout.yolo
from flatout.errors import ConfigError, DataError
from flatout.feed import Store, StoreConfig
from flatout.images import read_image
from flatout.yolo.augment.samples import TileImages, WholeImages
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.tile_set import MIN_SIDE_PX, TileSet, choose_tiles, clip_labels, cut_into_tiles
from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
from flatout.yolo.label_audit.statistics import FILE_NAME, read_statistics
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train
from flatout.yolo.train.recipe import YoloRecipe
from flatout.yolo.weights import read_weights
from tests.yolo.train.conftest import options_for
from tests.yolo.train.test_train import assert_same_end, results_of, trained

pytestmark = pytest.mark.usefixtures("one_thread")


def image_set(
    labels: list[list[list[float]]], sizes_wh: list[tuple[int, int]], paths: list[str] | None = None
) -> ImageSet:
    """Labels of each image: class, left, top, right, bottom in pixels."""
    rows = [
        [kind, (a + c) / 2 / width, (b + d) / 2 / height, (c - a) / width, (d - b) / height]
        for own, (width, height) in zip(labels, sizes_wh, strict=True)
        for kind, a, b, c, d in own
    ]
    first = np.concatenate(([0], np.cumsum([len(own) for own in labels]))).astype(np.int64)
    box = np.array(rows, np.float32).reshape(-1, 5)
    flat = Labels(box, first, np.zeros((0, 2), np.float32), np.zeros(len(rows) + 1, np.int64))
    names = tuple(f"class {number}" for number in range(3))
    return ImageSet(
        tuple(paths or [f"{n}.png" for n in range(len(sizes_wh))]), np.array(sizes_wh, np.int32), flat, names
    )


def boxes_of(tiles: TileSet, tile: int) -> list[list[float]]:
    """Class and box of a tile's labels, in pixels of the image."""
    left, top, right, bottom = tiles.window_N4[tile].tolist()
    width, height = right - left, bottom - top
    rows = tiles.labels.of(tile).astype(np.float64)
    centre, half = rows[:, 1:3] * [width, height], rows[:, 3:] * [width, height] / 2
    corners = np.concatenate((centre - half, centre + half), 1) + np.array([left, top, left, top])
    return [[kind, *box] for kind, box in zip(rows[:, 0].tolist(), corners.round(3).tolist(), strict=True)]


# Labels


def test_a_label_is_clipped_to_the_tile_and_kept_if_enough_of_it_is_visible():
    images = image_set([[[1, 90, 10, 130, 30], [2, 95, 50, 105, 60]]], [(200, 100)])
    tiles = cut_into_tiles(images, tile=100, overlap=0.0, min_visible=0.5)
    assert tiles.window_N4.tolist() == [[0, 0, 100, 100], [100, 0, 200, 100]]
    # A quarter of the first is in the first tile; the second is cut in half.
    assert boxes_of(tiles, 0) == [[2, 95, 50, 100, 60]]
    assert boxes_of(tiles, 1) == [[1, 100, 10, 130, 30], [2, 100, 50, 105, 60]]
    assert len(boxes_of(cut_into_tiles(images, tile=100, overlap=0.0, min_visible=0.2), 0)) == 2


@settings(deadline=None)
@given(st.integers(0, 10_000), st.floats(0.05, 1))
def test_labels_in_tiles_follow_the_rule(seed, min_visible):
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 90, (12, 2))
    box_L4 = np.concatenate((low, low + rng.uniform(0.5, 40, (12, 2))), 1)
    window_T4 = np.array([[0, 0, 64, 64], [40, 0, 104, 64], [40, 40, 104, 104]])
    found = {(t, label): box for t, label, box in zip(*clip_labels(box_L4, window_T4, min_visible), strict=True)}
    for t, window in enumerate(window_T4):
        for label, box in enumerate(box_L4):
            side = np.minimum(window[2:], box[2:]) - np.maximum(window[:2], box[:2])
            whole = box[2:] - box[:2]
            is_visible = (side > 0).all() and side.prod() >= min_visible * whole.prod()
            is_wide = (side >= np.minimum(MIN_SIDE_PX, whole)).all()
            assert ((t, label) in found) == (is_visible and is_wide)
            if (t, label) in found:
                np.testing.assert_allclose(found[t, label][2:] - found[t, label][:2], side)


def test_an_object_not_longer_than_the_overlap_is_whole_in_some_tile():
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 400, (60, 2))
    boxes = [[0, *box] for box in np.concatenate((low, low + rng.uniform(5, 25, (60, 2))), 1).tolist()]
    tiles = cut_into_tiles(image_set([boxes], [(430, 430)]), tile=128, overlap=0.2, min_visible=0.25)
    seen = np.array([box[1:] for tile in range(len(tiles)) for box in boxes_of(tiles, tile)])
    for box in boxes:
        assert (np.abs(seen - box[1:]).max(1) < 0.01).any()


def test_there_are_at_most_as_many_empty_tiles_as_others_and_always_the_same():
    count_N = np.array([0, 2, 0, 0, 1, 0, 0, 0])
    kept = choose_tiles(count_N)
    assert len(kept) == 4 and {1, 4} <= set(kept.tolist()) and (np.diff(kept) > 0).all()
    np.testing.assert_array_equal(kept, choose_tiles(count_N))
    assert choose_tiles(np.array([1, 1, 0])).tolist() == [0, 1, 2]


def test_every_label_of_a_tile_has_its_number_in_the_images_and_whether_another_tile_shows_more():
    images = image_set([[[1, 5, 5, 20, 20], [1, 90, 10, 130, 30]], [], [[2, 95, 50, 105, 60]]], [(200, 100)] * 3)
    tiles = cut_into_tiles(images, tile=100, overlap=0.0, min_visible=0.2)
    assert tiles.label_L.tolist() == [0, 1, 1, 2, 2]
    # The second label is cut at a quarter, the third in halves, which show the same.
    assert tiles.shows_most_L.tolist() == [True, False, True, True, True]
    for label, row in zip(tiles.label_L.tolist(), tiles.labels.class_box_T5, strict=True):
        assert row[0] == images.labels.class_box_T5[label, 0]


def test_tiles_that_show_no_object_well_enough_are_refused():
    with pytest.raises(DataError, match="In no tile of 32 px is 25% of any labelled object visible"):
        cut_into_tiles(image_set([[[0, 0, 0, 400, 400]]], [(400, 400)]), tile=32, overlap=0.2, min_visible=0.25)


# Pixels


def test_pixels_of_a_tile_are_those_of_its_window(tmp_path: Path):
    image = np.random.default_rng(0).integers(0, 255, (150, 210, 3), np.uint8)
    cv2.imwrite(str(tmp_path / "a.png"), image)
    images = image_set([[[0, 5, 5, 205, 145], [0, 20, 20, 40, 40]]], [(210, 150)], [str(tmp_path / "a.png")])
    tiles = cut_into_tiles(images, tile=64, overlap=0.2, min_visible=0.01)
    for place in ("ram", "disk"):
        config = StoreConfig(place=place, folder=tmp_path / "stores")
        with Store.open(WholeImages(tiles.whole), config) as store:
            provider = TileImages(tiles, store, size=64)
            for tile, (left, top, right, bottom) in enumerate(tiles.window_N4.tolist()):
                np.testing.assert_array_equal(provider[tile], image[top:bottom, left:right])
    assert tiles.where(1).endswith("a.png, tile at 48, 0")


# Runs


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of a few images of 320 x 240; their tiles have 128 px."""
    return write_demo_data(tmp_path_factory.mktemp("large"), DemoDataConfig(images=6, val=2, seed=3))


def tile_options(files: Path, data: Path, folder: Path) -> TrainOptions:
    return replace(
        options_for(files, folder),
        data=str(data),
        tiles=128,
        img_size=(64, 64),
        batch_size=8,
        epochs=2,
        save_every_steps=1,
    )


def test_a_training_on_tiles_repeats_bit_for_bit_and_resumes(files: Path, large: Path, tmp_path: Path, caplog):
    options = tile_options(files, large, tmp_path)
    with caplog.at_level("INFO"):
        whole = trained(replace(options, name="whole"))
    assert "tiles of 6 images" in caplog.text
    assert_same_end(whole.folder, trained(replace(options, name="workers", workers=2)).folder)
    stopped = trained(replace(options, name="cut", stop_after=3))
    assert not stopped.finished
    ended = trained(replace(options, name="cut"))
    assert ended.folder == stopped.folder
    assert_same_end(whole.folder, ended.folder)
    # Scores are those of the two whole images.
    assert ended.outcome is not None and ended.outcome.evaluation.num_images == 2
    assert len(results_of(ended.folder)) == 2
    for name in ("best.pt", "last.pt"):
        assert read_weights(ended.folder / "weights" / name).tiles == {"tile": 128, "overlap": 0.2}


def test_images_that_do_not_fit_into_memory_are_decoded_into_a_file_and_train_the_same(
    files: Path, large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    options = replace(tile_options(files, large, tmp_path), epochs=1)
    in_memory = trained(replace(options, name="memory"))
    monkeypatch.setattr("flatout.yolo.train.input.TILE_STORE_SHARE", 0.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with caplog.at_level("INFO"):
        on_disk = trained(replace(options, name="disk", workers=2))
    assert "Images for tiles, in a file: 6 items" in caplog.text
    assert_same_end(in_memory.folder, on_disk.folder)
    assert flatout.yolo.replay(on_disk.folder, epoch=0, step=1, losses=False).identical


def test_a_run_on_tiles_is_another_training_than_one_without(files: Path, large: Path, tmp_path: Path):
    options = tile_options(files, large, tmp_path)
    folder = trained(replace(options, stop_after=1)).folder
    with pytest.raises(ConfigError, match="tile"):
        train(replace(options, resume=str(folder), tile_min_visible=0.5), typed={"resume", "tile_min_visible"})


def test_the_device_path_takes_tiles_as_images(files: Path, large: Path, tmp_path: Path):
    options = replace(tile_options(files, large, tmp_path), device_augment=True, epochs=1)
    assert trained(options).finished


def test_the_recipe_trains_on_tiles_and_validates_whole_images(files: Path, large: Path, tmp_path: Path):
    from flatout.ranks import read_world

    recipe = YoloRecipe(tile_options(files, large, tmp_path), read_world(-1), torch.device("cpu"))
    recipe.open_data()
    images = recipe._images
    assert isinstance(images.train, TileSet) and not isinstance(images.val, TileSet)
    assert images.train.whole.size_wh_N2.tolist() == [[320, 240]] * 6
    assert read_image(images.train.paths[0]).shape == (240, 320, 3)
    assert open_data_set(large).names == images.train.names


@pytest.mark.parametrize("way", ["classic", "device"])
def test_a_run_on_tiles_is_replayed_bit_for_bit(way: str, files: Path, large: Path, tmp_path: Path):
    options = replace(tile_options(files, large, tmp_path), epochs=1, device_augment=way == "device")
    run = trained(options).folder
    for step in (0, 2):
        again = flatout.yolo.replay(run, epoch=0, step=step)
        assert again.identical and again.losses is not None and again.losses.is_exact == (step == 0)
        for file in (file for sample in again.samples for file in sample.files):
            assert file.window is not None
            left, top, right, bottom = file.window
            assert (right - left, bottom - top) == (128, 128) and left >= 0 and right <= 320 and 0 <= top <= 240 - 128
    again.save(tmp_path / "sheet", sample=0)
    # A file is found by its name, with the tiles that were shown.
    shown = flatout.yolo.appearances(run, "0003.jpg")
    in_step = {each for each in shown if each.step == 2}
    files_of_step = [(sample.number, file) for sample in again.samples for file in sample.files]
    expected = {(n, f.role, f.window) for n, f in files_of_step if f.path.endswith("0003.jpg")}
    assert {(each.sample, each.role, each.window) for each in in_step} == expected
    assert all(each.recorded for each in shown)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("way", ["classic", "fast", "device"])
def test_a_run_on_tiles_on_a_gpu_is_replayed_on_it_bit_for_bit(way: str, files: Path, large: Path, tmp_path: Path):
    options = replace(tile_options(files, large, tmp_path), epochs=1, device="0")
    run = trained(replace(options, fast=way == "fast", device_augment=way == "device", workers=2)).folder
    for step in (0, 2):
        assert flatout.yolo.replay(run, epoch=0, step=step).identical


def test_the_audit_of_a_run_on_tiles_looks_at_tiles(files: Path, large: Path, tmp_path: Path, caplog):
    run = trained(replace(tile_options(files, large, tmp_path), epochs=1)).folder
    found = flatout.yolo.audit(run, workers=0, device="cpu")
    about = json.loads((found.folder / "audit.json").read_text())
    assert (about["tiles"], about["num_images"]) == (128, 6)
    assert "in tiles of 128 px" in (found.folder / "audit.html").read_text()
    assert "trained on tiles" not in caplog.text
    # Without the run, its weights say that shrunk images are not what they know.
    data = large.parent / "demo.yaml"
    flatout.yolo.audit(weights=run / "weights/last.pt", data=data, workers=0, device="cpu", out=tmp_path / "shrunk")
    assert "last.pt: trained on tiles of 128 px, but images are shrunk: use --tiles 128." in caplog.text


def test_audit_while_training_on_tiles_sums_up_the_labels_of_whole_images(files: Path, large: Path, tmp_path: Path):
    options = tile_options(files, large, tmp_path)
    plain, audited = (trained(replace(options, name=f"audit{audit}", audit=audit)) for audit in (0, 1))
    assert_same_end(plain.folder, audited.folder)
    statistics = read_statistics(audited.folder / FILE_NAME)
    assert statistics is not None
    labels = open_split(open_data_set(options.data), "train", SplitConfig()).images.labels
    assert (len(statistics.epochs_T), statistics.num_epochs) == (len(labels.class_box_T5), 2)
    assert (statistics.epochs_T > 0).mean() > 0.8
    found = flatout.yolo.audit(audited.folder, workers=0, device="cpu", tile_overlap=0.1)
    assert json.loads((found.folder / "audit.json").read_text())["training_epochs"] == 2
    stopped = trained(replace(options, name="cut", audit=1, stop_after=3))
    resumed = trained(replace(options, name="cut", audit=1))
    assert not stopped.finished and resumed.finished
    again = read_statistics(resumed.folder / FILE_NAME)
    assert again is not None
    for column, value in vars(statistics).items():
        assert np.array_equal(vars(again)[column], value), column


def test_a_changed_label_ends_the_replay_of_a_run_on_tiles_with_the_name_of_the_image(files: Path, tmp_path: Path):
    own = write_demo_data(tmp_path / "own", DemoDataConfig(images=6, val=2, seed=3))
    run = trained(replace(tile_options(files, own, tmp_path), epochs=1)).folder
    label = own.parent / "labels/train/0003.txt"
    label.write_text("".join(label.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(DataError, match=r"1 file changed since .*0003\.jpg: other labels"):
        flatout.yolo.replay(run, epoch=0, step=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"tiles": 16}, "--tiles 16"), ({"tile_min_visible": 1.5}, "--tile-min-visible 1.5 must be between 0 and 1")],
)
def test_mistakes_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainOptions(**changes)
