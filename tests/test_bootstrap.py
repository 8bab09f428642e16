"""The on-start script: valid sh, short, without keys, and a machine that runs it again continues."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.__main__ import main
from flatout.bootstrap.script import MAX_CHARACTERS, BootstrapConfig, script_of, train_line
from flatout.errors import ConfigError
from flatout.yolo.model.configs import load_config
from tests.feed.injections import wait_until

ROOT = Path(__file__).parent.parent
PACKAGE = "git+https://host.example/me/flatout@0123456789abcdef0123456789abcdef01234567"
TRAIN = ("yolo", "train", "--data", "it's a path/bolts.yaml", "--cfg", "yolov7-tiny", "--fast")

# Replaces Python and flatout for the script, and records how it was called.
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
    """A simulated rented machine: a shell, its tools, and stubs of Python and flatout."""

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
        self.write(fetch='echo fetched >>"$CALLS"', at_end='echo "end $FLATOUT_EXIT" >>"$CALLS"')

    def write(self, **job: str) -> None:
        self.script.write_text(script_of(BootstrapConfig(command=TRAIN, package=PACKAGE, work=str(self.work), **job)))

    def start(self, *codes: int, **stub: str) -> subprocess.Popen[str]:
        """Start the script; trainings will end with these codes, one after the other."""
        self.work.mkdir(exist_ok=True)
        (self.work / "codes").write_text("".join(f"{code}\n" for code in codes))
        self.calls_file.write_text("")
        return subprocess.Popen(
            ["sh", str(self.script)], env=self.environ | stub, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def run(self, *codes: int, **stub: str) -> tuple[int, str]:
        """Run the script; returns its exit code and stderr."""
        running = self.start(*codes, **stub)
        output = running.communicate(timeout=60)[1]
        return running.returncode, output

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def num_trainings(self) -> int:
        return sum(line.startswith("flatout yolo train") for line in self.calls)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_the_first_start_installs_fetches_trains_and_ends_and_the_next_does_nothing(machine: Machine) -> None:
    code, output = machine.run(0, STUB_TORCH="2.7.1+cu128")
    assert code == 0, output
    assert "torch==2.7.1+cu128" in machine.calls, "the image's torch is kept"
    assert f"python -m pip install -q --no-input {PACKAGE}" in machine.calls
    assert machine.calls[-3:] == [
        "fetched",
        "flatout yolo train --data it's a path/bolts.yaml --cfg yolov7-tiny --fast --once",
        "end 0",
    ]
    code, output = machine.run()
    assert (code, machine.calls) == (0, [])
    assert "this training is finished" in output


def test_after_a_preemption_it_trains_again_without_installing_or_fetching(machine: Machine) -> None:
    code, output = machine.run(75)
    assert code == 75 and "end" not in "".join(machine.calls[-1:])
    assert output.endswith("bootstrap: interrupted and saved; run this again to continue.\n")
    assert machine.run(0)[0] == 0
    assert [line.split()[0] for line in machine.calls] == ["flatout", "end"]


def test_a_crash_is_retried_and_a_mistake_is_not(machine: Machine) -> None:
    code, output = machine.run(137, 7, 0)
    assert code == 0 and machine.num_trainings() == 3, output
    (machine.work / "over").unlink()
    code, output = machine.run(5, 5, 5)
    assert code == 5 and machine.num_trainings() == 3
    assert output.count("retrying in") == 2 and output.count("ended with exit code 5") == 3
    code, output = machine.run(2)
    assert code == 2 and machine.num_trainings() == 1
    assert machine.calls[-1] == "end 2", "a rented machine costs money whether or not it works"


def test_a_training_that_stopped_early_is_not_finished(machine: Machine) -> None:
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


def test_an_image_without_a_new_enough_python_is_refused(machine: Machine) -> None:
    code, output = machine.run(STUB_TOO_OLD="1")
    assert code == 5 and "no Python >= 3.11 found" in output


@pytest.mark.parametrize("gpus", ["1", "2", "all"])
def test_the_script_is_short_and_valid(gpus: str, tmp_path: Path) -> None:
    text = script_of(
        BootstrapConfig(
            command=TRAIN,
            package=PACKAGE,
            gpus=gpus,
            mirror="s3://bucket/bolts",
            fetch="aws s3 sync s3://bucket/d d",
            at_end="shutdown",
        )
    )
    assert len(text) < MAX_CHARACTERS
    assert "curl" not in text and "wget" not in text, "nothing from the network goes into a shell"
    (tmp_path / "script").write_text(text)
    subprocess.run(["sh", "-n", str(tmp_path / "script")], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", str(tmp_path / "script")], check=True)


def test_several_gpus_train_together() -> None:
    assert train_line(BootstrapConfig(command=("yolo", "train"), package=PACKAGE, gpus="3", mirror="gs://b/r")) == (
        "flatout yolo train --once --mirror gs://b/r --device 0,1,2"
    )
    assert train_line(BootstrapConfig(command=("defect", "train"), package=PACKAGE, gpus="all")) == (
        'flatout defect train --once --device "$(nvidia-smi --query-gpu=index --format=csv,noheader | paste -sd, -)"'
    )


SECRETS = [
    "AWS_SECRET_ACCESS_KEY=abc123 aws s3 sync a b",
    "aws configure set aws_secret_access_key abc123 && aws s3 sync a b",
    "aws configure set aws_access_key_id abc123",
    "rclone config create r s3 provider AWS secret_access_key abc123",
    "vastai set api-key abc123",
    "export MY_TOKEN=abc123",
    "HF_TOKEN='abc123' hf download me/data",
    "hf auth login --token abc123",
    'curl -H "Authorization: Bearer abc123" https://host/d.zip -o d.zip',
    "curl -H 'Authorization: abc123' https://host/d.zip -o d.zip",
    "curl -H 'token: abc123' https://host/data.zip -o d.zip",
    "curl -u me:abc123 https://host/data.zip -o d.zip",
    "curl 'https://host/d.zip?X-Amz-Signature=abc123' -o d.zip",
    "wget --user me --password abc123 https://host/d.zip",
    "wget ftp://me:abc123@host/d.zip",
    "git clone https://abc1230123456789abcdef@host/data",
    "wandb login abc1230123456789abcdef0123456789abcdef01",
    "wandb login --relogin abc1230123456789abcdef0123456789abcdef01",
    "echo abc123 | docker login -u me --password-stdin",
    "docker login -u me -p abc123 host",
    "MYSQL_PWD=abc123 mysqldump d",
    "mysqldump -u me -pabc123 d",
    "sshpass -p abc123 scp me@host:d d",
    "hf download --local-dir hf_abc123abc123abc123abc123 d",
]
"""Each contains abc123, which must not appear in messages."""


@pytest.mark.parametrize("command", SECRETS)
def test_a_key_is_refused_wherever_it_stands_and_is_not_repeated(command: str) -> None:
    fields: list[dict[str, Any]] = [{"fetch": command}, {"at_end": command}, {"command": (*TRAIN, *command.split())}]
    for change in fields:
        with pytest.raises(ConfigError, match="a key or password") as refused:
            script_of(BootstrapConfig(**({"command": TRAIN, "package": PACKAGE} | change)))
        assert "abc123" not in str(refused.value)


@pytest.mark.parametrize(
    "command",
    [
        "aws s3 sync s3://bucket/data data",
        'aws configure set aws_secret_access_key "$SECRET" && aws s3 sync a b',
        'curl -H "Authorization: Bearer $TOKEN" https://host:8080/d.zip -o d.zip',
        'curl -u "me:$PASS" https://host/d.zip -o d.zip',
        'stop --api-key="$API_KEY" --token "$(cat token)"',
        'wandb login "$WANDB_API_KEY"',
        "wandb login --host https://wandb.example.com",
        'echo "$TOKEN" | docker login -u me --password-stdin registry.example.com',
        "rsync -u me@host:data data",
        "git clone ssh://git@host/me/data && git -C data checkout 0123456789abcdef0123456789abcdef01234567",
        "cd $PWD; PWD=/data ls; AWS_WEB_IDENTITY_TOKEN_FILE=/run/token aws s3 sync a b",
        "train --max-tokens=5 --bypass=1",
    ],
)
def test_commands_without_a_key_and_variables_of_the_machine_are_accepted(command: str) -> None:
    assert script_of(BootstrapConfig(command=TRAIN, package=PACKAGE, fetch=command, at_end=command))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at_end": "stop-machine AKIAABCDEFGHIJKLMNOP"}, "a key or password"),
        ({"mirror": "s3://me:abc123@bucket/bolts"}, "a key or password"),
        ({"package": "git+https://me:abc123@host/flatout"}, "a key or password"),
        ({"command": (*TRAIN, "--name", "x" * 4000)}, "characters"),
        ({"command": ()}, "the training command is missing"),
        ({"command": ("yolo", "trian", "--data", "a.yaml")}, "`yolo trian` is not a training command"),
        ({"mirror": "bucket/bolts"}, "--mirror bucket/bolts: not a URL. Use for example s3://bucket/folder"),
        ({"gpus": "many"}, "use a number, or all; 0 trains on the CPU"),
        ({"gpus": "-1"}, "use a number, or all; 0 trains on the CPU"),
        (
            {"fetch": "echo 'open"},
            "--fetch: sh cannot parse the commands: .*([Uu]nterminated|unexpected EOF).*run by sh, not bash",
        ),
        ({"at_end": "if true"}, "--at-end: sh cannot parse the commands: .* check quotes and brackets"),
        ({"package": ""}, "--package is missing: .* There is no default"),
    ],
)
def test_what_cannot_be_printed_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        script_of(BootstrapConfig(**({"command": TRAIN, "package": PACKAGE} | change)))
    assert "abc123" not in str(refused.value) and "AKIA" not in str(refused.value)


@pytest.mark.parametrize(
    "name", ["flatout", "Flatout[tb]", " flatout==0.1.0", "flatout[tb, eval] >= 0.1; python_version > '3'"]
)
def test_a_name_that_pip_would_look_up_on_the_package_index_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"where it is not ours.*Give an address"):
        BootstrapConfig(command=TRAIN, package=name)


@pytest.mark.parametrize(
    "package",
    [f"flatout @ {PACKAGE}", f"flatout[tb]@{PACKAGE}", "./flatout", "/data/flatout", "flatout-0.1.0-py3-none-any.whl"],
)
def test_an_address_is_what_pip_installs(package: str) -> None:
    assert f"package={shlex.quote(package)}\n" in script_of(BootstrapConfig(command=TRAIN, package=package))


NASTY = [
    "echo hi # comment",
    "(echo hi) &",
    "sleep 0 & wait; echo hi;",
    "cat <<END\nhi there\nEND",
    "cat <<'END'\n$HOME `id` }\nEND\n",
    "echo hi \\",
    'echo "a\nb" \'c"d\'; echo }',
    "case x in x) echo '}' ;; esac",
    "echo } && exit 0",
    "f() { echo hi; }; f",
    "cd / && pwd",
    "echo 'it'\\''s'",
    "",
    "# nothing",
    "echo a;\n\n  echo b;",
]


@pytest.mark.parametrize("command", NASTY)
def test_any_command_of_the_user_runs_as_it_would_by_itself(command: str, machine: Machine) -> None:
    alone = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env=machine.environ, check=True)
    machine.write(fetch=command, at_end=command)
    (machine.work).mkdir()
    (machine.work / "codes").write_text("0\n")
    inside = subprocess.run(["sh", str(machine.script)], capture_output=True, text=True, env=machine.environ)
    assert (inside.returncode, inside.stdout) == (0, alone.stdout * 2), inside.stderr
    assert machine.num_trainings() == 1 and (machine.work / "over").exists()


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab \n\t\\'\"`$#&;|(){}<>!*?~-=%"), max_size=30))
def test_every_command_is_refused_or_gives_a_script_that_parses(command: str) -> None:
    if subprocess.run(["sh", "-n"], input=command, capture_output=True, text=True).returncode:
        with pytest.raises(ConfigError, match="sh cannot parse the commands"):
            script_of(BootstrapConfig(command=TRAIN, package=PACKAGE, fetch=command))
        return
    text = script_of(BootstrapConfig(command=TRAIN, package=PACKAGE, fetch=command, at_end=command))
    parsed = subprocess.run(["sh", "-n"], input=text, capture_output=True, text=True)
    assert parsed.returncode == 0, parsed.stderr


def test_a_mirror_in_the_cloud_brings_its_client(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.write(mirror="s3://bucket/bolts")
    machine.run(0)
    assert f"python -m pip install -q --no-input {PACKAGE} obstore" in machine.calls


def test_the_command_prints_the_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bootstrap", "--package", PACKAGE, "--gpus", "2", "--", *TRAIN]) == 0
    assert capsys.readouterr().out == script_of(BootstrapConfig(command=TRAIN, package=PACKAGE, gpus="2"))
    assert main(["bootstrap", "--package", PACKAGE]) == 2
    assert "the training command is missing" in capsys.readouterr().err
    assert main(["bootstrap", "--", *TRAIN]) == 2
    output = capsys.readouterr()
    assert "--package" in output.err and output.out == ""


def test_a_mistyped_flag_is_reported_before_a_machine_is_rented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bootstrap", "--package", PACKAGE, "--", *TRAIN, "--epoks", "3"])
    output = capsys.readouterr()
    assert ended.value.code == 2 and output.out == ""
    assert "unknown flag --epoks. Did you mean --epochs?" in output.err


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
    job = BootstrapConfig(
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
