"""`flatout spike`: every command is listed and explains itself without torch."""

import json
import subprocess
import sys

import pytest

from flatout.__main__ import main
from flatout.spike.cli import COMMANDS

HEAVY = ("torch", "numpy", "cv2", "pydantic")


def test_help_imports_nothing_heavy():
    program = f"""
import contextlib, io, json, sys
from flatout.__main__ import main
with contextlib.redirect_stdout(io.StringIO()):
    for name in {list(COMMANDS)}:
        with contextlib.suppress(SystemExit):
            main(["spike", name, "--help"])
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_the_command_lists_its_subcommands_and_corrects_mistakes(capsys):
    assert main(["spike"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and entry.help in out for name, entry in COMMANDS.items())
    assert main(["spike", "prepar"]) == 2
    assert "did you mean 'prepare'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["spike", "train", "--config", "a.yaml", "--set", "SEED=1", "TRAIN.EPOCHS=3"])
    assert "Write --set before every key: --set TRAIN.EPOCHS=3" in capsys.readouterr().err


def test_workers_never_import_torch():
    """A worker unpickles a source of clips, with everything that it imports."""
    program = "import sys, flatout.spike.data.source, flatout.spike.data.source; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
