"""Every command that users of YOLOv7 are known to type means the same, and finds its files from any folder."""

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatout.__main__ import main
from flatout.cli import show_log
from flatout.yolo.commands import flags
from flatout.yolo.commands.flags import refuse_unsupported
from flatout.yolo.export import ExportOptions
from flatout.yolo.find_file import find_cfg, find_file
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.options import DetectOptions
from tests.golden_cases import golden_cases, golden_root
from tests.yolo.typed_commands import BUILT, Typed, commands, typed_values


def new_flags(path: Path):
    return [(record["flag"], record) for record in json.loads(path.read_text()).get("seed_new_flags", [])]


def variables(path: Path):
    return [(name, name) for name in json.loads(path.read_text()).get("seed_env", {})]


def known_flags(script: str) -> list[dict]:
    """The flags in the golden tables: those of upstream, of the fork, and the new ones."""
    file = golden_root() / "yolov7-data/cli.json"
    tables = json.loads(file.read_text()) if file.exists() else {}
    table = tables.get(f"fork/{script}", tables.get(script))
    if table is None:
        pytest.skip(f"cli.json does not list the flags of {script}")
    new = json.loads((golden_root() / "yolov7-data/commands.json").read_text()).get("seed_new_flags", [])
    added = [{"dest": flag["flag"].removeprefix("--").replace("-", "_"), **flag} for flag in new]
    return [*table["flags"], *(added if script not in ("test.py", "detect.py", "export.py") else [])]


@pytest.fixture
def no_files_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


COMMANDS = golden_cases("yolov7-data/commands.json", commands, also=("yolov7-data/cli.json",))


@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_sets_exactly_the_options_it_names(typed: Typed, no_files_here):
    if typed.script == "":
        return check_shortcut(typed)
    if "--help" in typed.words:
        return check_help(typed)
    if BUILT[typed.script] == "train":
        return check_training(typed)
    if BUILT[typed.script] == "detect":
        return check_detect(typed)
    if BUILT[typed.script] == "export":
        return check_export(typed)
    return check_test(typed)


def check_training(typed: Typed) -> None:
    values = typed_values(typed.words, known_flags(typed.script))
    sizes = values.pop("img_size", [640])
    expected = TrainOptions(
        **(values | {"freeze": tuple(values.get("freeze", [0]))}),
        img_size=(sizes[0], sizes[-1]),
        use_compile=typed.env.get("USE_COMPILE") == "1",
        diagnose_compile=typed.env.get("DIAGNOSE_COMPILE") == "1",
    )
    got = flags.options_from(flags.train_parser().parse_typed(typed.words), typed.env)
    assert got == expected
    check_files(typed, got)


def check_test(typed: Typed) -> None:
    values = typed_values(typed.words, known_flags(typed.script))
    expected = TestOptions(**(values | {"weights": tuple(values["weights"])}))
    assert flags.test_options(flags.test_parser().parse_args(typed.words)) == expected
    assert find_file(expected.data).is_file()


def check_detect(typed: Typed) -> None:
    values = typed_values(typed.words, known_flags(typed.script))
    expected = DetectOptions(**(values | {"weights": tuple(values["weights"])}))
    assert flags.detect_options(flags.detect_parser().parse_args(typed.words)) == expected


def check_export(typed: Typed) -> None:
    values = typed_values(typed.words, known_flags(typed.script))
    sizes = values.pop("img_size", [640])
    expected = ExportOptions(**values, img_size=(sizes[0], sizes[-1]))
    assert flags.export_options(flags.export_parser().parse_args(typed.words)) == expected


def check_files(typed: Typed, options: TrainOptions) -> None:
    """All YAML files of the command come with flatout, and the command is not refused."""
    assert find_file(options.data).is_file()
    assert find_file(options.hyp, flag="--hyp").is_file()
    refuse_unsupported(options)
    assert find_cfg(options.cfg, weights=None)


def check_shortcut(typed: Typed) -> None:
    """The one command that executes the text of train.py: the parser gives the values that it prints."""
    assert typed.must == "prints: True False False", f"unknown command {typed.text}"
    args = flags.train_parser().parse_args(["--fast-dataloader", "--workers", "8"])
    assert [args.fast_dataloader, args.persistent_workers, args.worker_tensor] == [True, False, False]


def check_help(typed: Typed) -> None:
    """The flag that the command searches for is in the help, with a description."""
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        main(["yolo", BUILT[typed.script], *typed.words])
    (line,) = [line for line in out.getvalue().splitlines() if line.strip().startswith(f"--{typed.searched_for()}")]
    assert len(line.split()) > 3


@pytest.mark.parametrize("record", golden_cases("yolov7-data/commands.json", new_flags))
def test_the_flags_of_the_plan_exist_with_their_defaults(record):
    dest = record["flag"].removeprefix("--").replace("-", "_")
    assert record["kind"] == "switch"
    assert getattr(flags.train_parser().parse_args([]), dest) is record["default"]
    assert getattr(flags.train_parser().parse_args([record["flag"]]), dest) is True


@pytest.mark.parametrize("variable", golden_cases("yolov7-data/commands.json", variables))
def test_the_variables_of_the_plan_are_off_by_default_and_have_an_effect(variable):
    assert flags.options_from({}, {variable: "0"}) == flags.options_from({}, {}) == TrainOptions()
    field = variable.lower()
    assert getattr(flags.options_from({}, {variable: "1"}), field) is True


@pytest.mark.parametrize("script", BUILT)
def test_the_script_at_the_root_runs_the_command(script):
    """Each script only calls the command.

    train.py has five more lines for programs that execute its text (S1-d in docs/migrate.md).
    """
    source = (Path(__file__).parents[2] / script).read_text()
    assert f'main(["yolo", "{BUILT[script]}", *sys.argv[1:]])' in source
    assert len([line for line in source.splitlines() if line.strip()]) <= (11 if script == "train.py" else 6)


@pytest.fixture
def silent_log(monkeypatch) -> Iterator[None]:
    """The state of the logger before any command has run."""
    logger = logging.getLogger("flatout")
    monkeypatch.setattr(logger, "handlers", [])
    level = logger.level
    yield
    logger.setLevel(level)


def test_a_command_prints_what_the_library_logs_and_marks_warnings(silent_log, capsys):
    show_log()
    show_log()
    logging.getLogger("flatout.yolo.train").info("epoch %d", 1)
    logging.getLogger("flatout.yolo.train").warning("no weights")
    logging.getLogger("flatout.feed").debug("too much")
    assert capsys.readouterr().out == "epoch 1\nwarning: no weights\n"
    show_log(only_warnings=True)
    logging.getLogger("flatout.yolo.train").info("epoch %d", 2)
    logging.getLogger("flatout.yolo.train").error("lost")
    assert capsys.readouterr().out == "error: lost\n"


def test_help_names_the_script_that_was_typed(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["/somewhere/train_aux.py"])
    with pytest.raises(SystemExit):
        main(["yolo", "train", "--help"])
    assert capsys.readouterr().out.startswith("usage: train_aux.py [-h]")
