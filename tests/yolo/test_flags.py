"""The command lines of YOLOv7: every flag, every abbreviation, every default; and what is new changes none of them."""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main
from flatout.errors import ConfigError
from flatout.yolo.compat import flags, not_built, test_flags, train_flags
from flatout.yolo.options import TestOptions, TrainOptions
from tests.golden_cases import golden_cases
from tests.test_cli import loaded_after

PARSERS = {
    "train.py": flags.train_parser,
    "train_aux.py": flags.train_parser,
    "test.py": flags.test_parser,
}
"""A script that is built gets its parser here."""
NOT_BUILT = ("detect.py", "export.py")
NEW = [flag.name for group in (train_flags.SPEED, train_flags.RECIPE, train_flags.FILES) for flag in group]
SAMPLES = {"int": ("7", 7), "float": ("0.25", 0.25), "str": ("abc", "abc")}


def scripts(path: Path):
    return [(name, (name, record)) for name, record in json.loads(path.read_text()).items()]


@pytest.fixture(params=golden_cases("yolov7-data/cli.json", scripts))
def script(request) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """The parser of ours that answers for a script, and what the script itself knows."""
    name, record = request.param
    script = name.removeprefix("fork/")
    assert script in PARSERS or script in NOT_BUILT, f"unknown script {name!r}"
    if script in NOT_BUILT:
        pytest.skip(f"{script} is not built yet")
    return PARSERS[script](), record


def parsed(parser: argparse.ArgumentParser, *words: str) -> argparse.Namespace:
    try:
        with contextlib.redirect_stderr(io.StringIO()) as complaint:
            return parser.parse_args(words)
    except SystemExit:
        pytest.fail(f"{words}: {complaint.getvalue()}")


def complaint_about(parser: argparse.ArgumentParser, *words: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as complaint, pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    return complaint.getvalue()


def words_for(flag: dict[str, Any], spelling: str) -> tuple[list[str], Any]:
    """A use of the flag, and the value that it gives."""
    if flag["kind"] == "switch":
        return [spelling], True
    text, value = SAMPLES[flag["type"]]
    return ([spelling, text, text], [value, value]) if flag["nargs"] == "+" else ([spelling, text], value)


def as_given(value: Any, flag: dict[str, Any]) -> Any:
    """One value stands for a list of one where a flag takes several."""
    return [value] if flag["nargs"] == "+" and not isinstance(value, list) else value


def test_every_flag_has_its_name_type_and_default(script):
    parser, record = script
    for flag in record["flags"]:
        nothing = getattr(parsed(parser), flag["dest"])
        assert as_given(nothing, flag) == as_given(flag["default"], flag), flag["flag"]
        words, value = words_for(flag, flag["flag"])
        got = getattr(parsed(parser, *words), flag["dest"])
        assert got == value and type(got) is type(value), flag["flag"]
        if flag["nargs"] == "?":
            assert getattr(parsed(parser, flag["flag"]), flag["dest"]) == flag["const"]


def test_every_abbreviation_still_means_its_flag(script):
    parser, record = script
    shortest = record.get("shortest_unique_prefix", {})
    for flag in record["flags"]:
        for length in range(len(shortest.get(flag["flag"], flag["flag"])), len(flag["flag"])):
            words, value = words_for(flag, flag["flag"][:length])
            assert getattr(parsed(parser, *words), flag["dest"]) == value, words


def test_what_was_ambiguous_still_is(script):
    parser, record = script
    for flag in record["flags"]:
        shorter = record.get("shortest_unique_prefix", {}).get(flag["flag"], "")[:-1]
        if len(shorter) > 2:
            words, _ = words_for(flag, shorter)
            assert "ambiguous option" in complaint_about(parser, *words), words


def test_flags_of_the_fork_are_those_it_added(script):
    parser, record = script
    known = {flag["flag"] for flag in record["flags"]}
    assert set(record.get("added", ())) <= known & {
        word for action in parser._actions for word in action.option_strings
    }


@pytest.mark.parametrize("flag", NEW)
def test_a_new_flag_is_written_in_full(flag):
    value = {"--compile": "on", "--amp": "bf16"}.get(flag, "3")
    is_switch = getattr(TrainOptions(), flag.removeprefix("--").replace("-", "_")) is False
    parsed(flags.train_parser(), flag, *([] if is_switch else [value]))
    if flag[:-1] not in NEW:
        assert f"Write {flag}." in complaint_about(flags.train_parser(), flag[:-1], *([] if is_switch else [value]))


def test_new_flags_do_not_begin_like_the_abbreviations_that_people_use():
    ours = [*NEW, *(flag.name for flag in test_flags.OURS)]
    assert not [flag for flag in ours if flag.startswith(("--img", "--batch", "--conf", "--iou", "--cache-", "--topk"))]


# -- from words to options -----------------------------------------------------------------------------------------


def train_options(words: str, **environ: str) -> TrainOptions:
    return flags.train_options(parsed(flags.train_parser(), *words.split()), environ)


def test_nothing_typed_means_the_defaults():
    assert train_options("") == TrainOptions()
    assert flags.test_options(parsed(flags.test_parser())) == TestOptions()


def test_a_shortcut_is_parsed_alone_and_resolved_afterwards():
    args = parsed(flags.train_parser(), "--fast-dataloader", "--workers", "8")
    assert (args.fast_dataloader, args.persistent_workers, args.worker_tensor) == (True, False, False)
    options = flags.train_options(args, {}).resolved(cuda=False, bf16=False)
    assert (options.persistent_workers, options.worker_tensor) == (True, True)


def test_fast_chooses_what_the_machine_can_do_and_respects_what_was_said():
    fast = train_options("--fast")
    on_gpu, on_cpu = fast.resolved(cuda=True, bf16=True), fast.resolved(cuda=False, bf16=False)
    assert (on_gpu.device_augment, on_gpu.amp, on_gpu.compile, on_gpu.channels_last) == (True, "bf16", "auto", True)
    assert (on_cpu.device_augment, on_cpu.amp, on_cpu.compile, on_cpu.worker_tensor) == (False, None, "off", True)
    assert train_options("--fast --amp off --compile on").resolved(cuda=True, bf16=True).amp == "off"
    assert on_gpu.resolved(cuda=True, bf16=True) == on_gpu


def test_without_a_new_flag_nothing_is_switched_on():
    options = train_options("--workers 8 --batch-size 64")
    assert options.resolved(cuda=True, bf16=True) == options
    assert options.compile == "off" and options.amp is None


@pytest.mark.parametrize(("words", "sizes"), [("--img 320", (320, 320)), ("--img 640 320", (640, 320))])
def test_one_size_is_both_sizes(words, sizes):
    assert train_options(words).img_size == sizes


@pytest.mark.parametrize(
    ("words", "environ", "rank"),
    [
        ("--local_rank 3", {}, 3),
        ("--local-rank 3", {}, 3),
        ("--local-rank=3", {}, 3),
        ("", {"LOCAL_RANK": "3"}, 3),
        ("", {"LOCAL_RANK": "0"}, 0),
        ("--local_rank 1", {"LOCAL_RANK": "1"}, 1),
        ("--lo 2", {}, 2),
        ("", {}, -1),
    ],
)
def test_all_three_launchers_are_understood(words, environ, rank):
    assert train_options(words, **environ).local_rank == rank


def test_the_environment_is_read_at_the_door():
    options = train_options("", USE_COMPILE="1", DIAGNOSE_COMPILE="1", FLATOUT_STOP_AFTER="5")
    assert (options.use_compile, options.diagnose_compile, options.stop_after) == (True, True, 5)
    assert options.resolved(cuda=False, bf16=False).compile == "on"
    off = train_options("", USE_COMPILE="0", DIAGNOSE_COMPILE="", FLATOUT_STOP_AFTER="")
    assert off == TrainOptions()
    with pytest.raises(ConfigError, match="FLATOUT_STOP_AFTER=soon: write a whole number"):
        train_options("", FLATOUT_STOP_AFTER="soon")


def test_wrong_values_are_told_all_at_once():
    with pytest.raises(ConfigError) as told:
        train_options("--epochs 0 --workers -1 --label-smoothing 2 --img 0 --save-every-minutes 0")
    for flag in ("--epochs 0", "--workers -1", "--label-smoothing 2.0", "--img-size 0 0", "--save-every-minutes 0.0"):
        assert flag in str(told.value)
    with pytest.raises(ConfigError, match="--task vall is none of train, val, test, speed, study"):
        flags.test_options(parsed(flags.test_parser(), "--task", "vall"))
    with pytest.raises(ConfigError, match="--img-size 1 2 3: give one size"):
        train_options("--img 1 2 3")


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "--bucket b", "--evolve", "--sync-bn", "--upload_dataset", "--entity me", "--bbox_interval 3",
        "--save_period 5", "--artifact_alias x", "--heads 4", "--head-config heads.yaml", "--class-aware-aug",
        "--head-params my.yaml",
    ],
)  # fmt: skip
def test_what_is_not_built_is_refused_by_name(words):
    flag = words.split()[0]
    with pytest.raises(ConfigError, match=rf"^{flag}: .*\. Leave the flag out\.$"):
        not_built.refuse_what_is_not_built(train_options(words))


def test_help_says_what_is_refused_and_of_nothing_else():
    told = {action.dest for action in flags.train_parser()._actions if "refused" in (action.help or "")}
    assert told == set(not_built._REASONS)
    for dest in told:
        other = {bool: True, int: 4}.get(type(getattr(TrainOptions(), dest)), "x")
        with pytest.raises(ConfigError, match="Leave the flag out"):
            not_built.refuse_what_is_not_built(TrainOptions(**{dest: other}))
    not_built.refuse_what_is_not_built(TrainOptions())


def test_all_refusals_come_together_and_before_torch(capsys):
    assert main(["yolo", "train", "--heads", "4", "--evolve"]) == 2
    told = capsys.readouterr().err
    assert "--heads: " in told and "--evolve: " in told
    statement = "from flatout.__main__ import main\nassert main(['yolo', 'train', '--evolve']) == 2"
    assert "torch" not in loaded_after(statement)


def test_help_and_mistakes_do_not_import_torch():
    statement = """
import contextlib
from flatout.__main__ import main
for words in (["train", "--help"], ["test", "--help"], ["train", "--lr0", "1"], ["train", "--fast-data"]):
    with contextlib.suppress(SystemExit):
        main(["yolo", *words])
"""
    assert {"torch", "numpy", "cv2", "pydantic", "rich"}.isdisjoint(loaded_after(statement))


# -- what is no flag -----------------------------------------------------------------------------------------------


def test_a_key_of_the_hyp_file_is_sent_there():
    told = complaint_about(flags.train_parser(), "--lr0", "0.01")
    assert "--lr0 is no flag. lr0 is a key of the hyp file: change it there, and name the file with --hyp." in told


def test_an_unknown_flag_gets_the_nearest_one():
    assert "--epoch-count is no flag." in complaint_about(flags.train_parser(), "--epoch-count", "3")
    assert "Did you mean --workers?" in complaint_about(flags.train_parser(), "--wrokers", "3")
    assert "Did you mean --iou-thres?" in complaint_about(flags.test_parser(), "--iou-thresh=0.5")


@pytest.mark.parametrize("parser", [flags.train_parser, flags.test_parser])
def test_every_flag_of_the_tables_is_explained(parser):
    for action in parser()._actions:
        assert action.help and len(action.help) > 10, action.option_strings
