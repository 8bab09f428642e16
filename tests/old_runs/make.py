"""Create the run folders that later versions must continue: python -m tests.old_runs.make FOLDER

Run it in a checkout of the version whose runs are to be kept. Packs, for every job, a run that was stopped in the
middle of an epoch and a finished one, and for yolo the mirror of a stopped run. Plots are left out: nothing reads them.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from tests.old_runs.situations import SITUATIONS, Situation

PLOTS = {".jpg", ".png"}


def run(situation: Situation, folder: Path, *more: str, stop_after: int | None = None) -> str:
    """Run the command in another process; returns its output."""
    environment = {key: value for key, value in os.environ.items() if key != "FLATOUT_STOP_AFTER"}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    if stop_after is not None:
        environment["FLATOUT_STOP_AFTER"] = str(stop_after)
    command = [sys.executable, "-m", "flatout", *situation.command, *more]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    return output


def main(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for job, situation in SITUATIONS.items():
        for state, stop_after in (("stopped", situation.stop_after), ("finished", None)):
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                situation.prepare(folder)
                run(situation, folder, stop_after=stop_after)
                _pack(folder, folder / situation.run, out / f"{job}-{state}.tar.xz")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        SITUATIONS["yolo"].prepare(folder)
        run(SITUATIONS["yolo"], folder, "--mirror", f"file://{folder}/mirror", stop_after=SITUATIONS["yolo"].stop_after)
        _pack(folder, folder / "mirror", out / "yolo-mirror.tar.xz")


def _pack(root: Path, folder: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:xz") as packed:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix not in PLOTS:
                packed.add(path, str(path.relative_to(root)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
