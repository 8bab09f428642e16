"""How many of flatout's own files does a reader open to follow a YOLO training?

A small real training (yolov7-tiny, 64 px, 2 epochs of 12 steps, one worker process, demo data, CPU) runs with a hook
that records every function of flatout that starts, in the training process and its children. The files of these
functions are counted, without `__init__.py`: once from the start of step 5 to that of step 7 of the first epoch, once
for everything from the command to the saved weights. Bodies of modules and classes, which run on import, do not count
as functions, and a generator that is resumed does not start. `--code FOLDER` first measures another checkout in the
same way.
Answer: bench/results/files_entered_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import inspect
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

HERE = Path(__file__).resolve()
THIS_CHECKOUT = HERE.parent.parent
WAYS = {"plain": [], "--fast": ["--fast"]}
NUM_IMAGES, BATCH, SIDE_PX = 48, 4, 64
STEP = "DetectionJob.step"
"""The function that starts once per step in every checkout; found by name, because files move."""
FIRST_STEP, STEP_AFTER = 5, 7
PAUSE_S = 2.0
COMPREHENSIONS = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Separate functions in some versions of Python; the function around them has started anyway."""
MAIN, FORKSERVER, WORKER = "main", "forkserver", "worker"
STEPS, WHOLE = "steps 5-6", "whole way"
MONITORING: Any = getattr(sys, "monitoring", None)
"""From Python 3.12 on; older versions need the slower hook for profilers."""


# In the processes of the training


class Recorder:
    """Records each file of flatout when one of its functions first starts in this process, and again during the steps.

    Every record is written at once, because workers are killed and cannot write at their end.
    """

    def __init__(self, code: str, notes: str, role: str) -> None:
        self._package = f"{code}{os.sep}flatout{os.sep}"
        self._window = f"{notes}.window"
        """This file exists during the recorded steps, so that workers know of them, too."""
        self._notes = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._role = role
        self._noted: set[tuple[str, str]] = set()
        self._steps = 0

    def start(self) -> None:
        os.register_at_fork(after_in_child=self._be_worker)
        if MONITORING is None:
            threading.setprofile(self._on_event)
            sys.setprofile(self._on_event)
        else:
            tool, starts = MONITORING.PROFILER_ID, MONITORING.events.PY_START
            MONITORING.use_tool_id(tool, "files_entered")
            MONITORING.register_callback(tool, starts, self._on_start)
            MONITORING.set_events(tool, starts)

    def _be_worker(self) -> None:
        self._role, self._noted = WORKER, set()

    def _on_start(self, code: CodeType, offset: int) -> Any:
        return self._entered(code) if self._is_own(code) else MONITORING.DISABLE

    def _on_event(self, frame: FrameType, event: str, arg: object) -> None:
        # The operand of the current instruction RESUME: 0 at the start of a function, more if a generator is resumed.
        if event == "call" and self._is_own(code := frame.f_code) and code.co_code[frame.f_lasti + 1] & 3 == 0:
            self._entered(code)

    def _is_own(self, code: CodeType) -> bool:
        return code.co_filename.startswith(self._package)

    def _entered(self, code: CodeType) -> None:
        # Bodies of modules and classes do not count: they run on import.
        if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name in COMPREHENSIONS:
            return
        if code.co_qualname == STEP:
            self._begin_step()
        self._note(WHOLE, code)
        if os.path.exists(self._window):
            self._note(STEPS, code)

    def _begin_step(self) -> None:
        """Open or close the window, after a pause in which the worker fills all slots: so it always reads the same two
        batches in between."""
        self._steps += 1
        if self._steps in (FIRST_STEP, STEP_AFTER):
            time.sleep(PAUSE_S)
            Path(self._window).touch() if self._steps == FIRST_STEP else Path(self._window).unlink()

    def _note(self, when: str, code: CodeType) -> None:
        file = code.co_filename
        if not file.endswith("__init__.py") and (when, file) not in self._noted:
            self._noted.add((when, file))
            os.write(self._notes, f"{self._role}\t{when}\t{file.removeprefix(self._package)}\n".encode())


def record(code: str, notes: str, role: str) -> None:
    """Record this process, its forks, and the Python programs that it starts.

    Workers are forked by a new interpreter that the training starts with `python -c`. A call of `record` is put before
    its first line, so that this file needs to know nothing about the feed, which differs between checkouts.
    """

    class Popen(subprocess.Popen):
        def __init__(self, args: Any, *others: Any, **named: Any) -> None:
            if list(args[:2]) == [sys.executable, "-c"]:
                args = [*args[:2], recorded(code, notes, FORKSERVER) + args[2], *args[3:]]
            super().__init__(args, *others, **named)

    subprocess.Popen = Popen  # type: ignore[misc]
    Recorder(code, notes, role).start()


def recorded(code: str, notes: str, role: str) -> str:
    """The first lines of a program that is recorded."""
    # Appended to the path, not prepended: this folder has files with common names.
    load = f"import sys; sys.path.append({str(HERE.parent)!r}); import {HERE.stem}"
    return f"{load}; {HERE.stem}.record({code!r}, {notes!r}, {role!r}); "


# In the process of the benchmark


def files_entered(code: Path, flags: Sequence[str]) -> dict[tuple[str, str], set[str]]:
    """Train with the checkout `code`; returns files by process and time."""
    with tempfile.TemporaryDirectory() as folder:
        draw = f"yolo demo-data data --images {NUM_IMAGES} --val {BATCH}"
        flatout(code, folder, "import sys; ", draw.split())
        notes = f"{folder}/notes"
        train = f"yolo train --data data/demo.yaml --epochs 2 --batch-size {BATCH} --img-size {SIDE_PX} {SIDE_PX}"
        train += f" --cfg {code}/cfg/training/yolov7-tiny.yaml --hyp {code}/data/hyp.scratch.tiny.yaml"
        words = [*train.split(), "--weights", "", "--workers", "1", "--device", "cpu", *flags]
        flatout(code, folder, recorded(str(code), notes, MAIN), words)
        found: dict[tuple[str, str], set[str]] = defaultdict(set)
        for line in Path(notes).read_text().splitlines():
            role, when, file = line.split("\t")
            found[role, when].add(file)
    if not (found[MAIN, STEPS] and found[WORKER, STEPS]):
        raise SystemExit(f"{code}: nothing of the main process or the worker was recorded. Does {STEP} still exist?")
    return found


def flatout(code: Path, folder: str, beginning: str, words: Sequence[str]) -> None:
    """Run a command of the checkout in `folder`, after the `beginning`; its output is shown if it fails."""
    program = f"{beginning}from flatout.__main__ import main; sys.exit(main(sys.argv[1:]))"
    # A separate cache: files of earlier trainings in the user's cache would skip functions.
    environ = dict(os.environ, PYTHONPATH=str(code), XDG_CACHE_HOME=f"{folder}/cache", OMP_WAIT_POLICY="PASSIVE")
    command = [sys.executable, "-c", program, *words]
    done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"flatout {' '.join(words)}\nof {code} ended with {done.returncode}:\n{done.stdout}")


def main() -> int:
    # Imported here, because processes of the training load this file, too, and must load nothing else with it.
    from bench.measure import arguments, report

    parser = arguments(__doc__)
    parser.add_argument("--code", type=Path, action="append", default=[], metavar="FOLDER", help="another checkout")
    parser.add_argument("--list", action="store_true", help="show the files: m of the main process, w of workers")
    options = parser.parse_args()
    lines, numbers = [], {}
    for code in [*(folder.resolve() for folder in options.code), THIS_CHECKOUT]:
        num_files = sum(path.name != "__init__.py" for path in (code / "flatout").rglob("*.py"))
        lines.append(f"{f'{code.name}, {num_files} files':24}{'main':>8}{'workers':>9}{'together':>10}")
        for way in list(WAYS)[: 1 if options.quick else None]:
            found = files_entered(code, WAYS[way])
            # The forkserver counts for the whole way only; during the steps it waits.
            others = {STEPS: found[WORKER, STEPS], WHOLE: found[WORKER, WHOLE] | found[FORKSERVER, WHOLE]}
            for when, by_workers in others.items():
                by_main = found[MAIN, when]
                together = sorted(by_main | by_workers)
                lines.append(f"  {way:9}{when:13}{len(by_main):8}{len(by_workers):9}{len(together):10}")
                if options.list:
                    marks = ("m" * (file in by_main) + "w" * (file in by_workers) for file in together)
                    lines += [f"    {mark:3}{file}" for mark, file in zip(marks, together, strict=True)]
                numbers[f"{code.name}, {way}, {when}"] = {"main": sorted(by_main), "workers": sorted(by_workers)}
    report("files_entered", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
