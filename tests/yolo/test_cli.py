"""`flatout yolo`: help and usage errors without torch, descriptions of networks and weights, and conversions."""

import contextlib
import json
import re

import pytest
import torch

from flatout.__main__ import main
from flatout.yolo.cli import COMMANDS
from flatout.yolo.weights import Weights, read_weights, save_weights
from tests.golden_cases import SHIPPED
from tests.test_cli import loaded_after
from tests.yolo.model.hostile_configs import config

pytestmark = pytest.mark.usefixtures("one_thread")

FULL = SHIPPED / "yolov7-models/legacy-full.pt"


def printed(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Run a command; returns its output, or its error message if it must fail with `code`."""
    assert main(["yolo", *map(str, words)]) == code
    captured = capsys.readouterr()
    assert (captured.out if code else captured.err) == ""
    return captured.err if code else captured.out


# -- the commands --------------------------------------------------------------------------------------------------


def test_help_and_usage_errors_do_not_import_torch():
    statement = """
import contextlib
from flatout.__main__ import main
for words in (
    [], ["--help"], ["info", "--help"], ["convert", "--help"], ["--nope"], ["info"], ["info", "x", "--jsn"],
    ["convert", "x"], ["convert", "x", "y.pt", "--dep"], ["convert", "x", "y.onnx"], ["inof", "x"],
    ["info", "yolov7-tyni"], ["info", "x.yaml"], ["resize", "--help"], ["resize", "x.yaml"],
    ["resize", "x.yaml", "--size", "320", "--out", "y"],
):
    with contextlib.suppress(SystemExit):
        assert main(["yolo", *words]) in (0, 2)
"""
    assert {"torch", "numpy", "cv2", "pydantic", "rich"}.isdisjoint(loaded_after(statement))


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_lists_every_command(words, capsys):
    with contextlib.suppress(SystemExit):
        assert main(["yolo", *words]) == 0
    out = capsys.readouterr().out
    assert all(name in out and command.help in out for name, command in COMMANDS.items())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_shows_examples(command, capsys):
    with pytest.raises(SystemExit):
        main(["yolo", command, "--help"])
    assert f"  flatout yolo {command} " in capsys.readouterr().out


def test_the_error_for_an_unknown_command_suggests_the_nearest_one(capsys):
    assert printed(capsys, "onvert", code=2) == "flatout: unknown command 'onvert'; did you mean 'convert'?\n"
    assert "`flatout yolo --help` lists the commands." in printed(capsys, "xyzzy", code=2)


@pytest.mark.parametrize("words", [["info", "yolov7", "--js"], ["convert", "a", "b.pt", "--for"], ["info", "a", "b"]])
def test_flags_match_only_in_full(words):
    with pytest.raises(SystemExit) as ended:
        main(["yolo", *words])
    assert ended.value.code == 2


# -- info ----------------------------------------------------------------------------------------------------------


def test_info_of_a_config_shows_rows_size_strides_and_anchors(capsys):
    text = printed(capsys, "info", "yolov7-tiny")
    assert re.search(r"^ +77 +\[74,75,76\] +1 +230906 +IDetect +nc, anchors$", text, re.MULTILINE)
    assert re.search(
        r"^Model Summary: \d+ layers, 6228762 parameters, 6228762 gradients, 13.9 GFLOPS$", text, re.MULTILINE
    )
    assert re.search(r"^fused +\d+ layers, 6221370 parameters, \d+ gradients, 13.7 GFLOPS$", text, re.MULTILINE)
    assert re.search(r"^stride 32 +anchors 116,90 156,198 373,326 px$", text, re.MULTILINE)
    assert "IDetect, 80 classes, images with 3 channels" in text


def test_info_as_json_can_be_read_by_a_program(capsys):
    found = json.loads(printed(capsys, "info", "deploy/yolov7-w6", "--json"))
    network = found["network"]
    assert found["contents"] is None
    assert (network["head"], network["strides"]) == ("Detect", [8, 16, 32, 64])
    assert network["size"]["num_parameters"] == sum(row["parameters"] for row in network["rows"]) == 70426236
    assert network["rows"][-1]["from"] == [114, 115, 116, 117]


def test_json_has_null_for_nan(tmp_path, capsys):
    path = tmp_path / "diverged.pt"
    save_weights(path, Weights(state={"w": torch.ones(1)}, best_fitness=float("nan"), kind="full", format="flatout"))
    found = json.loads(printed(capsys, "info", path, "--json"), parse_constant=pytest.fail)
    assert found["contents"]["best_fitness"] is None


def test_a_config_beside_a_config_is_refused(capsys):
    error = printed(capsys, "info", "yolov7", "--cfg", "yolov7-tiny", code=2)
    assert error == (
        "flatout: --cfg is only for weights that do not contain their config, and yolov7 is a config. Leave it out.\n"
    )


def test_info_of_weights_shows_what_they_contain(capsys):
    text = printed(capsys, "info", FULL)
    weights = read_weights(FULL)
    expected = {
        "file": f"{FULL}: {FULL.stat().st_size:,} bytes, full, format legacy",
        "tensors": "344 (289 float16, 55 int64), 34,971 values",
        "classes": f"3: {', '.join(weights.names)}",
        "epoch": f"{weights.epoch} (from 0)",
        "fitness": f"best {weights.best_fitness:.5g}",
        "EMA": f"yes, {weights.updates} updates",
        "optimizer": "yes",
    }
    for name, value in expected.items():
        assert f"{name:<10} {value}\n" in text
    assert re.search(r"^Model Summary: \d+ layers, 33712 parameters", text, re.MULTILINE)


def test_info_of_weights_that_do_not_match_their_config_still_shows_what_they_contain(capsys):
    text = printed(capsys, "info", FULL, "--cfg", "yolov7")
    assert "tensors    344" in text
    assert re.search(
        r"^network +.+: its tensors do not fit the network of its config, or of --cfg, which has 566",
        text,
        re.MULTILINE,
    )


def test_a_wrong_config_is_exit_code_2_and_one_line(tmp_path, capsys):
    path = tmp_path / "wrong.yaml"
    path.write_text(config({3: "[-1, 1, Cnov, [16, 3, 1]]"}))
    error = printed(capsys, "info", path, code=2)
    assert error == (
        f"flatout: {path}: row 3 [-1, 1, 'Cnov', [16, 3, 1]]: unknown module 'Cnov'; did you mean 'Conv'?\n"
    )


@pytest.mark.parametrize(
    ("name", "code"), [("none.pt", 4), ("none.safetensors", 4), ("none.yaml", 2), ("yolov7-tyni", 2)]
)
def test_the_exit_code_for_a_missing_file_depends_on_its_kind(name, code, capsys):
    error = printed(capsys, "info", name, code=code)
    assert error.startswith(f"flatout: {name}: no such ")


def test_a_name_in_a_file_cannot_control_the_terminal():
    from flatout.yolo.model.info import _classes, _contents

    weights = Weights(state={}, names=["\x1b[31mred", "x" * 1000], nc=2, kind="full", format="legacy")
    shown = _classes(_contents(weights, 0))
    assert "\x1b" not in shown
    assert len(shown) < 200


# -- convert -------------------------------------------------------------------------------------------------------


def test_convert_reports_how_well_the_boxes_agree_and_what_was_written(tmp_path, capsys):
    out = tmp_path / "x.safetensors"
    text = printed(capsys, "convert", FULL, out, "--deploy", "--half")
    first, second = text.splitlines()
    assert re.fullmatch(
        r"boxes of the training and deploy form agree (exactly|to \S+ px) \(\d\.\de-\d\d px as stored in float16\)",
        first,
    )
    size = out.stat().st_size
    assert second == f"{out}: the moving average of {FULL}, 338 tensors in float16, {size:,} bytes"


@pytest.mark.parametrize(("flag", "state"), [("--ema", "ema"), ("--no-ema", "state")])
def test_convert_writes_the_requested_state(flag, state, tmp_path, capsys):
    printed(capsys, "convert", FULL, tmp_path / "x.pt", flag)
    wanted, found = getattr(read_weights(FULL), state), read_weights(tmp_path / "x.pt").state
    assert all(bool((wanted[key] == found[key]).all()) for key in wanted)


def test_convert_refuses_to_overwrite_without_force(tmp_path, capsys):
    out = tmp_path / "x.pt"
    out.write_bytes(b"mine")
    assert printed(capsys, "convert", FULL, out, code=2).endswith("overwrite it with --force.\n")
    assert out.read_bytes() == b"mine"
    assert printed(capsys, "convert", FULL, out, "--force").startswith(f"{out}: everything of {FULL}, ")


def test_weights_that_cannot_be_read_are_exit_code_4(tmp_path, capsys):
    page = tmp_path / "x.pt"
    page.write_text("<!DOCTYPE html><html></html>")
    assert "is a web page, not weights" in printed(capsys, "convert", page, tmp_path / "y.pt", code=4)
    assert "is a web page, not weights" in printed(capsys, "info", page, code=4)
