"""Write the current visible behaviour to files, for tests to compare with: python -m tests.frozen.write [JOB ...]

Run it after an intended change of visible behaviour, read the diff, and mention it in CHANGELOG.md.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from flatout.cli import JOBS as MODULES
from tests.frozen.helps import help_of

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
JOBS = tuple(MODULES)
COMMAND = "python -m tests.frozen.write"


def file_of(job: str, kind: str) -> Path:
    """The file with the expected text of a job; `kind`: "help", or "run" for trainings."""
    return FOLDER / f"{job}-{kind}.txt"


def seen_runs(jobs: Sequence[str] = JOBS) -> dict[str, str]:
    """The visible behaviour of small trainings of the jobs, run in another process; about four seconds each."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "tests.frozen.observe", name, *jobs]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return {job: (Path(name) / f"{job}.txt").read_text() for job in jobs}


def main(jobs: Sequence[str]) -> None:
    """Write the files of these jobs."""
    for job, text in seen_runs(jobs).items():
        file_of(job, "run").write_text(text)
        file_of(job, "help").write_text(help_of(job))


if __name__ == "__main__":
    main(sys.argv[1:] or JOBS)
