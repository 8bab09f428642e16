"""The shell logic of ./run and .ci/run with a stub of Python: when it sets up, what it installs with pip, and how it
fails. Nothing is installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHELL_TOOLS = ("basename", "cat", "cksum", "cp", "dirname", "head", "kill", "mkdir", "mv", "rm", "sed", "sh")

# Replaces Python for ./run, as the STUB_ variables say, and records every call.
STUB_PYTHON = """#!/bin/sh
printf '%s\\n' "$*" >>"$STUB_CALLS"
site=$(dirname "$0")/../lib/python3.11/site-packages
case $* in
    -V) echo "Python ${STUB_VERSION:-3.11.9}" ;;
    *version_info*) exit "${STUB_TOO_OLD:-0}" ;;
    *ensurepip*) exit "${STUB_NO_VENV:-0}" ;;
    *'import os, sys, torch'*)
        case $0 in
            */.venv/*) [ -z "${STUB_BASE_IS_A_VENV:-}" ] || [ -e "$site/kept_torch.pth" ] || exit 1 ;;
        esac
        [ -n "${STUB_TORCH:-}" ] || exit 1
        echo "$STUB_TORCH /a folder/site-packages"
        ;;
    '-m venv '*)
        for folder; do :; done
        mkdir -p "$folder/bin" "$folder/lib/python3.11/site-packages"
        cp "$0" "$folder/bin/python"
        ;;
    '-m pip '*)
        [ -z "${STUB_KILLED_IN_PIP:-}" ] || kill -9 "$PPID"
        exit "${STUB_PIP:-0}"
        ;;
    *find_spec*) exit "${STUB_NO_TRITON:-0}" ;;
    '-m ruff check') exit "${STUB_RUFF:-0}" ;;
    *--last-failed*) exit "${STUB_AGAIN:-${STUB_PYTEST:-0}}" ;;
    '-m pytest -q -m timing'*) exit "${STUB_TIMING:-${STUB_PYTEST:-0}}" ;;
    '-m pytest '*) exit "${STUB_PYTEST:-0}" ;;
esac
"""


ALL_TESTS = ["-m pytest -q -n 2 --dist worksteal -m not timing", "-m pytest -q -m timing and not gpu"]
"""Without nproc and without a GPU."""
AGAIN = f"{ALL_TESTS[1]} --last-failed --last-failed-no-failures none"


class Checkout:
    """A copy of what ./run needs, in a folder with a space in its name, with only stubs on its PATH."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "a b" / "check out"
        self.bin = folder / "bin"
        self.calls_file = folder / "calls"
        self.root.mkdir(parents=True)
        self.bin.mkdir()
        for name in ("run", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, self.root)
        for tool in SHELL_TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.add_tool("python3", STUB_PYTHON)

    def add_tool(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *words: str, cwd: Path | None = None, **stub: str) -> subprocess.CompletedProcess[str]:
        """Call ./run; its calls of Python are then in `calls`."""
        self.calls_file.write_text("")
        environment = {"PATH": str(self.bin), "STUB_CALLS": str(self.calls_file), **stub}
        command = [str(self.root / "run"), *words]
        return subprocess.run(command, cwd=cwd or self.root, env=environment, capture_output=True, text=True)

    @property
    def calls(self) -> list[str]:
        return [line for line in self.calls_file.read_text().splitlines() if line.startswith("-m ")]

    def constraints(self) -> list[str]:
        return (self.root / ".venv/constraints.txt").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def venv_calls(checkout: Checkout) -> list[str]:
    return [call for call in checkout.calls if call.startswith("-m venv")]


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_usage_lists_every_command_and_sets_nothing_up(words, checkout):
    done = checkout.run(*words)
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("demo", "test", "bench", "lint", "FLATOUT_PYTHON"))
    assert not (checkout.root / ".venv").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_triton_is_added_for_tests_where_torch_came_without_it(checkout, fails):
    checkout.run("test")
    assert not any("triton==" in call for call in checkout.calls)
    checkout.run("lint", STUB_NO_TRITON="1")
    assert not any("triton==" in call for call in checkout.calls)
    done = checkout.run("test", STUB_NO_TRITON="1", STUB_PIP="1" if fails else "0")
    added, *tests = checkout.calls
    assert added == "-m pip install --no-input --disable-pip-version-check --no-deps triton==3.6.0"
    assert (done.returncode, tests) == (0, ALL_TESTS), "without it, tests are skipped"
    assert ("tests that run GPU kernels on the CPU are skipped" in done.stderr) == fails


def test_an_unknown_command_is_one_sentence_and_2(checkout):
    done = checkout.run("tset")
    assert done.returncode == 2
    assert done.stderr.startswith("run: unknown command 'tset'; there are demo, test, bench, lint and docs")
    assert done.stderr.count("\n") == 1


def test_the_first_call_sets_up_and_the_second_starts_immediately(checkout, tmp_path):
    first = checkout.run("test", "-k", "two words", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert checkout.calls == [
        f"-m venv {checkout.root}/.venv",
        "-m pip install --no-input --disable-pip-version-check -e .[test,dev,eval,export,tb,docs]",
        "-m pytest -q -k two words",
    ]
    assert "making .venv from python3" in first.stderr
    assert "installing flatout" in first.stderr
    second = checkout.run("test")
    assert (second.returncode, second.stderr) == (0, "")
    assert checkout.calls == ALL_TESTS


@pytest.mark.parametrize(("cores", "processes"), [(1, 1), (2, 2), (64, 8)])
def test_all_tests_take_every_core_up_to_eight(checkout, cores, processes):
    checkout.add_tool("nproc", f"#!/bin/sh\necho {cores}\n")
    checkout.run("test")
    assert checkout.calls[-2] == f"-m pytest -q -n {processes} --dist worksteal -m not timing"


def test_with_a_gpu_the_tests_that_need_one_run_separately(checkout):
    checkout.add_tool("nvidia-smi", '#!/bin/sh\n[ "$1" = -L ] || echo 580.10\n')
    checkout.run("test")
    assert checkout.calls[-3:] == [*ALL_TESTS, "-m pytest -q -m gpu"]
    checkout.run("test", "tests/feed")
    assert checkout.calls == ["-m pytest -q tests/feed"]
    failed = checkout.run("test", STUB_PYTEST="1")
    assert (failed.returncode, len(checkout.calls)) == (1, 4)


@pytest.mark.parametrize("again", [0, 1])
def test_tests_that_measure_time_and_fail_run_once_more(again, checkout):
    checkout.run("test")
    done = checkout.run("test", STUB_TIMING="1", STUB_AGAIN=str(again))
    assert (done.returncode, checkout.calls) == (again, [*ALL_TESTS, AGAIN]), done.stderr


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt", "run"])
def test_a_changed_requirement_updates_the_environment_in_place(name, checkout):
    checkout.run("test")
    with (checkout.root / name).open("a") as file:
        file.write("\n# changed\n")
    done = checkout.run("test")
    assert "bringing .venv up to date" in done.stderr
    assert [call.split()[1] for call in checkout.calls] == ["pip", "pytest", "pytest"]


def test_another_python_version_recreates_the_environment(checkout):
    checkout.run("test")
    checkout.run("test", STUB_VERSION="3.12.1")
    assert len(venv_calls(checkout)) == 1


def test_a_moved_checkout_recreates_the_environment(checkout, tmp_path):
    checkout.run("test")
    checkout.root = checkout.root.rename(tmp_path / "moved here")
    checkout.run("test")
    assert venv_calls(checkout) == [f"-m venv {checkout.root}/.venv"]


def test_a_failed_installation_is_one_sentence_with_the_log_and_5_and_is_redone(checkout):
    failed = checkout.run("test", STUB_PIP="1")
    assert failed.returncode == 5
    log = checkout.root / ".venv/setup.log"
    assert failed.stderr.splitlines()[-1] == f"run: the installation failed; the reason is at the end of {log}"
    assert log.exists()
    assert not any(call.startswith("-m pytest") for call in checkout.calls)
    assert checkout.run("test").returncode == 0
    assert len(venv_calls(checkout)) == 1


def test_an_update_that_is_killed_is_redone_from_scratch(checkout):
    checkout.run("test")
    (checkout.root / "constraints.txt").open("a").write("# changed\n")
    assert checkout.run("test", STUB_KILLED_IN_PIP="1").returncode == -9
    assert checkout.run("test").returncode == 0
    assert len(venv_calls(checkout)) == 1


def test_an_incomplete_environment_is_recreated(checkout):
    leftover = checkout.root / ".venv/bin/leftover"
    leftover.parent.mkdir(parents=True)
    leftover.touch()
    assert checkout.run("test").returncode == 0
    assert not leftover.exists()


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cpu", "2.7.0a0+79aa17489c.nv25.4"])
def test_an_existing_torch_is_kept(version, checkout):
    done = checkout.run("test", STUB_TORCH=version)
    assert f"keeping its torch {version}" in done.stderr
    assert venv_calls(checkout) == [f"-m venv --system-site-packages {checkout.root}/.venv"]
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert checkout.constraints() == [f"torch=={version}" if line.startswith("torch==") else line for line in pinned]


def test_a_torch_in_a_base_that_is_itself_a_virtual_environment_is_kept(checkout):
    checkout.run("test", STUB_TORCH="2.11.0", STUB_BASE_IS_A_VENV="1")
    link = checkout.root / ".venv/lib/python3.11/site-packages/kept_torch.pth"
    assert link.read_text() == "/a folder/site-packages\n"
    assert "torch==2.11.0" in checkout.constraints()


def test_without_a_torch_the_pinned_one_is_installed(checkout):
    checkout.run("test")
    assert checkout.constraints() == (ROOT / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize(
    ("driver", "torch", "warned"),
    [("535.183.01", "", True), ("580.65.06", "", False), ("535.183.01", "2.11.0", False), ("No devices", "", False)],
)
def test_an_old_driver_causes_a_warning_unless_torch_is_kept(driver, torch, warned, checkout):
    checkout.add_tool("nvidia-smi", f"#!/bin/sh\necho '{driver}'\n")
    done = checkout.run("test", STUB_TORCH=torch)
    assert done.returncode == 0
    assert ("is older than 580" in done.stderr) is warned


def test_no_usable_python_is_one_sentence_and_5(checkout):
    done = checkout.run("test", STUB_TOO_OLD="1")
    assert done.returncode == 5
    assert done.stderr.startswith("run: no Python >= 3.11 found (looked for: python3 python")
    assert done.stderr.count("\n") == 1


def test_a_python_without_venv_is_one_sentence_and_5(checkout):
    done = checkout.run("test", STUB_NO_VENV="1")
    assert done.returncode == 5
    assert done.stderr.startswith("run: python3 has no venv module; install it")


def test_the_chosen_python_is_used_and_a_wrong_choice_harms_nothing(checkout):
    other = checkout.root.parent / "other python"
    other.write_text(STUB_PYTHON)
    other.chmod(0o755)
    done = checkout.run("test", cwd=checkout.root.parent, FLATOUT_PYTHON="./other python")
    assert f"making .venv from {checkout.root.parent}/./other python" in done.stderr
    checkout.run("test")
    assert checkout.calls == ALL_TESTS
    wrong = checkout.run("test", FLATOUT_PYTHON="/no/python")
    assert wrong.returncode == 5
    assert "looked for: /no/python" in wrong.stderr
    checkout.run("test")
    assert checkout.calls == ALL_TESTS


def test_choosing_another_python_recreates_the_environment(checkout):
    checkout.run("test")
    checkout.run("test", FLATOUT_PYTHON=str(checkout.bin / "python3"))
    assert len(venv_calls(checkout)) == 1


def test_the_exit_code_of_the_tests_is_passed_on(checkout):
    assert checkout.run("test", STUB_PYTEST="3").returncode == 3


def test_lint_runs_every_check_even_if_one_fails(checkout):
    assert checkout.run("lint").returncode == 0
    done = checkout.run("lint", STUB_RUFF="1")
    assert done.returncode == 1
    assert checkout.calls == ["-m ruff check", "-m ruff format --check", "-m mypy"]


def test_demo_is_the_packages_own(checkout):
    checkout.run("demo", "--seed", "7")
    assert checkout.calls[-1] == "-m flatout demo --seed 7"


def test_benchmarks_are_listed_with_their_question_and_run_by_name(checkout):
    bench = checkout.root / "bench"
    bench.mkdir()
    (bench / "handover.py").write_text('"""Is the ring faster than pickle?\n\nMore.\n"""\nif __name__ == "__main__":\n')
    (bench / "measure.py").write_text('"""How to measure: nothing to run."""\n')
    listed = checkout.run("bench")
    assert listed.stdout.splitlines()[1:] == [f"  {'handover':<24} Is the ring faster than pickle?"]
    assert not (checkout.root / ".venv").exists()
    checkout.run("bench", "handover", "--workers", "2")
    assert checkout.calls[-1] == "-m bench.handover --workers 2"
    missing = checkout.run("bench", "nosuch")
    assert (missing.returncode, missing.stderr) == (2, "run: there is no benchmark 'nosuch'; ./run bench lists them.\n")


@pytest.mark.parametrize(("lint", "calls"), [(0, ["lint", "test"]), (1, ["lint"])])
def test_ci_lints_then_tests_and_stops_at_the_first_failure(lint, calls, tmp_path):
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci")
    (tmp_path / "run").write_text(f'#!/bin/sh\necho "$1" >>calls\n[ "$1" != lint ] || exit {lint}\n')
    (tmp_path / "run").chmod(0o755)
    done = subprocess.run([tmp_path / ".ci/run"], cwd="/", env={"PATH": os.environ["PATH"]})
    assert done.returncode == lint
    assert (tmp_path / "calls").read_text().split() == calls
