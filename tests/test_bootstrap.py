"""The on-start script: valid sh, short, without keys, and a machine that runs it again goes on where it was."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.__main__ import main
from flatout.bootstrap.script import MOST_CHARACTERS, Job, script_of, train_line
from flatout.errors import ConfigError
from flatout.yolo.model.configs import load_config
from tests.feed.injections import wait_until

ROOT = Path(__file__).parent.parent
TRAIN = ("yolo", "train", "--data", "it's a path/bolts.yaml", "--cfg", "yolov7-tiny", "--fast")

# Obeys what the script asks of a Python and of flatout, and notes what it was asked.
STUB = """#!/bin/sh
printf '%s\\n' "${0##*/} $*" >>"$CALLS"
case $* in
    *version_info*) exit "${STUB_TOO_OLD:-0}" ;;
    *'import os, torch'*) [ -z "${STUB_TORCH:-}" ] || echo "$STUB_TORCH /a folder" ;;
    '-m venv '*)
        mkdir -p .venv/bin .venv/lib/python3.11/site-packages
        cp "$0" .venv/bin/python
        cp "$0" .venv/bin/flatout
        ;;
    '-m pip '*) cat .venv/constraints.txt >>"$CALLS" ;;
    'yolo train '*)
        mkdir -p runs/train/exp
        echo "{\\"finished\\": ${STUB_FINISHED:-true}}" >runs/train/exp/run.json
        [ -z "${STUB_HANGS:-}" ] || exec sleep 30
        code=$(cat codes | head -n 1); sed -i 1d codes
        exit "$code"
        ;;
esac
"""


class Machine:
    """A rented machine of stubs: only a shell, its tools, and a Python that pretends."""

    def __init__(self, folder: Path) -> None:
        self.work, self.calls_file, tools = folder / "a b", folder / "calls", folder / "bin"
        tools.mkdir()
        for tool in ("cat", "cp", "grep", "head", "ls", "mkdir", "rm", "sed", "sh", "sleep"):
            (tools / tool).symlink_to(shutil.which(tool) or tool)
        (tools / "python3").write_text(STUB)
        (tools / "python3").chmod(0o755)
        (tools / "sleep").unlink()
        (tools / "sleep").write_text('#!/bin/sh\n[ "$1" != 30 ] || exec /bin/sleep 30\n')
        (tools / "sleep").chmod(0o755)
        self.calls_file.touch()
        self.environ = {"PATH": str(tools), "CALLS": str(self.calls_file), "HOME": str(folder)}
        self.script = folder / "on-start.sh"
        job = Job(
            command=TRAIN,
            work=str(self.work),
            fetch='echo fetched >>"$CALLS"',
            at_end='echo "end $FLATOUT_EXIT" >>"$CALLS"',
        )
        self.script.write_text(script_of(job))

    def start(self, *codes: int, **stub: str) -> subprocess.Popen[str]:
        """Training will end with these codes, one after the other."""
        self.work.mkdir(exist_ok=True)
        (self.work / "codes").write_text("".join(f"{code}\n" for code in codes))
        self.calls_file.write_text("")
        return subprocess.Popen(
            ["sh", str(self.script)], env=self.environ | stub, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, *codes: int, **stub: str) -> tuple[int, str]:
        """Exit code, and what was said."""
        running = self.start(*codes, **stub)
        said = running.communicate(timeout=60)[1]
        return running.returncode, said

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def num_trainings(self) -> int:
        return sum(line.startswith("flatout yolo train") for line in self.calls)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_start_installs_fetches_trains_and_ends_and_the_next_does_nothing(machine: Machine) -> None:
    code, said = machine.run(0, STUB_TORCH="2.7.1+cu128")
    assert code == 0, said
    assert "torch==2.7.1+cu128" in machine.calls, "the image's torch is kept"
    assert machine.calls[-3:] == [
        "fetched",
        "flatout yolo train --data it's a path/bolts.yaml --cfg yolov7-tiny --fast --once",
        "end 0",
    ]
    code, said = machine.run()
    assert (code, machine.calls) == (0, [])
    assert "this training is over" in said


def test_after_a_preemption_it_trains_again_without_installing_or_fetching(machine: Machine) -> None:
    code, said = machine.run(75)
    assert code == 75 and "end" not in "".join(machine.calls[-1:])
    assert said.endswith("bootstrap: interrupted and saved; run this again to continue.\n")
    assert machine.run(0)[0] == 0
    assert [line.split()[0] for line in machine.calls] == ["flatout", "end"]


def test_a_crash_is_tried_again_and_a_mistake_is_not(machine: Machine) -> None:
    code, said = machine.run(137, 7, 0)
    assert code == 0 and machine.num_trainings() == 3, said
    (machine.work / "over").unlink()
    code, said = machine.run(2)
    assert code == 2 and machine.num_trainings() == 1
    assert machine.calls[-1] == "end 2", "a rented machine costs money whether or not it works"


def test_a_training_that_stopped_early_as_asked_is_not_over(machine: Machine) -> None:
    assert machine.run(0, STUB_FINISHED="false")[0] == 0
    machine.run(0)
    assert machine.num_trainings() == 1


def test_a_signal_reaches_the_training(machine: Machine) -> None:
    running = machine.start(STUB_HANGS="1")
    wait_until(lambda: machine.num_trainings() == 1, 30)
    running.terminate()
    assert running.wait(25) == 75, "before the training would have ended by itself"
    assert not any(line.startswith("end") for line in machine.calls)
    assert running.stderr is not None
    running.stderr.close()


def test_an_image_without_a_new_enough_python_is_told_so(machine: Machine) -> None:
    code, said = machine.run(STUB_TOO_OLD="1")
    assert code == 5 and "no Python >= 3.11 here" in said


@pytest.mark.parametrize("gpus", ["1", "2", "all"])
def test_the_script_is_short_and_valid(gpus: str, tmp_path: Path) -> None:
    text = script_of(
        Job(
            command=TRAIN, gpus=gpus, mirror="s3://bucket/bolts", fetch="aws s3 sync s3://bucket/d d", at_end="shutdown"
        )
    )
    assert len(text) < MOST_CHARACTERS
    assert "curl" not in text and "wget" not in text, "nothing from the network goes into a shell"
    (tmp_path / "script").write_text(text)
    subprocess.run(["sh", "-n", str(tmp_path / "script")], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(tmp_path / "script")], check=True)


def test_several_gpus_train_together() -> None:
    assert train_line(Job(command=("yolo", "train"), gpus="3", mirror="gs://b/r")) == (
        "flatout yolo train --once --mirror gs://b/r --device 0,1,2"
    )
    assert train_line(Job(command=("defect", "train"), gpus="all")) == (
        "python -m torch.distributed.run --standalone --nproc_per_node gpu -m flatout defect train --once"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fetch": "AWS_SECRET_ACCESS_KEY=abc123 aws s3 sync a b"}, "a key or password"),
        ({"fetch": "curl -H 'token: 123' https://host/data.zip -o d.zip"}, "a key or password"),
        ({"at_end": "stop-machine AKIAABCDEFGHIJKLMNOP"}, "a key or password"),
        ({"mirror": "s3://me:abc123@bucket/bolts"}, "a key or password"),
        ({"command": (*TRAIN, "--name", "x" * 4000)}, "characters"),
        ({"command": ("doctor",)}, "say what to train"),
        ({"gpus": "many"}, "write a number, or all"),
        ({"fetch": "a\nb"}, "one line of shell"),
    ],
)
def test_what_cannot_be_printed_is_refused(change: dict[str, str], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        script_of(Job(**({"command": TRAIN} | change)))  # type: ignore[arg-type]
    assert "abc123" not in str(refused.value) and "AKIA" not in str(refused.value)


def test_variables_of_the_machine_may_be_named() -> None:
    assert '--api-key="$API_KEY"' in script_of(Job(command=TRAIN, at_end='stop --api-key="$API_KEY"'))


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bootstrap", "--gpus", "2", "--", *TRAIN]) == 0
    assert capsys.readouterr().out == script_of(Job(command=TRAIN, gpus="2"))
    assert main(["bootstrap"]) == 2
    assert "say what to train" in capsys.readouterr().err


def test_a_mistyped_flag_is_told_here_and_not_by_a_machine_that_costs_money(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bootstrap", "--", *TRAIN, "--epoks", "3"])
    told = capsys.readouterr()
    assert ended.value.code == 2 and told.out == ""
    assert "--epoks is no flag. Did you mean --epochs?" in told.err


@pytest.mark.slow
@pytest.mark.fault
@pytest.mark.timeout(300)
def test_a_real_machine_that_is_killed_continues_and_finishes(tmp_path: Path) -> None:
    """The real thing, from this checkout: installed, killed in the second epoch, started again, finished."""
    config: Any = load_config("yolov7-tiny")
    (tmp_path / "narrow.yaml").write_text(yaml.safe_dump({**config, "nc": 6, "width_multiple": 0.125}))
    words = ["yolo", "train", "--data", "demo-data/demo.yaml", "--cfg", str(tmp_path / "narrow.yaml"), "--weights", ""]
    # Steps take milliseconds: there must be enough of them left when it is seen to have begun.
    flags = "--img 32 --batch 4 --epochs 20 --device cpu --workers 0 --noautoanchor --notest --save-every-steps 1"
    words += flags.split()
    job = Job(
        command=words, package=str(ROOT), work=str(tmp_path / "work"), fetch="flatout yolo demo-data --images 8 --val 4"
    )
    (tmp_path / "on-start.sh").write_text(script_of(job))
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "FLATOUT_PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        # What is needed is here: tests go without a network.
        "PIP_NO_BUILD_ISOLATION": "0",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
    }
    state = tmp_path / "work/runs/train/exp/weights/last.prev.pt"
    with (tmp_path / "first.log").open("w") as log:
        first = subprocess.Popen(
            ["sh", str(tmp_path / "on-start.sh")], env=environ, stdout=log, stderr=log, start_new_session=True
        )
        try:
            wait_until(lambda: state.exists() or first.poll() is not None, 150)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(first.pid, signal.SIGKILL)
            first.wait()
    assert state.exists(), (tmp_path / "first.log").read_text()
    second = subprocess.run(
        ["sh", str(tmp_path / "on-start.sh")], env=environ, capture_output=True, text=True, timeout=130
    )
    assert second.returncode == 0, second.stdout + second.stderr
    assert "Continuing runs/train/exp at epoch" in second.stdout
    assert "installing" not in second.stderr and "fetching" not in second.stderr
    assert (tmp_path / "work/over").exists()
