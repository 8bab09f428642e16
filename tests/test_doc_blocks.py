"""Every block of the documentation names its language, and every command and program in it is run or says why not.

    page --find_blocks--> blocks --+-- marked `<!-- not run: REASON -->`  --> its commands are parsed, its imports made
                                   +-- in RUN_BY_ANOTHER_TEST             --> that test exists and reads the page
                                   +-- all others                         --> run here, in order, in one folder per page

Commands of all blocks are parsed, also of those that are run: a flag that does not exist is reported within seconds.
"""

import argparse
import ast
import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import dropwhile, groupby, pairwise, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from flatout.__main__ import COMMANDS, run, take_debug
from flatout.cli import JOBS, Command
from flatout.errors import FlatoutError
from flatout.yolo.model.configs import find_config
from tests.yolo.predict.small_sources import NAMES, weights_file, write_video
from tests.yolo.small_sets import files_of, label_files_of

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
SHELL, CONSOLE, PYTHON = "sh", "console", "python"
CODE = (SHELL, CONSOLE, PYTHON)
LANGUAGES = (*CODE, "text", "yaml", "json", "toml", "csv")
DOORS = ("train.py", "train_aux.py", "test.py", "detect.py", "export.py")
MAX_S = 250
"""The time that the blocks of one page may take: about 20 s alone, several times as long beside other programs."""

RUN_BY_ANOTHER_TEST = [
    ("docs/api.md", "", "tests/test_api_docs.py::test_every_block_is_run_below"),
    ("docs/checkpoints.md", "", "tests/yolo/weights/test_docs.py::test_the_examples_run"),
    ("docs/config.md", "", "tests/test_config.py::test_the_example_in_the_docs_is_correct"),
    ("docs/data.md", "", "tests/yolo/data/test_data_docs.py::test_the_example_runs"),
    ("docs/feed.md", "class Photos", "tests/test_docs.py::test_the_first_example_of_the_feed_trains"),
    (
        "docs/metrics.md",
        "for images, targets",
        "tests/yolo/test_metrics.py::test_the_first_example_of_the_documentation_runs",
    ),
    ("docs/models.md", "", "tests/yolo/test_models_docs.py::test_the_code_runs"),
    ("docs/multihead.md", "", "tests/yolo/test_multihead_docs.py::test_the_code_runs"),
    (
        "docs/own-loop.md",
        "examples/watch_slow_loop.py",
        "tests/profiler/test_watch.py::test_the_example_is_short_and_names_its_cause",
    ),
    (
        "docs/tiles.md",
        "predict_with",
        "tests/yolo/export/test_exported_tiles.py::test_the_example_of_the_documentation_runs",
    ),
    ("docs/ota.md", "", "tests/yolo/test_loss.py::test_the_example_of_the_documentation_runs"),
    (
        "docs/store.md",
        "class Photos",
        "tests/feed/test_store_docs.py::test_the_example_trains_and_decodes_nothing_twice",
    ),
    (
        "docs/store.md",
        "def read_item",
        "tests/feed/test_store_docs.py::test_a_store_can_be_read_without_opencv_torch_and_flatout",
    ),
]
"""Page, text in its blocks (empty: all Python blocks), and the test that runs them."""

SUBSTITUTIONS = {
    "docs/augment.md": [("size=640", "size=64"), ("batch_size=64", "batch_size=4"), ("workers=8", "workers=1")],
    "docs/export.md": [("--img 640", "--img 64"), ("--grid --end2end", "--img 64 --grid --end2end")],
    "docs/loader.md": [("num_workers=8", "num_workers=2")],
    "docs/new-job.md": [("--epochs 4", "--epochs 1"), ("file:///tmp/copies", "file://$PWD/copies")],
    "docs/own-loop.md": [("num_workers=8", "num_workers=2")],
    "docs/spike.md": [("demo-data demo-spike", "demo-data demo-spike --train 1 --test 1")],
    "docs/start.md": [
        ("--img 320 --batch 16 --epochs 100", "--img 64 --batch 4 --epochs 1 --workers 0 --noautoanchor")
    ],
}
"""Page -> replacements that make its blocks small enough for a test."""

LOOP = """
import torch
dataset = torch.utils.data.TensorDataset(torch.rand(128, 4), torch.rand(128, 1))
loader = torch.utils.data.DataLoader(dataset, batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss_fn = torch.nn.functional.mse_loss
"""
SHOWN_OUTPUT = {"docs/grouping.md": "6 classes in 3 heads"}
"""Page -> the beginning of a block with output that its commands must print."""

GIVEN = {
    "docs/augment.md": """
from flatout.yolo.data.data_yaml import read_data_yaml
from flatout.yolo.data.open_set import SplitConfig, open_split
image_set = open_split(read_data_yaml("bolts.yaml"), "train", SplitConfig(cache_folder=None)).images
""",
    "docs/export.md": "import numpy as np; images = np.zeros((1, 3, 64, 64), np.float32)",
    "docs/loader.md": LOOP,
    "docs/own-loop.md": LOOP,
    "docs/profiler.md": f"{LOOP}\ndata, decode = b'', len",
}
"""Page -> code that defines the names which its Python blocks take for granted."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: str
    line: int
    """Line of its fence, from 1."""
    language: str
    code: str
    reason: str
    """Why it is not run, from the comment above it; empty if there is none."""

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


# Finding blocks


FENCE = re.compile(r"(?P<indent> *)(?P<fence>`{3,}|~{3,})(?P<language>.*)")
MARK = re.compile(r"<!-- not run: (\S.*) -->")


def find_blocks(text: str, page: str) -> list[Block]:
    """The fenced blocks of a page, with their indentation removed."""
    lines = text.splitlines()
    found, start = [], 0
    for number, line in enumerate(lines):
        if number < start or not (opening := FENCE.fullmatch(line)):
            continue
        end = next(at for at in range(number + 1, len(lines)) if lines[at].strip() == opening["fence"])
        code = "\n".join(each.removeprefix(opening["indent"]) for each in lines[number + 1 : end]) + "\n"
        mark = MARK.fullmatch(lines[number - 1].strip()) if number else None
        found.append(Block(page, number + 1, opening["language"].strip(), code, mark[1] if mark else ""))
        start = end + 1
    return found


def language_problems(blocks: Sequence[Block]) -> list[str]:
    """Blocks without a language, and commands in blocks that claim to be something else."""
    problems = []
    for block in blocks:
        if block.language not in LANGUAGES:
            problems.append(f"{block.where}: language {block.language!r}: use one of {', '.join(LANGUAGES)}")
        elif block.language not in CODE:
            problems += [
                f"{block.where}: a command in a block of {block.language}, write it as sh: {line}"
                for line in block.code.splitlines()
                if re.match(r"(\$ |\./run |flatout [a-z]|python \S+\.py)", line)
            ]
    return problems


def mark_problems(text: str, page: str) -> list[str]:
    """Comments `not run` that are not directly above a block of code, or do not say why."""
    used = {block.line - 1 for block in find_blocks(text, page) if block.reason and block.language in CODE}
    return [
        f"{page}:{number}: no reason, or not directly above a block of sh, console or python: {line.strip()}"
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip().startswith("<!-- not run") and number not in used
    ]


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in find_blocks((ROOT / page).read_text(), page)]


def other_test(block: Block) -> str:
    """The test elsewhere that runs a block; empty if there is none."""
    tests = [
        test
        for page, text, test in RUN_BY_ANOTHER_TEST
        if page == block.page and (text in block.code if text else block.language == PYTHON)
    ]
    return tests[0] if tests and block.language in CODE else ""


def is_run_here(block: Block) -> bool:
    return block.language in CODE and not block.reason and not other_test(block)


# Checking commands without running them


class Parsed(BaseException):
    """Raised instead of running a command: its arguments were parsed. Not an Exception, so that nothing catches it."""

    def __init__(self, options: argparse.Namespace, rest: list[str]) -> None:
        self.options = options
        self.rest = rest
        """Arguments that its parser does not know."""


class Refused(BaseException):
    """Raised by a parser that does not accept its arguments."""


@contextlib.contextmanager
def only_parsing() -> Iterator[None]:
    """Make every argument parser stop the program once it has parsed, except for that of `flatout` itself."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_and_stop(self: argparse.ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = parse(self, args, namespace)
        if self.prog == "flatout":
            return known, unknown
        raise Parsed(known, unknown)

    def refuse(self: argparse.ArgumentParser, message: str) -> None:
        raise Refused(f"{self.prog}: {message}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parse_and_stop)
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        patch.setitem(COMMANDS, "toy", Command("the job of docs/new-job.md", "tests.runs.toy_job"))
        yield


def commands_of(block: Block) -> list[list[str]]:
    """The words of each command of a block of sh or console; of a console only lines after `$ `."""
    text = block.code.replace("\\\n", " ")
    if block.language == CONSOLE:
        text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
    commands = []
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        commands += _split_at_operators(list(lexer))
    return commands


def _split_at_operators(words: Sequence[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for before, word in pairwise(["", *words]):
        if set(word) <= set("();|&") and word:
            commands.append([])
        elif not set(before + word) & set("<>"):  # without redirections and their files
            commands[-1].append(word)
    return [command for command in commands if command]


def command_problem(words: Sequence[str]) -> str:
    """What is wrong with a command line, without running it; empty if nothing is. `...` stands for more arguments."""
    words = list(dropwhile(lambda word: re.match(r"\w+=", word), words))  # variables before the program
    match words:
        case []:
            return ""
        case ["flatout" | "./run", *rest] if words[0] == "flatout" or rest[:1] == ["demo"]:
            return flatout_problem(rest)
        case ["python", door, *rest] if door in DOORS:
            return flatout_problem(["yolo", door.removesuffix(".py").removesuffix("_aux"), *rest])
        case ["python", "-m", "flatout", *rest]:
            return flatout_problem(rest)
        case ["python", "-m", "flatout.profile_any", *rest]:
            return profile_any_problem(rest)
        case ["python", "-m", "tests.runs.toy_job", *rest]:
            return flatout_problem(["toy", *rest])
        case ["torchrun", *rest] | ["srun", "torchrun", *rest]:
            return torchrun_problem(rest)
        case ["python", script, *_] | [("./run" | ".ci/run") as script] if "/" in script:
            return "" if (ROOT / script).is_file() else f"there is no {script}"
        case ["./run", command, *_]:
            known = re.findall(r"^  (\w+) ", (ROOT / "run").read_text(), re.MULTILINE)
            return "" if command in known else f"./run has no command {command!r}"
        case ["docker", "build", *_]:
            return ""
        case ["docker", "run", *rest] if "flatout" in rest:
            return flatout_problem(rest[rest.index("flatout") + 1 :])  # after the image's name, which starts flatout
        case [program, *_] if program in OTHER_PROGRAMS:
            return ""
    return f"{words[0]!r} is no program that the documentation may use"


OTHER_PROGRAMS = (".", "aws", "cd", "export", "git", "head", "pip", "scontrol", "trtexec")


def profile_any_problem(words: list[str]) -> str:
    """What is wrong with the flags before the script that is watched."""
    flags = [word for word in takewhile(lambda word: not word.endswith(".py"), words) if word.startswith("-")]
    known = (ROOT / "flatout/profile_any.py").read_text()
    return next((f"profile_any has no flag {flag}" for flag in flags if f'"{flag}"' not in known), "")


def flatout_problem(words: list[str]) -> str:
    """What is wrong with the arguments of `flatout`, without running the command."""
    to_launch = list[str]()
    if words[:1] in (["bootstrap"], ["launch"]) and "--" in words:
        at = words.index("--")
        words, to_launch = words[:at], words[at + 1 :]
    # An ellipsis may be the value of a flag; after a value it would be taken for one more of them.
    words = [word for before, word in pairwise(["", *words]) if word != "..." or before.startswith("-")]
    try:
        with only_parsing():
            run(take_debug(words)[0])
    except Parsed as parsed:
        if words[0] == "profile" and words[1] in JOBS:
            return flatout_problem([words[1], "train", *parsed.rest])
        if unknown := [word for word in parsed.rest if word != "..."]:
            return f"flatout {' '.join(words[:2])}: unknown: {' '.join(unknown)}"
        if to_launch:
            return flatout_problem(to_launch)
        return value_problem([word for word in words if word not in parsed.rest], parsed.options)
    except (Refused, FlatoutError) as error:
        return str(error)
    return f"flatout {' '.join(words)}: no command"


def value_problem(words: Sequence[str], options: argparse.Namespace) -> str:
    """A value of a training that is refused, or a network or hyp file that does not come with flatout."""
    network, hyp = (vars(options).get(name) for name in ("cfg", "hyp"))
    try:
        if words[0] in JOBS and words[1:2] == ["train"]:
            import_module(JOBS[words[0]]).COMMAND.parse(words[2:], f"flatout {words[0]} train")
        if network in words and network not in ("", "..."):
            find_config(str(network))
    except FlatoutError as error:
        return str(error)
    return f"there is no {hyp}" if hyp in words and not (ROOT / str(hyp)).is_file() else ""


def torchrun_problem(words: list[str]) -> str:
    from torch.distributed.run import get_args_parser

    options, unknown = get_args_parser().parse_known_args(words)
    if unknown:
        return f"torchrun: unknown: {' '.join(unknown)}"
    launched = ["-m", options.training_script] if options.module else [options.training_script]
    return command_problem(["python", *launched, *options.training_script_args])


def import_problems(block: Block) -> list[str]:
    """Imports of flatout in a Python block that fail."""
    problems = []
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flatout":
            module = import_module(node.module or "")
            missing = [each.name for each in node.names if not hasattr(module, each.name)]
            problems += [f"{block.where}: {node.module} has no {name}" for name in missing]
        elif isinstance(node, ast.Import):
            for each in node.names:
                if each.name.split(".")[0] == "flatout":
                    import_module(each.name)
    return problems


# Running blocks


def run_blocks(blocks: Sequence[Block], folder: Path, *, given: str = "") -> str:
    """Run blocks one after the other in `folder` and return their output; AssertionError for the first that fails."""
    output = ""
    programs = folder / ".programs"
    programs.mkdir()
    for name, call in {"python": "", "flatout": "-m flatout", "torchrun": "-m torch.distributed.run"}.items():
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {call} "$@"\n')
        (programs / name).chmod(0o755)
    for door in DOORS:
        shutil.copy(ROOT / door, folder)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / ".cache"),
        "OMP_NUM_THREADS": "1",  # the networks are small
    }
    for number, (is_python, group) in enumerate(groupby(blocks, lambda block: block.language == PYTHON)):
        several = list(group)  # Python blocks in a row share their names, as they do for a reader
        code = "".join(block.code for block in several)
        for old, new in SUBSTITUTIONS.get(several[0].page, []):
            code = code.replace(old, new)
        script = programs / f"part_{number}.{'py' if is_python else 'sh'}"
        script.write_text(f"{given}\n{code}" if is_python else code)
        command: list[str | Path] = [sys.executable, script] if is_python else ["sh", "-eu", script]
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=MAX_S, check=False
        )
        places = ", ".join(block.where for block in several)
        assert done.returncode == 0, f"{places}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        output += done.stdout
    return output


# Files that pages take for granted


FILES = {
    "README.md": ["images"],
    "docs/assistants.md": ["images"],
    "docs/augment.md": ["bolts.yaml"],
    "docs/callbacks.md": ["demo-data/demo.yaml"],
    "docs/data.md": ["data.yaml"],
    "docs/doctor.md": ["data/bolts.yaml"],
    "docs/export.md": ["best.pt", "runs/train/exp/weights/best.pt", "data/my.yaml"],
    "docs/metrics.md": ["best.pt", "data/bolts.yaml"],
    "docs/models.md": ["best.pt"],
    "docs/predict.md": ["best.pt", "runs/train/bolts/weights/best.pt", "images", "clip.mp4"],
    "docs/start.md": ["images", "bolts.yaml"],
}
"""Page -> files and folders of the reader's own that its blocks use."""


def write_file(path: Path) -> None:
    """Write weights, a video, a YAML with a data set beside it, or a folder of photographs, as the name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".pt":
        weights_file(path)
    elif path.suffix == ".mp4":
        write_video(path, 3)
    elif path.suffix == ".yaml":
        write_data_set(path)
    else:
        path.mkdir(exist_ok=True)
        for name in ("bus", "cat"):
            shutil.copy(ROOT / f"data/photographs/{name}.jpg", path)


def write_data_set(path: Path) -> None:
    splits = {"train": path.parent / "images/train", "val": path.parent / "images/val"}
    for seed, (split, images) in enumerate(splits.items()):
        label_files_of(files_of(images, 8, seed=seed), path.parent / "labels" / split)
    path.write_text(yaml.safe_dump({**{split: str(images) for split, images in splits.items()}, "names": NAMES}))


# Tests


def test_every_block_names_its_language():
    assert language_problems(all_blocks()) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_mark_gives_a_reason_and_belongs_to_a_block(page: str):
    assert mark_problems((ROOT / page).read_text(), page) == []


@pytest.mark.parametrize("page", PAGES)
def test_every_command_and_flag_exists(page: str):
    blocks = [block for block in find_blocks((ROOT / page).read_text(), page) if block.language in (SHELL, CONSOLE)]
    problems = [(block.where, command_problem(words)) for block in blocks for words in commands_of(block)]
    assert [f"{where}: {problem}" for where, problem in problems if problem] == []


def test_every_command_in_the_tables_for_assistants_exists():
    text = (ROOT / "docs/assistants.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    commands = [command for row in rows for command in re.findall(r"`(flatout [^`]+)`", row)]
    assert len(commands) >= 15
    problems = {command: command_problem(shlex.split(command)) for command in commands}
    assert {command: problem for command, problem in problems.items() if problem} == {}
    codes = {int(row.split("|")[1]) for row in rows if row.split("|")[1].strip().isdecimal()}
    known = {int(found) for found in re.findall(r"^\| (\d+) \|", (ROOT / "docs/exit-codes.md").read_text(), re.M)}
    assert codes <= known and {2, 3, 4, 5, 6, 7, 8, 75, 130} <= codes


def test_every_import_exists():
    marked = [block for block in all_blocks() if block.language == PYTHON and block.reason]
    assert [problem for block in marked for problem in import_problems(block)] == []


def test_every_excerpt_is_in_its_file():
    excerpts = [block for block in all_blocks() if block.reason.startswith("an excerpt of ")]
    assert excerpts
    for block in excerpts:
        source = (ROOT / block.reason.removeprefix("an excerpt of ")).read_text().splitlines()
        assert [line for line in block.code.splitlines() if line not in source] == [], block.where


@pytest.mark.parametrize(("page", "text", "test"), RUN_BY_ANOTHER_TEST)
def test_blocks_that_are_run_elsewhere_have_their_test(page: str, text: str, test: str):
    blocks = [block for block in all_blocks() if block.page == page and other_test(block) == test]
    assert blocks, f"{page} has no such block: {text!r}"
    assert not [block.where for block in blocks if block.reason], "marked as not run, but it is run"
    file, _, name = test.partition("::")
    source = (ROOT / file).read_text()
    assert f"def {name}(" in source and (Path(page).name in source or Path(text).name in source)


@pytest.mark.slow
@pytest.mark.timeout(MAX_S)
@pytest.mark.parametrize("page", sorted({block.page for block in all_blocks() if is_run_here(block)}))
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path):
    for name in FILES.get(page, []):
        write_file(tmp_path / name)
    blocks = [block for block in all_blocks() if block.page == page and is_run_here(block)]
    output = run_blocks(blocks, tmp_path, given=GIVEN.get(page, ""))
    if start := SHOWN_OUTPUT.get(page):
        (shown,) = (block for block in all_blocks() if block.page == page and block.code.startswith(start))
        assert shown.code in output


def test_every_substitution_applies():
    """A replacement without effect would let a block grow without notice."""
    for page, pairs in SUBSTITUTIONS.items():
        code = "".join(block.code for block in all_blocks() if block.page == page and is_run_here(block))
        assert not [old for old, _ in pairs if old not in code], page


# Negative controls: each kind of mistake is reported


def sh(*lines: str, above: str = "") -> list[Block]:
    return find_blocks("\n".join(["text", above, "```sh", *lines, "```"]), "page.md")


def problem_of(line: str) -> str:
    (words,) = commands_of(sh(line)[0])
    return command_problem(words)


def test_a_block_without_a_language_is_reported():
    text = "```sh\nls\n```\n\n```\nflatout doctor\n```\n\n    ```\n    indented\n    ```\n"
    problems = language_problems(find_blocks(text, "page.md"))
    assert [problem.split(": use")[0] for problem in problems] == ["page.md:5: language ''", "page.md:9: language ''"]


def test_a_command_in_a_block_of_text_is_reported():
    text = "```text\nflatout: SIGINT: saved\nflatout yolo train --fast\n```\n"
    (problem,) = language_problems(find_blocks(text, "page.md"))
    assert problem.startswith("page.md:1: a command") and problem.endswith("flatout yolo train --fast")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flatout yolo train --data a.yaml --fats", "unknown: --fats"),
        ("python train.py ... --fats", "unknown: --fats"),
        ("python detect.py --weight a.pt --sourse images/", "--sourse"),
        ("flatout yolo chekc data.yaml", "did you mean 'check'?"),
        ("flatout defect check demo --al", "unknown: --al"),
        ("flatout profile spike --config a.yaml --stpes 3", "--stpes"),
        ("flatout bootstrap --package a -- yolo train --fats", "unknown: --fats"),
        ("torchrun --standalone --nproc_per_node 2 train.py --fats", "unknown: --fats"),
        ("A=1 flatout doctor --jsn", "--jsn"),
        ("docker run --rm --gpus all flatout doctor --jsn", "--jsn"),
        ("flatout doctor && ./run demmo", "./run has no command 'demmo'"),
        ("flatout yolo train --epochs many", "--epochs"),
        ("flatout defect train --epochs many", "epochs: wrong value ('many')"),
        ("flatout yolo train --cfg yolov7-tinny", "did you mean 'yolov7-tiny'?"),
        ("flatout yolo train --hyp data/hyp.none.yaml", "there is no data/hyp.none.yaml"),
        ("python examples/none.py", "there is no examples/none.py"),
        ("flatuot doctor", "'flatuot' is no program"),
    ],
)
def test_a_wrong_command_is_reported(line: str, expected: str):
    problems = [command_problem(words) for words in commands_of(sh(line)[0])]
    assert expected in problems[-1]
    assert not any(problems[:-1])


def test_commands_that_are_only_checked_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert problem_of("flatout yolo demo-data --images 2 --val 1") == ""
    assert list(tmp_path.iterdir()) == []


def test_a_missing_name_is_reported():
    block = Block("page.md", 1, PYTHON, "from flatout import Feed, Fed\n", "a fragment")
    assert import_problems(block) == ["page.md:1: flatout has no Fed"]


@pytest.mark.parametrize("mark", ["<!-- not run: -->", "<!-- not run -->", "<!-- not run: needs a GPU -->\n"])
def test_a_mark_without_a_reason_or_apart_from_its_block_is_reported(mark: str):
    text = f"{mark}\n```sh\nflatout doctor\n```\n"
    assert len(mark_problems(text, "page.md")) == 1
    assert is_run_here(find_blocks(text, "page.md")[0])


def test_a_marked_block_is_not_run_and_an_unmarked_one_is():
    assert not is_run_here(sh("flatout doctor", above="<!-- not run: needs a GPU -->")[0])
    assert is_run_here(sh("flatout doctor")[0])


def test_a_block_that_fails_is_reported_with_its_place(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"^page\.md:3: exit code 2\n(.|\n)*no such model config"):
        run_blocks(sh("flatout yolo info none.yaml", "echo not reached"), tmp_path)
