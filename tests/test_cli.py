"""The command line: help without heavy imports, one line per failure, documented exit codes."""

import ast
import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import pytest

import flatout
from flatout.__main__ import COMMANDS, PACKAGES, main, split_at_command, take_debug
from flatout.errors import ChildLostError, ConfigError, DataError, ResourceError

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "numpy", "cv2", "pydantic", "yaml", "rich")


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Replaces the doctor command by a function; reports go to the test's own folder."""

    def install(function):
        module = ModuleType("flatout.doctor")
        module.main = function
        monkeypatch.setitem(sys.modules, "flatout.doctor", module)

    monkeypatch.delenv("FLATOUT_DEBUG", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return install


def raising(error):
    def run(argv):
        raise error

    return run


def loaded_after(statement: str) -> list[str]:
    """The heavy modules that a new interpreter has imported after running a statement."""
    program = f"import sys\n{statement}\nimport json; print(json.dumps([m for m in {HEAVY} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_names_that_the_output_cannot_show_do_not_end_a_command(tmp_path, encoding):
    (tmp_path / "☃.yaml").write_text("train: gone\nval: gone\nnames: [bolt]\n")
    done = subprocess.run(
        [sys.executable, "-m", "flatout", "yolo", "check", "☃.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3 and "\\u2603.yaml: 1 class" in done.stdout, done.stderr


def test_help_and_usage_errors_import_nothing_heavy():
    statement = """
import contextlib
from flatout.__main__ import main
with contextlib.suppress(SystemExit):
    main(["--help"])
with contextlib.suppress(SystemExit):
    main(["--no-such-option"])
main([])
main(["docter"])
import flatout; dir(flatout)
"""
    assert loaded_after(statement) == []


def test_the_probe_for_heavy_imports_sees_them():
    assert loaded_after("import yaml") == ["yaml"]


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out and entry.help in out for name, entry in COMMANDS.items())


def test_no_command_prints_the_help(capsys):
    assert main([]) == 0
    assert "usage: flatout" in capsys.readouterr().out


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"flatout {flatout.__version__}\n"


@pytest.mark.parametrize(
    ("word", "advice"), [("docter", "did you mean 'doctor'?"), ("xyzzy", "`flatout --help` lists the commands.")]
)
def test_an_unknown_command_is_one_sentence_with_the_closest_match(word, advice, capsys):
    assert main([word, "--fast"]) == 2
    assert capsys.readouterr().err == f"flatout: unknown command {word!r}; {advice}\n"


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            ["train", "--data", "a.yaml"],
            "which job? `flatout yolo train`, `flatout defect train` or `flatout spike train`.",
        ),
        (["val"], "which job? `flatout yolo test`, `flatout defect test` or `flatout spike test`."),
        (
            ["predict", "a.jpg"],
            "which job? `flatout yolo detect`, `flatout defect predict` or `flatout spike predict`.",
        ),
        (["export"], "which job? `flatout yolo export`, `flatout defect export` or `flatout spike export`."),
        (["detect", "--source", "0"], "run `flatout yolo detect --source 0`."),
        (["info", "yolov7"], "run `flatout yolo info yolov7`."),
    ],
)
def test_a_command_of_a_job_without_its_job_is_answered_with_the_right_one(words, answer, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err == f"flatout: {words[0]!r} is a command of a job: {answer}\n"


@pytest.mark.parametrize(
    ("words", "real"),
    [
        (["yolo", "val"], "flatout yolo test"),
        (["yolo", "evaluate"], "flatout yolo test"),
        (["yolo", "predict"], "flatout yolo detect"),
        (["defect", "detect"], "flatout defect predict"),
        (["spike", "val"], "flatout spike test"),
    ],
)
def test_other_names_of_commands_work(words, real, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0 and capsys.readouterr().out.startswith(f"usage: {real} ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["help"], "usage: flatout [-h]"),
        (["help", "yolo", "val"], "usage: flatout yolo test"),
        (["yolo", "help", "train"], "usage: flatout yolo train"),
        (["defect", "help"], "usage: flatout defect [-h]"),
        (["version"], f"flatout {flatout.__version__}"),
    ],
)
def test_help_and_version_may_be_words(words, said, capsys):
    with contextlib.suppress(SystemExit):
        assert main(words) == 0
    assert capsys.readouterr().out.startswith(said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tain"], "did you mean `flatout yolo train`, `flatout defect train` or `flatout spike train`?"),
        (["exprt"], "did you mean `flatout yolo export`, `flatout defect export` or `flatout spike export`?"),
        (["track"], "did you mean `flatout yolo detect --track`?"),
        (["yolo", "track", "--source", "a.mp4"], "run `flatout yolo detect --track --source a.mp4`."),
    ],
)
def test_a_command_of_another_program_is_answered_with_ours(words, said, capsys):
    assert main(words) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["yolo", "detect", "train", "data=x.yaml"], "A command is one word: `flatout yolo train`"),
        (["yolo", "detect", "--model", "a.pt"], "unknown flag --model. Did you mean --weights?"),
        (["yolo", "train", "--batch-sise", "4"], "Did you mean --batch-size?"),
        (["yolo", "train", "--lion"], "unknown flag --lion. --help lists all flags."),
    ],
)
def test_words_and_flags_of_another_program_are_answered_with_ours(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["yolo", "detect", "--weights", "none.pt", "--source", ".", "--imgsz", "320"],
        ["yolo", "val", "--weights", "none.pt", "--data", "coco.yaml", "--imgsz=320"],
        ["yolo", "export", "--weights", "none.pt", "--format", "torchscript"],
    ],
)
def test_flags_that_mean_the_same_elsewhere_are_accepted(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a.png").touch()
    assert main(words) == 4
    assert "--weights none.pt: no such file" in capsys.readouterr().err


def test_help_lists_the_other_names(capsys):
    for words, names in (
        (["yolo"], "val for test, predict for detect"),
        (["spike"], "val for test, detect for predict"),
    ):
        assert main(words) == 0
        assert f"Other names: {names}." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "flag"),
    [("model=a.pt", "--weights a.pt"), ("imgsz=320", "--img-size 320"), ("conf=0.4", "--conf-thres 0.4")],
)
def test_settings_with_an_equals_sign_are_answered_with_the_flag(word, flag, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["yolo", "predict", word])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"unknown argument {word}. Flags are written with dashes: {flag}\n")


def test_a_command_gets_its_own_words_and_its_exit_code_is_returned(command):
    seen = []
    command(lambda argv: seen.append(argv) or 5)
    assert main(["--debug", "doctor", "--json", "-h", "--version", "x"]) == 5
    assert seen == [["--json", "-h", "--version", "x"]]


def test_debug_is_taken_from_anywhere_but_after_a_bare_dash_dash():
    assert take_debug(["doctor", "--debug", "--json"]) == (["doctor", "--json"], True)
    assert take_debug(["doctor", "--", "--debug"]) == (["doctor", "--", "--debug"], False)


def test_words_split_at_the_first_that_is_no_option():
    assert split_at_command(["--a", "b", "--c"]) == (["--a"], ["b", "--c"])
    assert split_at_command(["--a"]) == (["--a"], [])


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("bad"), 2), (DataError("bad"), 3), (ResourceError("bad"), 5), (ChildLostError("bad"), 7)],
)
def test_our_errors_are_one_line_and_their_exit_code(error, code, command, capsys):
    command(raising(error))
    assert main(["doctor"]) == code
    assert capsys.readouterr().err == "flatout: bad\n"


@pytest.mark.parametrize(("argv", "variable"), [(["doctor", "--debug"], ""), (["doctor"], "1")])
def test_debug_shows_the_traceback(argv, variable, command, capsys, monkeypatch):
    command(raising(ConfigError("bad")))
    monkeypatch.setenv("FLATOUT_DEBUG", variable)
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.endswith("flatout: bad\n")


def test_ctrl_c_is_130(command, capsys):
    command(raising(KeyboardInterrupt()))
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "flatout: interrupted\n"


def test_an_internal_error_is_70_and_one_line_naming_a_report(command, capsys):
    command(raising(ZeroDivisionError("two\nlines")))
    assert main(["doctor", "--json"]) == 70
    err = capsys.readouterr().err
    match = re.fullmatch(r"flatout: internal error: ZeroDivisionError: two lines \(report: (.+)\)\n", err)
    report = Path(match[1]).read_text()
    assert "Traceback" in report
    assert "command: flatout doctor --json" in report
    assert f"flatout {flatout.__version__}" in report
    assert re.search(r"^torch \d", report, re.MULTILINE)


def test_an_internal_error_without_a_writable_temporary_folder_still_is_one_line(
    command, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    command(raising(ZeroDivisionError("x")))
    assert main(["doctor"]) == 70
    assert capsys.readouterr().err.count("\n") == 1


def test_a_reader_who_leaves_is_not_an_internal_error():
    program = """
import sys
from types import ModuleType
module = sys.modules["flatout.doctor"] = ModuleType("flatout.doctor")
module.main = lambda argv: print("x" * 1_000_000) or 0
from flatout.__main__ import main
sys.exit(main(["doctor"]))
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        child.stdout.read(1)
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 141


def test_a_pipe_broken_elsewhere_is_an_internal_error(command, capsys):
    command(raising(BrokenPipeError("worker")))
    assert main(["doctor"]) == 70
    assert "BrokenPipeError: worker" in capsys.readouterr().err


def test_public_names_are_listed_and_others_are_refused():
    assert set(flatout.__all__) <= set(dir(flatout))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = flatout.no_such_name


def test_every_public_name_can_be_imported():
    for name in flatout.__all__:
        assert getattr(flatout, name) is not None


@pytest.mark.parametrize("script", ["train.py", "train_aux.py", "test.py", "detect.py", "export.py", "-m flatout"])
def test_a_python_without_our_packages_says_which_one_to_use(script):
    words = script.split() + (["yolo", "train"] if script.startswith("-m") else [])
    done = subprocess.run(
        [sys.executable, "-S", *words, "--weights", "none.pt"], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (5, "")
    assert re.fullmatch(r"flatout: this Python \(.*\) lacks \S+, which flatout needs\. .+\n", done.stderr), done.stderr


def test_the_python_to_use_is_the_one_that_run_has_set_up(monkeypatch, tmp_path, capsys, command):
    monkeypatch.setattr("flatout.__main__.__file__", str(tmp_path / "flatout/__main__.py"))
    monkeypatch.setattr(sys, "argv", ["/some/where/train.py"])
    command(raising(ModuleNotFoundError("No module named 'yaml.nodes'", name="yaml.nodes")))
    assert main(["doctor"]) == 5
    assert capsys.readouterr().err.endswith(
        f"lacks PyYAML, which flatout needs. {sys.executable} -m pip install PyYAML\n"
    )
    (tmp_path / "run").touch()
    main(["doctor"])
    assert (
        f"Create an environment with {tmp_path}/run demo, then: {tmp_path}/.venv/bin/python train.py ..."
        in capsys.readouterr().err
    )
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    main(["doctor"])
    assert f"of ./run: {tmp_path}/.venv/bin/python train.py ..., or activate it: . {tmp_path}/.venv/bin/activate" in (
        capsys.readouterr().err
    )
    command(raising(ModuleNotFoundError("No module named 'mine'", name="mine")))
    assert main(["doctor"]) == 70, "a package that is none of our dependencies"
    monkeypatch.setattr("flatout.__main__.OLDEST_PYTHON", (9, 0))
    assert main(["doctor"]) == 5
    assert "and flatout needs 3.11 or newer. Use the environment of ./run" in capsys.readouterr().err


def test_the_packages_to_install_are_those_that_are_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {requirement.partition(">=")[0] for requirement in declared} == set(PACKAGES.values())


def test_the_old_check_of_the_parser_prints_what_its_document_says():
    """Command S1-d: it runs the text of train.py up to where flags are parsed, and must not start a training."""
    commands = json.loads((ROOT / "tests/golden/yolov7-data/commands.json").read_text())["seed_commands"]
    check = next(each for each in commands if each["id"] == "S1-d")
    program = check["cmd"].removeprefix('python -c "').removesuffix('"')
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True False False\n", "")


# -- every flag has an effect --------------------------------------------------------------------------------------


def read_from_options(job: str) -> set[str]:
    """Names of attributes that the package of a job takes from its options, checks of their values aside."""
    found, root = set(), Path(flatout.__file__).parent
    for path in (root / job).rglob("*.py"):
        receivers = {"options", "_options", "asked"} | ({"self"} if path.name == "options.py" else set())
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.FunctionDef(name="__post_init__" | "_problems_of_training"):
                    node.body = []  # a value that is only checked has no effect
                case ast.Attribute(value=ast.Name(id=name) | ast.Attribute(attr=name), ctx=ast.Load()):
                    found |= {node.attr} if name in receivers else set()
                case ast.Call(func=ast.Attribute(attr="shared_with"), args=[ast.Name(id=config)]):
                    module = importlib.import_module(
                        ".".join(["flatout", *path.relative_to(root).with_suffix("").parts])
                    )
                    found |= {field.name for field in fields(getattr(module, config))}
    return found


def test_every_flag_of_a_training_is_used_or_its_help_says_that_it_is_not():
    from flatout.cli import flags_of
    from flatout.defect.options import TrainOptions as DefectOptions
    from flatout.spike.options import TrainOptions as SpikeOptions
    from flatout.yolo.options import TrainOptions as YoloOptions

    of_runs = read_from_options("runs")

    def unread(job: str, options: type) -> set[str]:
        return {field.name for field in fields(options)} - read_from_options(job) - of_runs

    assert unread("defect", DefectOptions) == set()
    assert unread("spike", SpikeOptions) == set()
    help_of = {flag.dest: flag.help for flag in flags_of(YoloOptions)}
    silent = unread("yolo", YoloOptions)
    assert {
        name for name in silent if "no effect, because" not in help_of[name] and "not supported" not in help_of[name]
    } == set()
    assert {name for name, text in help_of.items() if "no effect, because" in text} <= silent
