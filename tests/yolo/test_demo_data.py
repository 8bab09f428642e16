"""The generated demo set: labels fit the images, the same seed gives the same set, other files are left alone."""

import json
import re
from collections import Counter
from pathlib import Path

import cv2
import numpy as np
import pytest

from flatout.__main__ import main
from flatout.cli import parser_of
from flatout.yolo.demo_data.files import (
    DemoDataConfig,
    generate_numbered_scene,
    label_rows,
    label_text,
    write_demo_data,
)
from flatout.yolo.demo_data.scene import MAX_COVERED, SHAPES, SIDE_PX, SURFACES, Points

SMALL = DemoDataConfig(images=5, val=3, seed=4)


def boxes_in(path: Path, width: int = 320, height: int = 240) -> np.ndarray:
    """Class and corners in pixels of a label file, [n, 5]."""
    class_n, cx, cy, w, h = np.loadtxt(path, ndmin=2).T
    return np.stack(
        [class_n, (cx - w / 2) * width, (cy - h / 2) * height, (cx + w / 2) * width, (cy + h / 2) * height], 1
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# -- the scenes ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes():
    return [generate_numbered_scene(DemoDataConfig(), "train", number) for number in range(120)]


def test_every_class_has_a_surface():
    assert SURFACES.keys() == SHAPES.keys()
    assert len(SHAPES) >= 4


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_fills_the_unit_circle_and_does_not_leave_it(name):
    x, y = np.meshgrid(np.linspace(-1.5, 1.5, 301), np.linspace(-1.5, 1.5, 301))
    reach = np.hypot(x, y)[SHAPES[name](Points(x, y)) <= 0].max()
    assert reach == pytest.approx(1.0, abs=0.04)


def test_boxes_in_label_files_are_tight_around_the_masks(tmp_path):
    for number in range(20):
        scene = generate_numbered_scene(SMALL, "train", number)
        (tmp_path / "label.txt").write_text(label_text(label_rows(scene)))
        for row, placed in zip(boxes_in(tmp_path / "label.txt"), scene.objects, strict=True):
            assert list(SHAPES)[int(row[0])] == placed.name
            rows, columns = np.nonzero(placed.mask_HW)
            tight = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
            np.testing.assert_allclose(row[1:], tight, atol=0.01)


def test_masks_are_where_the_paint_is(monkeypatch):
    """Generated again in one flat colour, without shadow and grain, exactly the masks change."""
    from flatout.yolo.demo_data import scene
    from flatout.yolo.demo_data import scene as scene_file

    flat = np.full((1, 1, 3), 1000, np.float32)
    monkeypatch.setattr(scene, "SHADOW", 0.0)
    monkeypatch.setattr(scene, "paint", lambda *args: flat)
    monkeypatch.setattr(
        scene_file, "generate_background", lambda width, height, rng: np.zeros((height, width, 3), np.float32)
    )
    monkeypatch.setattr(scene_file, "add_grain", lambda image, rng: image)
    for number in range(20):
        flat_scene = generate_numbered_scene(SMALL, "val", number)
        masks = np.logical_or.reduce([placed.mask_HW for placed in flat_scene.objects])
        half = flat_scene.image[..., 0] >= 500
        # Where edges of two objects meet, halves may add up.
        assert (half & ~masks).sum() <= 0.002 * masks.size
        assert not (masks & ~half).any()


def test_objects_have_sizes_in_the_documented_range(scenes):
    sides = np.array([(x2 - x1, y2 - y1) for scene in scenes for _, (x1, y1, x2, y2), _ in scene.objects])
    assert sides.min() >= SIDE_PX[0] and sides.max() <= SIDE_PX[1]
    longer = sides.max(1)
    assert (longer < 32).mean() > 0.1 and (longer > 96).mean() > 0.1


def test_images_have_several_objects_of_evenly_frequent_classes(scenes):
    counts = [len(scene.objects) for scene in scenes]
    assert min(counts) >= 1 and 3 < np.mean(counts) < 6
    kinds = Counter(placed.name for scene in scenes for placed in scene.objects)
    assert kinds.keys() == SHAPES.keys()
    assert max(kinds.values()) < 1.6 * min(kinds.values())


def test_objects_hide_little_of_each_other(scenes):
    hidden = []
    for scene in scenes:
        for place, placed in enumerate(scene.objects):
            later = [other.mask_HW for other in scene.objects[place + 1 :]]
            hidden.append(
                (placed.mask_HW & np.logical_or.reduce([*later, placed.mask_HW & False])).sum() / placed.mask_HW.sum()
            )
    # 20 % of a box may hold much of a slim shape, and several neighbours may cover it.
    assert max(hidden) < 3 * MAX_COVERED
    assert 0.02 < np.mean(np.array(hidden) > 0) < 0.5


def test_an_image_depends_on_seed_split_and_number_alone():
    def generated(config: DemoDataConfig, split: str, number: int) -> bytes:
        scene = generate_numbered_scene(config, split, number)
        return scene.image.tobytes() + label_text(label_rows(scene)).encode()

    first = generated(DemoDataConfig(seed=3), "train", 7)
    assert generated(DemoDataConfig(seed=3, images=8, val=1), "train", 7) == first
    others = (
        generated(DemoDataConfig(seed=4), "train", 7),
        generated(DemoDataConfig(seed=3), "val", 7),
        generated(DemoDataConfig(seed=3), "train", 8),
    )
    assert len({first, *others}) == 4


# -- the files -----------------------------------------------------------------------------------------------------


def test_two_folders_with_the_same_config_are_alike(tmp_path):
    for name in ("one", "two"):
        write_demo_data(tmp_path / name, SMALL)
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    del one["demo.yaml"], two["demo.yaml"]  # the YAML names its folder
    assert one == two
    assert len(one) == 2 * 8 + 1


def test_the_check_finds_nothing(tmp_path, capsys):
    write_demo_data(tmp_path / "set", DemoDataConfig(images=60, val=20))
    assert main(["yolo", "check", str(tmp_path / "set/demo.yaml"), "--img-size", "320", "--no-cache", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["findings"] == {}
    assert report["splits"]["train"]["found"] == 60 and report["splits"]["val"]["found"] == 20


def test_images_have_the_configured_size(tmp_path):
    write_demo_data(tmp_path, DemoDataConfig(images=2, val=1, width=200, height=128))
    assert cv2.imread(str(tmp_path / "images/train/0001.jpg")).shape == (128, 200, 3)


def test_an_existing_set_is_kept(tmp_path):
    write_demo_data(tmp_path, SMALL)
    image = tmp_path / "images/train/0000.jpg"
    before = image.stat().st_mtime_ns
    write_demo_data(tmp_path, SMALL)
    assert image.stat().st_mtime_ns == before


def test_another_set_replaces_it_without_leftovers(tmp_path):
    write_demo_data(tmp_path / "again", SMALL)
    fewer = DemoDataConfig(images=2, val=1, seed=9)
    write_demo_data(tmp_path / "again", fewer)
    write_demo_data(tmp_path / "fresh", fewer)
    again, fresh = contents(tmp_path / "again"), contents(tmp_path / "fresh")
    assert again.keys() == fresh.keys()
    assert all(again[name] == fresh[name] for name in fresh if name != "demo.yaml")


def test_an_interrupted_generation_is_finished_later(tmp_path, monkeypatch):
    def interrupted(config, split, number):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("flatout.yolo.demo_data.files.generate_numbered_scene", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_demo_data(tmp_path, SMALL)
    assert not (tmp_path / "demo.yaml").exists()
    assert write_demo_data(tmp_path, SMALL).exists()
    assert len(contents(tmp_path)) == 2 * 8 + 2


def test_the_yaml_of_a_moved_folder_is_rewritten(tmp_path):
    write_demo_data(tmp_path / "old", SMALL)
    (tmp_path / "old").rename(tmp_path / "new")
    assert str(tmp_path / "new/images/train") in write_demo_data(tmp_path / "new", SMALL).read_text()


@pytest.mark.parametrize(
    ("name", "generated_before"),
    [
        ("mine.txt", False),
        ("mine.txt", True),
        ("images/train/0000.jpg", False),
        ("images/train/holiday.jpg", False),
        ("images/train/holiday.jpg", True),
        ("demo.yaml", False),
    ],
)
def test_other_files_are_left_alone(name, generated_before, tmp_path, capsys):
    if generated_before:
        write_demo_data(tmp_path, SMALL)
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("precious")
    before = contents(tmp_path)
    assert main(["yolo", "demo-data", str(tmp_path), "--images", "2"]) == 2
    assert contents(tmp_path) == before
    error = capsys.readouterr().err
    assert name in error and "Choose an empty or new folder" in error


def test_a_file_in_place_of_the_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "set").write_text("precious")
    assert main(["yolo", "demo-data", str(tmp_path / "set")]) == 2
    assert (tmp_path / "set").read_text() == "precious"
    assert "Choose a folder" in capsys.readouterr().err


# -- the command ---------------------------------------------------------------------------------------------------


def test_the_command_prints_what_it_generated_and_where(tmp_path, capsys):
    assert main(["yolo", "demo-data", str(tmp_path / "set"), "--images", "3", "--val", "2", "--size", "128x96"]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/set/demo.yaml: 3 images for training, 2 for validation\n"


def test_the_commands_defaults_are_those_of_the_library():
    from flatout.yolo.commands.demo_data import FLAGS

    args, config = parser_of("", "", "", FLAGS).parse_args([]), DemoDataConfig()
    assert (args.images, args.val, args.seed, args.size) == (
        config.images,
        config.val,
        config.seed,
        (config.width, config.height),
    )


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--images", "0"], "--images 0 is too small: use 1 or more"),
        (["--size", "64x240"], "--size 64x240: both sides must be 96 or more"),
        (["--seed", "-1"], "--seed -1 is too small"),
    ],
)
def test_invalid_settings_are_refused(arguments, error, tmp_path, capsys):
    assert main(["yolo", "demo-data", str(tmp_path / "set"), *arguments]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "set").exists()


def test_a_size_is_written_with_an_x(capsys):
    with pytest.raises(SystemExit):
        main(["yolo", "demo-data", "--size", "320"])
    assert re.search("write WIDTHxHEIGHT, such as 320x240", capsys.readouterr().err)
