"""The classical method for pairs: defects are found, moved edges are not; thresholds come from other images."""

import csv
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import tifffile
import torch

from bench.defect_boards import moved
from flatout.__main__ import main
from flatout.defect.check import check_data_set
from flatout.defect.compare.calibrate import (
    LOWEST,
    Blobs,
    Settings,
    choose_settings,
    heat_blobs,
    read_settings,
    response,
    threshold_for,
)
from flatout.defect.compare.classical import components_of, find_differences, heat_of_differences, refined
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.pairs import PairReader, list_pair_images, read_boxes, read_planes
from flatout.defect.evaluate.blobs import inspect_blobs
from flatout.defect.evaluate.maps import HeatMapper, HostMapMaker
from flatout.defect.evaluate.scores import detect_components
from flatout.defect.input import find_images
from flatout.defect.model import DefectNet
from flatout.defect.options import CalibrateOptions, TrainOptions
from flatout.defect.predict import calibrate
from flatout.defect.train import _list_validation_images
from flatout.defect.weights import read_weights, weights_metadata
from flatout.errors import ConfigError, DataError
from flatout.feed import DecodeError
from flatout.safefiles.container import write_container
from tests.defect.boards import DEFECTS_XY, SIDE_PX, scan, write_boards


@pytest.fixture(scope="module")
def boards(tmp_path_factory):
    return write_boards(tmp_path_factory.mktemp("boards"), 2)


# What is found


def test_an_edge_that_is_one_pixel_off_is_no_defect():
    board = scan()
    off = moved(board, (1, 1))
    assert (np.abs(board.astype(int) - off) > 100).sum() > 300, "a plain difference is full of edges"
    assert components_of(find_differences(np.stack((board, off, off)))).core_N.sum() == 0


def test_a_defect_is_drawn_to_the_pixel_with_the_heat_of_its_core():
    board = scan()
    target, mask = board.copy(), np.zeros(board.shape, bool)
    mask[100:108, 60:68] = True
    target[mask] = 255 - target[mask]
    heat = heat_of_differences(find_differences(np.stack((target, board, board))))
    np.testing.assert_array_equal(heat > 0, mask)
    assert len(np.unique(heat[mask])) == 1 and heat.max() > 0.5


def test_a_thin_line_that_is_missing_in_target_is_found():
    board = np.zeros((64, 96), np.uint8)
    board[30:32, 10:80] = 255
    target = board.copy()
    target[30:32, 40:52] = 0
    heat = heat_of_differences(find_differences(np.stack((target, board, board))))
    assert heat[30:32, 42:50].min() >= 0.5
    assert not heat[:, 60:].any()


def test_with_two_references_a_difference_to_one_of_them_is_no_defect():
    board = scan()
    target = board.copy()
    target[100:108, 60:68] = 255 - target[100:108, 60:68]
    assert not heat_of_differences(find_differences(np.stack((target, board, target)))).any()
    assert heat_of_differences(find_differences(np.stack((target, board, board)))).any()


def test_refining_draws_what_the_network_chose_and_nothing_else():
    board = scan()
    target = board.copy()
    for x in (60, 150):
        target[100:108, x : x + 8] = 255 - target[100:108, x : x + 8]
    planes = np.stack((target, board, board)).astype(np.float32)
    heat = np.zeros(board.shape, np.float32)
    heat[103:105, 62:64] = 0.9  # the network is sure of the first, at some of its pixels, and sees edges
    heat[10:12] = 0.7
    drawn = refined(heat, planes)
    assert (drawn[100:108, 60:68] == np.float32(0.9)).all()
    assert (drawn > 0).sum() == SIDE_PX**2


def test_a_component_is_one_detection():
    heat = np.zeros((40, 80), np.float32)
    heat[10, 5:70] = 0.8
    heat[30:33, 30:33] = 0.4
    first, second = detect_components(heat)
    assert (first.y, first.x, round(first.score, 3)) == (10, 37, 0.8)
    assert (second.y, second.x) == (31, 31)
    assert detect_components(np.zeros((8, 8), np.float32)) == []


@pytest.mark.parametrize(("gain", "offset"), [(0.6, 0), (0.5, 120)])
def test_a_template_of_other_brightness_hides_no_defect_and_makes_none(boards, tmp_path, gain, offset):
    shutil.copytree(boards, tmp_path / "boards")
    for path in (tmp_path / "boards/temp").iterdir():
        cv2.imwrite(str(path), np.asarray(cv2.imread(str(path), 0) * gain + offset, np.uint8))
    assert main(["defect", "test", "--test_path", str(tmp_path / "boards"), "--output_dir", str(tmp_path / "out")]) == 0
    scores = json.loads((tmp_path / "out/results.json").read_text())
    assert (scores["blob_recall"], scores["false_blobs_per_image"]) == (1.0, 0.0)


# Thresholds


def test_the_threshold_allows_so_many_false_blobs_per_image_and_no_more():
    false = [np.array([0.9, 0.3]), np.array([0.5]), np.array([]), np.array([0.7])]
    for per_image, expected in ((0, 0), (0.25, 1), (0.5, 2), (0.75, 3)):
        threshold = threshold_for(false, per_image)
        assert sum(int((heat >= threshold).sum()) for heat in false) == expected
    assert threshold_for(false, 5) == LOWEST


def test_one_spoilt_image_does_not_decide_the_threshold():
    usual = [np.array([0.4])] * 30
    assert threshold_for([*usual, np.full(50, 0.99)], 0.1) < 0.41


def test_a_calibration_says_what_the_kept_images_have_and_what_the_worst_one_adds(caplog):
    caplog.set_level("INFO")
    blobs = [Blobs(np.array([0.1]), np.array([True]), np.zeros(0))] * 29
    blobs.append(Blobs(np.full(60, 0.99), np.full(60, True), np.zeros(0)))
    choose_settings(blobs, method="classical", false_blobs=0.1, chosen_on="P")
    assert "0.00 false blobs per image on 29 images (2.00 with the worst 1, left out), all good" in caplog.text


@pytest.mark.parametrize(
    ("false_heat", "heat", "advice"),
    [(0.1, 0.1, "below 0.2 is not chosen"), (0.9, 0.5, "allow more --false_blobs"), (0.1, 0.3, None)],
)
def test_a_calibration_that_finds_no_labelled_defect_warns(false_heat, heat, advice, caplog):
    blobs = [Blobs(np.array([false_heat, heat]), np.array([True, False]), np.array([heat]))] * 3
    choose_settings(blobs, method="network", false_blobs=0.1, chosen_on="P")
    if advice is None:
        assert "None of" not in caplog.text
    else:
        assert "None of the 3 labelled defects reaches this threshold" in caplog.text and advice in caplog.text


@pytest.mark.parametrize(
    ("threshold", "heat", "expected"), [(0.02, 0.05, 0.02), (0.25, 0.3, 0.2), (None, 0.05, 0.025), (None, 0.9, 0.2)]
)
def test_the_lowest_threshold_is_below_that_of_the_network_or_what_it_reaches(
    boards, tmp_path, threshold, heat, expected, monkeypatch
):
    weights = tmp_path / "best.pt"
    facts = weights_metadata(network := DefectNet("v1", 8), patch=64)
    write_container(weights, {"weights": facts | {"state": network.state_dict(), "threshold": threshold}})
    monkeypatch.setattr(HeatMapper, "__call__", lambda self, planes_CHW: np.full(planes_CHW.shape[1:], heat))
    options = CalibrateOptions(
        model_path=str(weights), test_path=str(boards), settings=str(tmp_path / "n.yaml"), false_blobs=9.0, device="cpu"
    )
    assert calibrate(options).threshold == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_the_response_is_the_heat_of_what_differs_from_the_references_in_dark_and_bright_areas(dtype, boards):
    """The heat is the plain difference here. Half of the squares lie on dark areas of the scan, half on bright ones."""
    template = scan()
    planes = np.stack([template] * 3).astype(dtype)
    seen = []

    def difference(planes_CHW: np.ndarray) -> np.ndarray:
        seen.append(planes_CHW)
        return np.abs(planes_CHW[0] - planes_CHW[1]) / 255

    found = response([EvaluationImage(Path("a"), None, is_good=True)] * 9, lambda _: planes, HostMapMaker(difference))
    assert found == 1 and len(seen) == 4
    for value in (0, 255):
        changed = seen[0][0][template == value] != value
        assert 0 < changed.mean() < 0.1
    np.testing.assert_array_equal(planes[0], template)


def test_a_threshold_that_nothing_can_reach_is_reported(caplog):
    blobs = [Blobs(np.ones(3, np.float32), np.full(3, True), np.zeros(0))] * 2
    assert choose_settings(blobs, method="network", false_blobs=0.1, chosen_on="P").threshold > 1
    assert "everything would pass" in caplog.text


def test_a_calibration_and_a_test_agree_on_which_blobs_are_false(tmp_path):
    """A blob in the notch of an L-shaped defect is inside the box around it, but not near it."""
    mask_HW = np.zeros((60, 60), np.uint8)
    mask_HW[5:55, 5:8] = mask_HW[52:55, 5:55] = 255
    cv2.imwrite(str(tmp_path / "mask.png"), mask_HW)
    heat_HW = np.zeros((60, 60), np.float32)
    heat_HW[10, 6], heat_HW[10:13, 40:43] = 0.9, 0.8
    image = EvaluationImage(tmp_path / "a.png", tmp_path / "mask.png", is_good=False)
    found = heat_blobs(heat_HW, image)
    assert found.best_K.tolist() == pytest.approx([0.9])
    assert found.heat_N[found.is_false_N].tolist() == pytest.approx([0.8])
    assert [blob.score for blob in inspect_blobs(heat_HW, 0.5, mask_HW > 0).false_blobs] == pytest.approx([0.8])


def test_an_image_without_label_cannot_be_calibrated_on(boards):
    image = EvaluationImage(boards / "test/00.png", None, is_good=False)
    with pytest.raises(DataError, match="neither a mask nor boxes"):
        heat_blobs(np.zeros((8, 8), np.float32), image)


def test_the_stored_threshold_is_used_and_never_taken_from_the_test_images(boards, tmp_path, capsys):
    good = write_boards(tmp_path / "good", 2, good=True, first_seed=7)
    settings = tmp_path / "settings.yaml"
    assert main(["defect", "calibrate", "--test_path", str(good), "--settings", str(settings)]) == 0
    chosen = read_settings(settings)
    assert (chosen.method, chosen.images, chosen.false_blobs) == ("classical", 2, 0.1)
    settings.write_text(settings.read_text().replace(f"threshold: {chosen.threshold!r}", "threshold: 0.875"))
    words = ["defect", "test", "--test_path", str(boards), "--settings", str(settings)]
    words += ["--output_dir", str(tmp_path / "out"), "--save_pictures", "false", "--save_maps", "false"]
    assert main(words) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["threshold"] == 0.875
    assert main([*words, "--threshold", "0.25"]) == 0
    assert json.loads((tmp_path / "out/results.json").read_text())["threshold"] == 0.25
    capsys.readouterr()
    settings.write_text("method: network\nthreshold: 0.5\nfalse_blobs: 1.0\nimages: 3\nchosen_on: x\n")
    assert main(words) == 2
    assert "chosen for the network method, not for classical. Give its weights" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ['12" boards', r"\\server\new", "boards: new #2", "Platinen größer", "P"])
def test_a_settings_file_can_be_read_wherever_its_images_were(folder, tmp_path):
    chosen = Settings(method="classical", threshold=0.1 + 0.2, false_blobs=0.5, images=3, chosen_on=folder)
    (tmp_path / "settings.yaml").write_text(chosen.as_yaml(), encoding="utf-8")
    assert read_settings(tmp_path / "settings.yaml") == chosen


def test_a_file_that_is_not_a_settings_file_is_refused(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("- 1\n")
    with pytest.raises(ConfigError, match="flatout defect calibrate"):
        read_settings(path)


# Pairs as input


def test_pairs_are_tested_without_any_weights(boards, tmp_path):
    words = ["defect", "test", "--test_path", str(boards), "--output_dir", str(tmp_path)]
    assert main(words) == 0
    with (tmp_path / "images.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["num_defects"], row["num_found"]) for row in rows] == [
        ("00.png", "3", "3"),
        ("01.png", "3", "3"),
    ]
    assert (tmp_path / "00_result.png").is_file() and (tmp_path / "00_heat.tiff").is_file()
    with (tmp_path / "detections.csv").open() as file:
        found = {(row["image"], int(row["x"]), int(row["y"])) for row in csv.DictReader(file)}
    for x, y in DEFECTS_XY:
        assert any(name == "00.png" and abs(fx - x) < 6 and abs(fy - y) < 6 for name, fx, fy in found)


def test_the_ranking_of_components_does_not_depend_on_the_threshold(boards, tmp_path):
    scores = []
    for threshold in ("0.5", "0.99"):
        words = ["--test_path", str(boards), "--output_dir", str(tmp_path), "--threshold", threshold]
        assert main(["defect", "test", *words, "--save_pictures", "false"]) == 0
        scores.append(json.loads((tmp_path / "results.json").read_text()))
    assert scores[0]["blob_AP"] == scores[1]["blob_AP"] > 0.9
    assert (scores[0]["blob_recall"], scores[1]["blob_recall"]) == (1, 0)


def test_boxes_alone_label_an_image(tmp_path):
    write_boards(tmp_path, 1)
    write_boards(tmp_path / "more", 1, good=True, first_seed=7)
    for kind in ("temp", "test"):
        (tmp_path / "more" / kind / "00.png").rename(tmp_path / kind / "good.png")
    shutil.rmtree(tmp_path / "mask")
    (tmp_path / "boxes").mkdir()
    lines = [f"{x - 6} {y - 6} {x + 6} {y + 6} {kind}" for kind, (x, y) in enumerate(DEFECTS_XY, start=1)]
    (tmp_path / "boxes/00.txt").write_text("\n".join(lines))
    (tmp_path / "boxes/good.txt").write_text("")
    out = tmp_path / "out"
    assert main(["defect", "test", "--test_path", str(tmp_path), "--output_dir", str(out)]) == 0
    with (out / "images.csv").open() as file:
        rows = [
            (row["is_defective"], row["num_defects"], row["num_found"], row["verdict"]) for row in csv.DictReader(file)
        ]
    assert rows == [("True", "3", "3", "fail"), ("False", "0", "0", "pass")]
    scores = json.loads((out / "results.json").read_text())
    assert scores["image_AUROC"] == scores["recall@0.1FP"] == scores["blob_recall[class 2]"] == 1
    assert scores["pixel_AP"] is None, "boxes say nothing about pixels"


def test_a_table_may_name_images_in_any_folders(boards, tmp_path):
    for folder in ("deep/er", "tables"):
        (tmp_path / folder).mkdir(parents=True)
    for kind in ("temp", "test"):
        (tmp_path / f"deep/er/{kind}.png").write_bytes((boards / kind / "00.png").read_bytes())
    table = tmp_path / "tables/pairs.csv"
    rows = ["../deep/er/temp.png,../deep/er/test.png", f"{boards}/temp/01.png,{boards}/test/01.png"]
    table.write_text("\n".join(["template,test", *rows]))
    out = tmp_path / "out"
    assert main(["defect", "predict", "--test_path", str(table), "--output_dir", str(out)]) == 0
    with (out / "images.csv").open() as file:
        names = [row["name"] for row in csv.DictReader(file)]
    assert [Path(name).name for name in names] == ["test.png", "01.png"] and ".." not in "".join(names)
    assert all((out / name).with_name(f"{Path(name).stem}_mask.png").is_file() for name in names)


def test_a_template_that_is_a_copy_of_the_test_image_is_named(tmp_path, caplog):
    write_boards(tmp_path, 1)
    (tmp_path / "temp/00.png").write_bytes((tmp_path / "test/00.png").read_bytes())
    assert main(["defect", "predict", "--test_path", str(tmp_path), "--output_dir", str(tmp_path / "out")]) == 0
    assert "00.png: its template shows exactly the same" in caplog.text


def test_a_network_sees_the_aligned_template_and_its_components_are_drawn_by_the_difference(boards, tmp_path):
    weights = tmp_path / "best.pt"
    torch.manual_seed(0)
    network = DefectNet("v1", 8)
    facts = weights_metadata(network, patch=64) | {"state": network.state_dict(), "threshold": 0.001}
    write_container(weights, {"weights": facts})
    words = ["defect", "predict", "--model_path", str(weights), "--test_path", str(boards), "--device", "cpu"]
    assert main([*words, "--output_dir", str(tmp_path / "a"), "--save_pictures", "false"]) == 0
    heat = cv2.imread(str(tmp_path / "a/00_heat.tiff"), cv2.IMREAD_UNCHANGED)
    assert 0 < (heat > 0).mean() < 0.05, "only what differs from the template has heat"
    assert main([*words, "--output_dir", str(tmp_path / "b"), "--save_pictures", "false", "--refine", "off"]) == 0
    assert (cv2.imread(str(tmp_path / "b/00_heat.tiff"), cv2.IMREAD_UNCHANGED) > 0).all()


def test_all_layouts_of_pairs_give_the_same_planes(boards, tmp_path):
    flat, table = tmp_path / "flat", tmp_path / "pairs.csv"
    flat.mkdir()
    for kind in ("temp", "test", "mask"):
        for file in (boards / kind).iterdir():
            (flat / f"{file.stem}_{kind}.png").write_bytes(file.read_bytes())
    rows = [f"{boards}/temp/{name}.png,{boards}/test/{name}.png,{boards}/mask/{name}.png" for name in ("00", "01")]
    table.write_text("\n".join(["template,test,mask", *rows]))
    expected = [read_planes(image) for image in list_pair_images(boards)]
    for place in (flat, table):
        images = list_pair_images(place)
        assert all(image.mask is not None for image in images)
        np.testing.assert_array_equal([read_planes(image) for image in images], expected)


def test_a_second_reference_is_its_own_plane(boards, tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text(f"template,test,ref2\n{boards}/temp/00.png,{boards}/test/00.png,{boards}/temp/01.png\n")
    (image,) = list_pair_images(table)
    target, ref1, ref2 = read_planes(image)
    np.testing.assert_array_equal(ref2, cv2.imread(str(boards / "temp/01.png"), 0))
    assert not np.array_equal(ref1, ref2)
    assert PairReader([image], None)(image.path).shape == (3, *target.shape)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("test,mask\na,b\n", "column template is missing"),
        ("template,test,tset\na,b,c\n", "unknown column 'tset'"),
        ("template,test\n", "no pairs"),
        ("template,test\n,x.png\n", "pairs.csv:2: template is empty"),
        ("template,test\nnone.png,x.png\n", r"pairs.csv:2: template: .*none.png does not exist"),
        ("template,test\nx.png,x.png\nx.png,x.png\n", "pairs.csv:3: .*also in line 2"),
        ("template,test\n\n\nx.png,none.png\n", "pairs.csv:4: test: .*none.png does not exist"),
        ("template,test\nx.png,x, y.png\n", "pairs.csv:2: it has 3 fields, but the first line names 2 columns"),
        ("template,test,test\nx.png,x.png,x.png\n", "the column test is there twice"),
    ],
)
def test_mistakes_in_a_table_of_pairs_are_named(tmp_path, text, message):
    cv2.imwrite(str(tmp_path / "x.png"), np.zeros((8, 8), np.uint8))
    (tmp_path / "pairs.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        list_pair_images(tmp_path / "pairs.csv")


def test_missing_partners_other_sizes_and_files_of_three_planes_are_named(tmp_path):
    write_boards(tmp_path, 2)
    (tmp_path / "temp/01.png").rename(tmp_path / "temp/02.png")
    with pytest.raises(DataError, match=r"test/01\.png: it has no partner of the same name in .*temp"):
        list_pair_images(tmp_path)
    (tmp_path / "test/01.png").unlink()
    with pytest.raises(DataError, match=r"temp/02\.png: it has no partner of the same name in .*test"):
        list_pair_images(tmp_path)
    (tmp_path / "temp/02.png").unlink()
    cv2.imwrite(str(tmp_path / "temp/00.png"), np.zeros((99, 98), np.uint8))
    (image,) = list_pair_images(tmp_path)
    with pytest.raises(DecodeError, match=r"224 x 224 pixels, but its reference .*00\.png has 98 x 99"):
        read_planes(image)
    planes = np.random.default_rng(0).random((3, 64, 64)).astype(np.float32)
    tifffile.imwrite(tmp_path / "three.tiff", planes, photometric="minisblack")
    three = EvaluationImage(tmp_path / "three.tiff", None, is_good=False, references=(tmp_path / "three.tiff",))
    with pytest.raises(DecodeError, match="one plane each"):
        read_planes(three)


def test_a_line_that_is_no_box_is_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("1 2 30 40 3\n5,6,7,8\n")
    boxes = read_boxes(path)
    assert boxes.xyxy_K4.tolist() == [[1, 2, 30, 40], [5, 6, 7, 8]] and boxes.class_K.tolist() == [3, -1]
    path.write_text("\ufeff1 2 30 40 3\n", encoding="utf-8")
    assert read_boxes(path).class_K.tolist() == [3], "editors on Windows write a byte-order mark"
    for line in ("9 6 7 8 1", "-inf 1 inf 8 1", "1 nan 7 8 1", "1 2 7 8 short", "1 2 7 8 -2"):
        path.write_text(f"1 2 30 40 3\n{line}\n")
        with pytest.raises(DataError, match=r"a\.txt:2: .*not a box"):
            read_boxes(path)
    path.write_bytes("1 2 30 40 3\n".encode("utf-16"))
    with pytest.raises(DataError, match="not text in UTF-8"):
        read_boxes(path)


def test_check_reads_every_pair(boards, tmp_path):
    assert not check_data_set(str(boards), "png_jpg", patch=64).is_bad
    write_boards(tmp_path, 2)
    cv2.imwrite(str(tmp_path / "temp/01.png"), np.zeros((50, 50), np.uint8))
    report = check_data_set(str(tmp_path), "png_jpg", patch=64)
    text = "\n".join(report.lines())
    assert report.is_bad and "its reference" in text and text.count("test/01.png") == 1


def test_check_names_labels_that_would_mislead(tmp_path):
    write_boards(tmp_path, 3)
    (tmp_path / "mask/00.png").rename(tmp_path / "mask/7.png")
    cv2.imwrite(str(tmp_path / "mask/01.png"), 255 - cv2.imread(str(tmp_path / "mask/01.png"), 0))
    cv2.imwrite(str(tmp_path / "mask/02.png"), np.zeros((224, 224), np.uint8))
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes/00.txt").write_text("900 900 910 910 1\n")
    (tmp_path / "boxes/01.txt").write_text("0.1 0.1 0.2 0.2\n")
    (tmp_path / "boxes/02.txt").write_bytes(b"\xe4")
    report = check_data_set(str(tmp_path), "png_jpg", patch=64)
    text = "\n".join(report.lines())
    for part in (
        "7.png: no test image has its name",
        "Is it inverted?",
        "its image counts as good",
        "900 900 910 910 is outside",
        "not shares of the size",
        "02.txt: it is not text in UTF-8",
    ):
        assert part in text


def test_a_network_is_trained_on_templates_and_validated_on_aligned_pairs(tmp_path, caplog):
    boards = write_boards(tmp_path / "boards", 1)
    words = ["defect", "train", "--training_dataset_path", str(boards), "--project", str(tmp_path), "--base_width", "4"]
    words += ["--patch_size", "64", "--epochs", "1", "--device", "cpu", "--num_workers", "0", "--psf_pool_size", "20"]
    assert main([*words, "--false_blobs", "0.5"]) == 0
    config = (tmp_path / "exp/config.yaml").read_text()
    assert "one_reference: true" in config and "defect_mode: board" in config and "steepness: 4.0" in config
    threshold = read_weights(tmp_path / "exp/weights/best.pt").threshold
    assert threshold is not None and threshold < LOWEST, "two steps raise no defect to 0.2, but all can be told apart"
    assert "None of the 3 labelled defects" not in caplog.text


@pytest.mark.parametrize(
    ("kind", "flags", "has_threshold", "has_warning"),
    [
        ("good", ["--false_blobs", "0.5"], True, False),
        ("masks", ["--false_blobs", "0.5"], True, False),
        ("masks", [], False, False),
        ("good", [], False, False),
        ("unlabelled", ["--false_blobs", "0.5"], False, True),
    ],
)
def test_good_pairs_alone_give_a_threshold_by_false_blobs_and_no_other(
    tmp_path, caplog, kind, flags, has_threshold, has_warning
):
    """Good by the name of their folder, or by empty masks."""
    boards = write_boards(tmp_path / kind, 1, good=True)
    if kind != "masks":
        shutil.rmtree(boards / "mask")
    words = ["defect", "train", "--training_dataset_path", str(boards), "--project", str(tmp_path), "--base_width", "4"]
    words += ["--patch_size", "64", "--epochs", "1", "--device", "cpu", "--num_workers", "0", "--psf_pool_size", "20"]
    assert main([*words, *flags]) == 0
    threshold = read_weights(tmp_path / "exp/weights/best.pt").threshold
    assert (threshold is not None) == has_threshold
    assert threshold is None or 0 < threshold < LOWEST, "two steps raise no defect to 0.2"
    assert ("--false_blobs 0.5 has no effect" in caplog.text) == has_warning


@pytest.mark.parametrize(("shift_px", "is_far"), [(4, False), (11, False), (15, True), (25, True), (40, True)])
def test_check_names_templates_that_are_farther_off_than_the_alignment_looks(tmp_path, shift_px, is_far):
    wide = scan(side=320)
    for kind, x in (("temp", shift_px), ("test", 0)):
        (tmp_path / kind).mkdir()
        cv2.imwrite(str(tmp_path / kind / "a.png"), wide[:256, x : x + 256])
    text = "\n".join(check_data_set(str(tmp_path), "png_jpg").lines())
    assert ("misregistered" in text) == is_far
    assert not is_far or f"its template is off by {shift_px} px" in text


def test_images_that_differ_in_their_endings_alone_do_not_overwrite_each_other(boards, tmp_path):
    for kind in ("temp", "test"):
        for ending in ("png", "bmp"):
            cv2.imwrite(str(tmp_path / f"{kind}.{ending}"), cv2.imread(str(boards / kind / "00.png"), 0))
    (tmp_path / "pairs.csv").write_text("template,test\ntemp.png,test.png\ntemp.bmp,test.bmp\n")
    found = tmp_path / "found"
    assert main(["defect", "predict", "--test_path", str(tmp_path / "pairs.csv"), "--output_dir", str(found)]) == 0
    assert {path.name for path in found.glob("*_mask.png")} == {"test.png_mask.png", "test.bmp_mask.png"}


def test_images_that_are_not_scored_beside_labelled_ones_are_counted(tmp_path, caplog):
    boards = write_boards(tmp_path / "boards", 3)
    (boards / "mask/02.png").unlink()
    assert main(["defect", "test", "--test_path", str(boards), "--output_dir", str(tmp_path / "out")]) == 0
    assert f"1 of 3 images, such as {boards}/test/02.png, have neither a mask nor boxes" in caplog.text
    assert "test/02.png: it has neither a mask nor boxes" in "\n".join(check_data_set(str(boards), "png_jpg").lines())
    caplog.clear()
    shutil.rmtree(boards / "mask")
    assert main(["defect", "predict", "--test_path", str(boards), "--output_dir", str(tmp_path / "out")]) == 0
    assert "neither" not in caplog.text and not check_data_set(str(boards), "png_jpg").findings


def test_a_test_without_any_label_says_that_nothing_was_scored(tmp_path, capsys):
    boards = write_boards(tmp_path / "boards", 1)
    for words, is_said in (([], False), (["--use_ground_truth_mask", "false"], True)):
        command = ["defect", "test", "--test_path", str(boards), "--output_dir", str(tmp_path / "out"), *words]
        assert main(command) == 0
        assert ("Nothing was scored: no image has a mask or boxes" in capsys.readouterr().out) == is_said


def test_a_bad_validation_pair_ends_a_training_before_it_starts(tmp_path, capsys):
    boards = write_boards(tmp_path / "boards", 2)
    cv2.imwrite(str(boards / "mask/01.png"), np.zeros((99, 98), np.uint8))
    words = ["defect", "train", "--training_dataset_path", str(boards), "--project", str(tmp_path / "runs")]
    words += ["--base_width", "4", "--patch_size", "64", "--epochs", "1", "--device", "cpu", "--num_workers", "0"]
    assert main([*words, "--psf_pool_size", "20"]) == 3
    message = capsys.readouterr().err
    assert "1 validation image cannot be used; the first:" in message and "01.png: the mask is 98 x 99 px" in message
    assert "--use_mask false" in message and not (tmp_path / "runs/exp").exists()


def test_values_in_0_to_1_are_named_by_every_command(tmp_path, caplog):
    boards = write_boards(tmp_path / "boards", 1)
    for kind in ("temp", "test"):
        file = boards / kind / "00.png"
        tifffile.imwrite(file.with_suffix(".tif"), cv2.imread(str(file), 0).astype(np.float32) / 255)
        file.unlink()
    text = "all its values are in 0..1, but 0..255 is expected: multiply them by 255"
    assert main(["defect", "predict", "--test_path", str(boards), "--output_dir", str(tmp_path / "out")]) == 0
    assert text in caplog.text
    caplog.clear()
    find_images(str(boards), "tiff")
    assert text in caplog.text
    lines = "\n".join(check_data_set(str(boards), "tiff", patch=64).lines())
    assert text in lines and "its template" in lines and "second reference" not in lines


def test_what_to_do_without_weights_depends_on_the_images(boards, capsys):
    assert main(["defect", "predict", "--test_path", str(boards), "--method", "network"]) == 2
    assert "omit --method network" in capsys.readouterr().err
    assert main(["defect", "predict", "--test_path", str(boards / "test")]) == 2
    assert "test must hold pairs: a folder with temp/ and test/" in capsys.readouterr().err


def test_a_negative_number_of_false_blobs_is_refused(boards, capsys):
    assert main(["defect", "train", "--training_dataset_path", str(boards), "--false_blobs", "-2"]) == 2
    assert "--false_blobs -2.0 must be 0 or more" in capsys.readouterr().err


def test_a_threshold_in_percent_is_refused(boards, tmp_path, capsys):
    words = ["defect", "predict", "--test_path", str(boards), "--output_dir", str(tmp_path / "out")]
    assert main([*words, "--threshold", "50"]) == 2
    assert "threshold 50 is outside of 0..1" in capsys.readouterr().err


def test_pairs_with_boxes_alone_are_not_validated_on_and_a_training_says_so(tmp_path, caplog):
    write_boards(tmp_path, 2)
    (tmp_path / "mask/01.png").unlink()
    (tmp_path / "boxes").mkdir()
    (tmp_path / "boxes/01.txt").write_text("1 2 30 40 3\n")
    (image,) = _list_validation_images(TrainOptions(training_dataset_path=str(tmp_path)))
    assert image.path.name == "00.png"
    assert "1 of 2 pairs have boxes but no mask" in caplog.text and "flatout defect calibrate" in caplog.text
