"""The command lines of YOLOv7 keep every flag, abbreviation and default, and new flags change none of them."""

import argparse
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flatout.__main__ import main
from flatout.cli import flags_of
from flatout.errors import ConfigError
from flatout.yolo.commands import flags
from flatout.yolo.export import ExportOptions
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.options import DetectOptions
from tests.golden_cases import golden_cases
from tests.test_cli import loaded_after

PARSERS = {
    "train.py": flags.train_parser,
    "train_aux.py": flags.train_parser,
    "test.py": flags.test_parser,
    "detect.py": flags.detect_parser,
    "export.py": flags.export_parser,
}
NEW_FIELDS = (*flags.SPEED, *flags.RECIPE, *flags.FILES)
NEW = [flag.name for flag in flags_of(TrainOptions, NEW_FIELDS)]
SAMPLES = {"int": ("7", 7), "float": ("0.25", 0.25), "str": ("abc", "abc")}


def scripts(path: Path):
    return [(name, (name, record)) for name, record in json.loads(path.read_text()).items()]


@pytest.fixture(params=golden_cases("yolov7-data/cli.json", scripts))
def script(request) -> tuple[argparse.ArgumentParser, dict[str, Any]]:
    """The parser of a script, and the golden record of its flags."""
    name, record = request.param
    script = name.removeprefix("fork/")
    assert script in PARSERS, f"unknown script {name!r}"
    return PARSERS[script](), record


def parsed(parser: argparse.ArgumentParser, *words: str) -> argparse.Namespace:
    try:
        with contextlib.redirect_stderr(io.StringIO()) as error:
            return parser.parse_args(words)
    except SystemExit:
        pytest.fail(f"{words}: {error.getvalue()}")


def error_for(parser: argparse.ArgumentParser, *words: str) -> str:
    with contextlib.redirect_stderr(io.StringIO()) as error, pytest.raises(SystemExit) as ended:
        parser.parse_args(words)
    assert ended.value.code == 2
    return error.getvalue()


def words_for(flag: dict[str, Any], spelling: str) -> tuple[list[str], Any]:
    """Arguments that use the flag, and the value that results."""
    if flag["kind"] == "switch":
        return [spelling], True
    text, value = SAMPLES[flag["type"]]
    return ([spelling, text, text], [value, value]) if flag["nargs"] == "+" else ([spelling, text], value)


def as_given(value: Any, flag: dict[str, Any]) -> Any:
    """The value, as a list of one where the flag takes several."""
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


def test_ambiguous_abbreviations_are_still_ambiguous(script):
    parser, record = script
    whole = {flag["flag"] for flag in record["flags"]}
    for flag in record["flags"]:
        shorter = record.get("shortest_unique_prefix", {}).get(flag["flag"], "")[:-1]
        if len(shorter) > 2 and shorter not in whole:  # a whole flag is never ambiguous: --dynamic, --dynamic-batch
            words, _ = words_for(flag, shorter)
            assert "ambiguous option" in error_for(parser, *words), words


def test_flags_of_the_fork_are_those_it_added(script):
    parser, record = script
    known = {flag["flag"] for flag in record["flags"]}
    assert set(record.get("added", ())) <= known & {
        word for action in parser._actions for word in action.option_strings
    }


@pytest.mark.parametrize("flag", NEW)
def test_a_new_flag_must_be_written_in_full(flag):
    value = {"--compile": "on", "--amp": "bf16", "--log-to": "none"}.get(flag, "3")
    is_switch = getattr(TrainOptions(), flag.removeprefix("--").replace("-", "_")) is False
    parsed(flags.train_parser(), flag, *([] if is_switch else [value]))
    if flag[:-1] not in NEW:
        assert f"Write {flag}." in error_for(flags.train_parser(), flag[:-1], *([] if is_switch else [value]))


def test_new_flags_do_not_begin_like_the_abbreviations_that_people_use():
    ours = [
        *NEW,
        *(
            flag.name
            for table in (flags_of(TestOptions, flags.TEST_OURS), flags.DETECT_OURS, flags.EXPORT_OURS)
            for flag in table
        ),
    ]
    assert not [flag for flag in ours if flag.startswith(("--img", "--batch", "--conf", "--iou", "--cache-", "--topk"))]
    assert not [flag.name for flag in flags.DETECT_OURS if flag.name.startswith("--class")]


def test_every_option_that_has_a_flag_is_in_one_group_of_the_help():
    grouped = (*flags.TRAIN_YOLOV7, *flags.TRAIN_FORK, *NEW_FIELDS)
    assert sorted(grouped) == sorted(flag.dest for flag in flags_of(TrainOptions))


@pytest.mark.parametrize(
    ("words", "dest", "value"),
    [
        ("--batch_size 8", "batch_size", 8),
        ("--exist_ok", "exist_ok", True),
        ("--fast_dataloader", "fast_dataloader", True),
        ("--save-period 3", "save_period", 3),
        ("--upload-dataset", "upload_dataset", True),
        ("--save_every_steps=5", "save_every_steps", 5),
    ],
)
def test_dashes_and_underscores_are_the_same_in_a_flag_that_is_written_in_full(words, dest, value):
    assert getattr(train_options(words), dest) == value


# -- from words to options -----------------------------------------------------------------------------------------


def train_options(words: str, **environ: str) -> TrainOptions:
    """Options as the command makes them, from the arguments and the environment."""
    parsed(flags.train_parser(), *words.split())
    return flags.options_from(flags.train_parser().parse_typed(words.split()), environ)


def test_without_arguments_the_options_are_the_defaults():
    assert train_options("") == TrainOptions()
    assert flags.test_options(parsed(flags.test_parser())) == TestOptions()
    assert flags.detect_options(parsed(flags.detect_parser())) == DetectOptions()
    assert flags.export_options(parsed(flags.export_parser())) == ExportOptions()


def test_a_shortcut_is_resolved_after_parsing():
    args = parsed(flags.train_parser(), "--fast-dataloader", "--workers", "8")
    assert (args.fast_dataloader, args.persistent_workers, args.worker_tensor) == (True, False, False)
    options = train_options("--fast-dataloader --workers 8").resolved(cuda=False, bf16=False)
    assert (options.persistent_workers, options.worker_tensor) == (True, True)


def test_fast_chooses_what_the_machine_can_do_and_respects_other_flags():
    fast = train_options("--fast")
    on_gpu, on_cpu = fast.resolved(cuda=True, bf16=True), fast.resolved(cuda=False, bf16=False)
    assert (on_gpu.device_augment, on_gpu.amp, on_gpu.compile, on_gpu.channels_last) == (True, "bf16", "auto", True)
    assert (on_cpu.device_augment, on_cpu.amp, on_cpu.compile, on_cpu.worker_tensor) == (False, None, "off", True)
    assert on_cpu.channels_last
    assert fast.resolved(cuda=False, bf16=True).amp == "bf16"
    assert not train_options("--fast --no-channels-last").resolved(cuda=False, bf16=False).channels_last
    assert train_options("--fast --amp off --compile on").resolved(cuda=True, bf16=True).amp == "off"
    assert on_gpu.resolved(cuda=True, bf16=True) == on_gpu


def parts(words: str) -> dict[str, Any]:
    """The parts of --fast that a command switches on, on a GPU with bf16."""
    options = train_options(words).resolved(cuda=True, bf16=True)
    names = ("fast_dataloader", "device_augment", "channels_last", "compile", "amp")
    return {name: getattr(options, name) for name in (*names, "as_graphs", "decodes_scaled", "decodes_on_gpu")}


LEFT_OUT = {
    "--no-fast-dataloader": {"fast_dataloader": False},
    "--no-device-augment": {"device_augment": False},
    "--no-channels-last": {"channels_last": False},
    "--no-compile": {"compile": "off"},
    "--compile off": {"compile": "off"},
    "--compile on": {"compile": "on"},
    "--amp fp16": {"amp": "fp16"},
    "--amp off": {"amp": "off"},
    "--no-graphs": {"as_graphs": False},
    "--no-scaled-decode": {"decodes_scaled": False},
    "--no-persistent-workers": {},
}


@pytest.mark.parametrize("words", LEFT_OUT)
def test_a_part_of_fast_can_be_turned_off_and_the_others_stay(words):
    assert parts(f"--fast {words}") == parts("--fast") | LEFT_OUT[words]
    assert parts(f"{words} --fast") == parts("--fast") | LEFT_OUT[words]


def test_the_help_of_fast_names_the_flag_that_turns_off_each_part():
    (described,) = (flag.help for flag in flags_of(TrainOptions, ["fast"]))
    named = {words for words in LEFT_OUT if f"{words})" in described or f"{words} " in described}
    assert {part for words in named for part in LEFT_OUT[words]} == {
        part for each in LEFT_OUT.values() for part in each
    }


def test_the_gpu_decodes_only_on_request():
    """Its pixels are not quite those of the CPU, so --fast must not decide it by the machine."""
    assert not parts("--fast")["decodes_on_gpu"]
    assert parts("--fast --gpu-decode") == parts("--fast") | {"decodes_on_gpu": True}
    assert parts("--device-augment --gpu-decode")["decodes_on_gpu"]


def test_every_part_of_fast_can_be_turned_off():
    switched_on = {name for name, value in parts("--fast").items() if value != parts("")[name]}
    assert switched_on == {name for part in LEFT_OUT.values() for name in part}
    resolved, plain = (train_options(words).resolved(cuda=True, bf16=True) for words in ("--fast", ""))
    changed = {name for name, value in vars(resolved).items() if value != getattr(plain, name)}
    assert changed - switched_on == {"fast", "persistent_workers", "worker_tensor"}, "the last two are on by default"


def test_flags_that_turn_off_a_part_work_without_fast_too():
    assert parts("--fast-dataloader --no-persistent-workers")["fast_dataloader"]
    assert not parts("--compile on --no-graphs")["as_graphs"]
    assert train_options("--no-compile", USE_COMPILE="1").resolved(cuda=True, bf16=True).compile == "off"


@pytest.mark.parametrize("part", ["fast-dataloader", "persistent-workers", "device-augment", "channels-last"])
def test_a_part_cannot_be_turned_on_and_off(part):
    with pytest.raises(ConfigError, match=f"--{part} and --no-{part} exclude each other"):
        train_options(f"--{part} --no-{part}")


def test_other_contradictions_are_refused_too():
    with pytest.raises(ConfigError, match="--compile on and --no-compile exclude each other"):
        train_options("--compile on --no-compile")
    with pytest.raises(ConfigError, match="--no-device-augment keeps none there"):
        train_options("--fast --store-420 --no-device-augment")


@pytest.mark.parametrize(
    ("words", "as_graphs"),
    [("", False), ("--fast", True), ("--compile on", True), ("--compile auto", False), ("--fast --multi-scale", False)],
)
def test_steps_are_graphs_if_speed_was_requested_and_shapes_are_fixed(words, as_graphs):
    assert train_options(words).as_graphs == as_graphs


def test_workers_are_a_number_or_auto():
    assert train_options("--workers auto").workers == "auto"
    assert train_options("--workers 3").workers == 3
    assert "neither a whole number nor auto" in error_for(flags.train_parser(), "--workers", "some")


def test_without_new_flags_nothing_is_switched_on():
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


def test_evolve_is_a_switch_that_may_take_a_number():
    commands = ("", "--evolve", "--evolve 7", "--ev --img 320")
    assert [train_options(words).generations for words in commands] == [0, 300, 7, 300]
    with pytest.raises(ConfigError, match="--evolve -1 must be 0 or more"):
        train_options("--evolve=-1")


def test_the_environment_sets_options():
    options = train_options("", USE_COMPILE="1", DIAGNOSE_COMPILE="1", FLATOUT_STOP_AFTER="5")
    assert (options.use_compile, options.diagnose_compile, options.stop_after) == (True, True, 5)
    assert options.resolved(cuda=False, bf16=False).compile == "on"
    off = train_options("", USE_COMPILE="0", DIAGNOSE_COMPILE="", FLATOUT_STOP_AFTER="")
    assert off == TrainOptions()
    with pytest.raises(ConfigError, match="FLATOUT_STOP_AFTER=soon: not a whole number"):
        train_options("", FLATOUT_STOP_AFTER="soon")


def test_wrong_values_are_reported_all_at_once():
    with pytest.raises(ConfigError) as error:
        train_options("--epochs 0 --workers -1 --label-smoothing 2 --img 0 --save-every-minutes 0")
    for flag in ("--epochs 0", "--workers -1", "--label-smoothing 2.0", "--img-size 0 0", "--save-every-minutes 0.0"):
        assert flag in str(error.value)
    with pytest.raises(ConfigError, match="--task vall must be one of train, val, test, speed, study"):
        flags.test_options(parsed(flags.test_parser(), "--task", "vall"))
    with pytest.raises(ConfigError, match="--img-size 1 2 3: give one size"):
        train_options("--img 1 2 3")
    wrong = "--img 0 --conf 2 --at-once 0 --classes -1"
    with pytest.raises(ConfigError) as error:
        flags.detect_options(parsed(flags.detect_parser(), *wrong.split()))
    for flag in ("--img-size 0", "--conf-thres 2.0", "--at-once 0", "--classes -1"):
        assert flag in str(error.value)


def test_contradictory_flags_of_export_are_refused():
    def refusal_of(words: str) -> str:
        with pytest.raises(ConfigError) as error:
            flags.export_options(parsed(flags.export_parser(), *words.split()))
        return str(error.value)

    wrong = refusal_of("--img 0 --batch 0 --conf 2 --topk 0 --max-wh -1 --opset 3 --pictures 0 --formats tflite")
    for flag in ("--img-size 0", "--batch-size 0", "--conf-thres 2", "--topk-all 0", "--max-wh -1", "--opset 3"):
        assert flag in wrong
    assert "--pictures 0" in wrong and "--formats tflite is none of torchscript, onnx" in wrong
    assert "give one of them" in refusal_of("--end2end --include-nms")
    assert "give one of them" in refusal_of("--data a.yaml --images b")
    assert "a height and a width" in refusal_of("--img 1 2 3")
    assert "coremltools" in refusal_of("--formats coreml") and "is discontinued" in refusal_of("--formats lite")
    assert "an ensemble cannot be exported" in error_for(flags.export_parser(), "--weights", "a.pt", "b.pt")


def test_include_still_means_nms():
    """`--include` is a shortened flag of YOLOv7, so it could not be the name of a new one."""
    assert parsed(flags.export_parser(), "--include").include_nms is True


def test_a_new_flag_of_detect_is_written_in_full_and_stands_in_nobodys_way():
    assert "Write --save-crop." in error_for(flags.detect_parser(), "--save-cr")
    assert parsed(flags.detect_parser(), "--save-c").save_conf is True


# -- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", ["--bucket b", "--compat-pt"])
def test_an_unsupported_flag_is_refused_by_name(words):
    flag = words.split()[0]
    with pytest.raises(ConfigError, match=rf"^{flag} is not supported: .*\. Leave the flag out\.$"):
        flags.refuse_unsupported(train_options(words))


def test_the_help_marks_exactly_the_flags_that_are_refused():
    refused = {action.dest for action in flags.train_parser()._actions if "not supported" in (action.help or "")}
    assert refused == set(flags._REASONS)
    for dest in refused:
        other = {bool: True, int: 4}.get(type(getattr(TrainOptions(), dest)), "x")
        with pytest.raises(ConfigError, match="Leave the flag out"):
            flags.refuse_unsupported(TrainOptions(**{dest: other}))
    flags.refuse_unsupported(TrainOptions())


def test_all_refusals_come_together_and_before_torch(capsys):
    assert main(["yolo", "train", "--compat-pt", "--bucket", "b"]) == 2
    error = capsys.readouterr().err
    assert "--compat-pt is not supported: " in error and "--bucket is not supported: " in error
    statement = "from flatout.__main__ import main\nassert main(['yolo', 'train', '--bucket', 'b']) == 2"
    assert "torch" not in loaded_after(statement)


def test_help_and_usage_errors_do_not_import_torch():
    statement = """
import contextlib
from flatout.__main__ import main
helps = [[command, "-h"] for command in ("train", "test", "detect", "export")]
for words in (*helps, ["train", "--lr0", "1"], ["train", "--fast-data"]):
    with contextlib.suppress(SystemExit):
        main(["yolo", *words])
"""
    assert {"torch", "numpy", "cv2", "pydantic", "rich"}.isdisjoint(loaded_after(statement))


# -- what is no flag -----------------------------------------------------------------------------------------------


def test_the_error_for_a_key_of_the_hyp_file_points_to_the_hyp_file():
    error = error_for(flags.train_parser(), "--lr0", "0.01")
    assert "unknown flag --lr0. lr0 is a key of the hyp file: set it there, and give the file with --hyp." in error


def test_the_error_for_an_unknown_flag_suggests_the_nearest_one():
    assert "unknown flag --epoch-count." in error_for(flags.train_parser(), "--epoch-count", "3")
    assert "Did you mean --workers?" in error_for(flags.train_parser(), "--wrokers", "3")
    assert "Did you mean --iou-thres?" in error_for(flags.test_parser(), "--iou-thresh=0.5")


@pytest.mark.parametrize("parser", [flags.train_parser, flags.test_parser, flags.detect_parser, flags.export_parser])
def test_every_flag_of_the_tables_is_explained(parser):
    for action in parser()._actions:
        assert action.help and len(action.help) > 10, action.option_strings
