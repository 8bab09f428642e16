"""Runs of older versions continue with this one."""

import json
import tarfile
from pathlib import Path

import pytest

from flatout.safefiles.container import read_container
from tests.old_runs.make import run
from tests.old_runs.situations import SITUATIONS

KEPT = sorted(Path(__file__).parent.glob("*/*.tar.xz"))
AGAIN = {
    "yolo": ("--allow-data-change",),
    "defect": ("--allow_data_change",),
    # A run of spike records the absolute paths of its data, which differ here.
    "spike": ("--allow-data-change", "--resume", "runs/old"),
}
"""Data sets are generated again here, and another OpenCV may render them slightly differently."""


def of_state(state: str) -> list:
    return [pytest.param(path, id=f"{path.parent.name}/{path.name}") for path in KEPT if f"-{state}." in path.name]


def unpacked(archive: Path, folder: Path) -> str:
    """Unpack a run and generate its data; returns the job."""
    job = archive.name.split("-")[0]
    SITUATIONS[job].prepare(folder)
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    return job


def epochs_of(run_folder: Path) -> list[int]:
    return [json.loads(line)["epoch"] for line in (run_folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("archive", of_state("stopped"))
def test_a_stopped_run_continues_in_the_middle_of_its_epoch(archive, tmp_path):
    job = unpacked(archive, tmp_path)
    output = run(SITUATIONS[job], tmp_path, *AGAIN[job])
    assert f"Continuing {SITUATIONS[job].run} at epoch 1" in output
    assert epochs_of(tmp_path / SITUATIONS[job].run) == [0, 1, 2]
    assert json.loads((tmp_path / SITUATIONS[job].run / "run.json").read_text())["finished"] is True


@pytest.mark.slow
def test_a_run_continues_from_the_mirror_of_an_older_version(tmp_path):
    (archive,) = (path for path in KEPT if path.name == "yolo-mirror.tar.xz")
    job = unpacked(archive, tmp_path)
    output = run(SITUATIONS[job], tmp_path, "--mirror", f"file://{tmp_path}/mirror", *AGAIN[job])
    assert "at epoch 1, step 2" in output
    assert epochs_of(tmp_path / SITUATIONS[job].run) == [0, 1, 2]


@pytest.mark.parametrize("archive", of_state("finished"))
def test_a_finished_run_has_weights_that_can_be_read(archive, tmp_path):
    job = unpacked(archive, tmp_path)
    (best,) = (tmp_path / SITUATIONS[job].run).glob("*/best.pt")
    assert read_container(best)
