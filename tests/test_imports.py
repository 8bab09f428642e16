"""The import graph follows the folder map, and the check can fail."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.import_rules import broken_rules

ROOT = Path(__file__).parent.parent


def test_flatout_follows_the_folder_map():
    files = (ROOT / "flatout").rglob("*.py")
    assert broken_rules({path.relative_to(ROOT).as_posix(): path.read_text() for path in files}) == []


@pytest.mark.parametrize(
    ("path", "source", "problem"),
    [
        ("flatout/utils.py", "", "'utils' is not on the folder map"),
        ("flatout/helpers/boxes.py", "", "'helpers' is not on the folder map"),
        ("flatout/feed/ring.py", "from flatout.yolo import boxes", "feed must not import flatout.yolo"),
        ("flatout/feed/ring.py", "from flatout import doctor", "feed must not import flatout.doctor"),
        ("flatout/feed/ring.py", "from flatout import Feed", "feed must not import flatout.Feed"),
        ("flatout/feed/ring.py", "from .. import engine", "feed must not import flatout.engine"),
        ("flatout/feed/ring.py", "from ..engine.loop import run", "feed must not import flatout.engine.loop"),
        ("flatout/engine/loop.py", "import flatout.feed", "engine must not import flatout.feed"),
        ("flatout/yolo/loss.py", "from flatout.defect.step import x", "yolo must not import flatout.defect.step"),
        ("flatout/clock/clock.py", "from flatout.config import x", "clock must not import flatout.config"),
        ("flatout/clock/clock.py", "import psutil", "clock must not import psutil"),
        ("flatout/profiler/measurement.py", "import torch.cuda", "torch is imported at the top"),
        ("flatout/config.py", "import numpy as np", "config must not import numpy"),
        ("flatout/__main__.py", "def f():\n    import torch", "__main__ must not import torch"),
        ("flatout/errors.py", "import flatout.config", "errors must not import flatout.config"),
        ("flatout/feed/ring.py", "if True:\n    import torch", "torch is imported at the top"),
        ("flatout/feed/feed.py", "class A:\n    from torch import nn", "torch is imported at the top"),
        ("flatout/feed/ring.py", "def f():\n    import torch", "only device.py and feed.py may import torch"),
        ("flatout/yolo/data/scan.py", "def f():\n    import torch", "data sets are read without torch"),
    ],
)
def test_a_broken_rule_is_found(path, source, problem):
    (sentence,) = broken_rules({path: source})
    assert sentence.startswith(f"{path}:")
    assert problem in sentence


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("flatout/feed/ring.py", "import os, numpy\nfrom flatout.errors import DataError\nfrom . import plan"),
        ("flatout/feed/ring.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"),
        ("flatout/feed/device.py", "import torch"),
        ("flatout/feed/feed.py", "def to_device():\n    import torch"),
        ("flatout/profiler/measurement.py", "def now():\n    import torch"),
        (
            "flatout/engine/loop.py",
            "import torch\nfrom flatout.profiler import clock\nfrom .. import config",
        ),
        ("flatout/yolo/train.py", "from flatout.feed import Feed\nfrom flatout.engine.loop import run"),
        ("flatout/doctor/cli.py", "from flatout import __version__, config\nimport rich"),
        ("flatout/__main__.py", "from flatout import __version__\nfrom flatout.doctor import main"),
    ],
)
def test_an_allowed_import_is_not_reported(path, source):
    assert broken_rules({path: source}) == []


def test_the_imports_of_a_worker_do_not_load_torch():
    program = """
import sys
import tomllib
import flatout.config, flatout.errors, flatout.feed, flatout.clock.clock, flatout.config
assert "torch" not in sys.modules
assert "pydantic" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_every_package_of_an_extra_is_used():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for_users = [extras[name] for name in extras.keys() - {"test", "dev", "docs", "all"}]
    packages = {requirement.partition(">=")[0].removesuffix("-skinny") for extra in for_users for requirement in extra}
    code = "".join(file.read_text() for file in ROOT.glob("flatout/**/*.py"))
    assert {package for package in packages if not re.search(rf"(import |\"){package}\b", code)} == set()
