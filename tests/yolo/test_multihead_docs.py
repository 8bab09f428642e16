"""The commands, flags and code of docs/multihead.md work."""

import re
from pathlib import Path

import yaml

from flatout.yolo.commands import flags
from flatout.yolo.multihead.head_config import head_config_of

PAGE = (Path(__file__).parents[2] / "docs/multihead.md").read_text()


def test_the_code_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "multihead.md", "exec"), {})
    assert capsys.readouterr().out.startswith("4 tensor(")


def test_the_head_configuration_is_valid():
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert [group.classes for group in head_config_of(yaml.safe_load(text), where="page").heads] == [
        (5, 0), (2,), (1, 4, 3),
    ]  # fmt: skip


def test_the_flags_exist():
    known = {name for action in flags.train_parser()._actions for name in action.option_strings}
    commands = " ".join(re.findall(r"python train\.py (.*?)```", PAGE.replace("\\\n", " "), re.DOTALL))
    shown = set(re.findall(r"--[a-z-]+", commands)) | set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE))
    assert shown - known - {"--img", "--batch", "--standard-grouping"} == set()
