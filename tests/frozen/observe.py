"""The visible behaviour of small trainings of every job, as text: python -m tests.frozen.observe FOLDER [JOB ...]

Writes one text per job to the folder. Each command runs in its own process, forked from this one, which has imported
torch. For each job: a training that is stopped in the middle of an epoch, refused with another recipe and with other
data, and continued to its end; and the content of a mirror.
"""

import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from flatout.__main__ import main as flatout_main
from flatout.engine.callbacks import Callback, Callbacks, End, RunStart, Saved, Scores
from flatout.engine.job import IntervalStats
from flatout.safefiles.container import read_container
from tests.old_runs.situations import SITUATIONS, Situation

OTHER_RECIPE = {
    "yolo": ("--exist-ok", "--img", "96"),
    "defect": ("--exist_ok", "true", "--lr", "0.5"),  # as people typed it before there were dashes
    "spike": ("--exist-ok", "--set", "TRAIN.OPTIM.LR=0.5"),
}
PART_OF_DATA = {
    "yolo": "set/images/train/15.bmp",
    "defect": "strips/train/good/0003.tiff",
    "spike": "clips/train/scene_01",
}
"""A file whose removal changes the data."""

MAX_CHARACTERS = 200
MAX_TENSORS = 5
"""Most tensors of a dict that are listed one by one."""
LARGE = 8
"""Descriptions of at least this many lines are not repeated."""


class Done(NamedTuple):
    """A command that has ended."""

    code: int
    out: str
    err: str
    events: list[dict[str, Any]]
    """The events that callbacks received, in order."""


class Recorder(Callback):
    """Records the events of a callback: the main fields, and the names of numbers."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def start(self, run: RunStart) -> None:
        self._note("start", run, ("job", "folder", "epoch", "epochs", "continues"), names=("config", "histograms"))

    def log(self, stats: IntervalStats) -> None:
        self._note("log", stats, ("epoch", "step"), names=("items",))

    def validation(self, scores: Scores) -> None:
        self._note("validation", scores, ("epoch", "at"), names=("scalars",))

    def checkpoint(self, saved: Saved) -> None:
        self._note("checkpoint", saved, ("epoch", "step", "path"))

    def end(self, end: End) -> None:
        self._note("end", end, ("how", "why", "folder", "epoch"))

    def _note(self, kind: str, details: object, fields: Sequence[str], names: Sequence[str] = ()) -> None:
        values = {name: str(value) for name in fields if (value := getattr(details, name)) is not None}
        event = {"kind": kind, "values": values, "names": {name: list(getattr(details, name)) for name in names}}
        with self._path.open("a") as file:
            file.write(json.dumps(event) + "\n")


def main(out: Path, jobs: Sequence[str]) -> None:
    """Write a text for each of the jobs to a folder."""
    for job in jobs:
        (out / f"{job}.txt").write_text(seen_of(job))


def seen_of(job: str) -> str:
    """The visible behaviour of a job's trainings."""
    situation = SITUATIONS[job]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        situation.prepare(folder)
        sections = dict(_sections(job, situation, folder))
    text = "\n\n".join(f"==== {title}\n{body}" for title, body in sections.items())
    return text.replace(str(folder), "FOLDER") + "\n"


def _sections(job: str, situation: Situation, folder: Path) -> Iterator[tuple[str, str]]:
    command, run = situation.command, folder / situation.run
    shown: dict[str, Any] = {}
    keys = Keys()
    stopped = run_command(command, folder, stop_after=situation.stop_after)
    yield f"stopped: FLATOUT_STOP_AFTER={situation.stop_after}", _closing(stopped, run)
    yield "stopped: callbacks", _shown(stopped.events, shown)
    yield "stopped: run folder", _listing(run)
    yield "stopped: sections of last.pt", keys.of(run, "last.pt", "stopped")
    yield "other recipe", _closing(run_command([*command, *OTHER_RECIPE[job]], folder, stop_after=1), run)
    yield "other recipe: folders of runs", _names(run.parent)
    with _missing(folder / PART_OF_DATA[job], folder / "aside"):
        yield "other data", _closing(run_command(command, folder), run)
    finished = run_command(command, folder)
    yield "continued and finished", _closing(finished, run)
    yield "continued and finished: callbacks", _shown(finished.events, shown)
    yield "finished: run folder", _listing(run)
    yield "finished: sections of last.pt", keys.of(run, "last.pt", "finished")
    yield "finished: sections of best.pt", keys.of(run, "best.pt", "finished")
    yield "finished, --once", _closing(run_command([*command, "--once"], folder), run)
    mirrored = run_command([*command, "--fresh", "--mirror", f"file://{folder}/mirror"], folder)
    yield "finished with --mirror", _closing(mirrored, run)
    yield "finished with --mirror: what it holds", _mirror_listing(folder / "mirror")


def run_command(words: Sequence[str], folder: Path, *, stop_after: int | None = None) -> Done:
    """Run `flatout WORDS` in a folder, in a forked process, with a callback that records its events."""
    with tempfile.TemporaryDirectory() as name:
        paths = [Path(name) / part for part in ("out", "err", "events")]
        for path in paths:
            path.touch()
        if (pid := os.fork()) == 0:
            _run_flatout(words, folder, stop_after, *paths)
        _, status = os.waitpid(pid, 0)
        out, err, events = (path.read_text() for path in paths)
    return Done(os.waitstatus_to_exitcode(status), out, err, [json.loads(line) for line in events.splitlines()])


def _run_flatout(
    words: Sequence[str], folder: Path, stop_after: int | None, out: Path, err: Path, events: Path
) -> NoReturn:
    code = 70
    try:
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY), number)
        os.chdir(folder)
        for name in [name for name in os.environ if name.startswith("FLATOUT_")]:
            del os.environ[name]
        if stop_after is not None:
            os.environ["FLATOUT_STOP_AFTER"] = str(stop_after)
        _record_callbacks(events)
        code = flatout_main(words)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _record_callbacks(events: Path) -> None:
    """Add a recorder to the callbacks of any training of this process; commands have no option for that."""
    plain_init = Callbacks.__init__

    def init(self: Callbacks, callbacks: Iterable[Callback] = ()) -> None:
        given = list(callbacks)
        # Ranks other than the first have no callbacks.
        plain_init(self, [*given, Recorder(events)] if given else ())

    Callbacks.__init__ = init  # type: ignore[method-assign]


@contextmanager
def _missing(path: Path, aside: Path) -> Iterator[None]:
    """Inside the block a part of the data is missing."""
    path.rename(aside)
    yield
    aside.rename(path)


def _closing(done: Done, run: Path) -> str:
    """The exit code, the lines about the run and its end, and the error."""
    about = re.compile(rf"{run.parent.name}/{run.name}|^Stopped |^Mirrored ")
    out = [f"stdout: {_masked(line)}" for line in done.out.splitlines() if about.search(line)]
    err = [f"stderr: {_masked(line)}" for line in done.err.splitlines() if line.startswith("flatout: ")]
    return "\n".join([f"exit code {done.code}", *out, *err])


def _masked(line: str) -> str:
    """The line without times, shortened."""
    line = re.sub(r"\b\d+:\d\d:\d\d\b", "H:MM:SS", line)
    return line if len(line) <= MAX_CHARACTERS else f"{line[:MAX_CHARACTERS]} ..."


def _shown(events: Sequence[Mapping[str, Any]], before: dict[str, Any]) -> str:
    """One line per event; names of numbers only if they differ from those of the event of this kind `before`."""
    lines = []
    for event in events:
        kind = event["kind"]
        lines.append(f"{kind:<10} {' '.join(f'{name}={value}' for name, value in event['values'].items())}")
        if event["names"] != before.get(kind):
            lines += [f"    {name}: {' '.join(names)}" for name, names in event["names"].items() if names]
        before[kind] = event["names"]
    return "\n".join(lines)


def _listing(folder: Path) -> str:
    """All files below a folder, including hidden ones."""
    return "\n".join(sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()))


def _names(folder: Path) -> str:
    return " ".join(sorted(path.name for path in folder.iterdir()))


class Keys:
    """Describes the content of files: keys and types of values. A large part that occurred before is only named."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], str] = {}

    def of(self, run: Path, file: str, when: str) -> str:
        """The sections of a file of a run; `when` distinguishes it from the same file at another time."""
        (path,) = run.glob(f"*/{file}")
        return "\n".join(self._tree(read_container(path), f"{when} {file} "))

    def _tree(self, value: Mapping[Any, object], where: str) -> list[str]:
        """A line per key, followed by the description of its value."""
        if all(isinstance(key, int) for key in value):
            described = _numbered({key: Keys()._described(item, "") for key, item in value.items()})
        else:
            described = {str(key): self._described(item, f"{where}{key}") for key, item in value.items()}
        return [line for key, (kind, *below) in described.items() for line in (f"{key}: {kind}", *below)]

    def _described(self, value: object, where: str) -> list[str]:
        """The type of a value, then lines about its content."""
        if isinstance(value, list | tuple) and any(isinstance(item, dict | list | tuple) for item in value):
            return self._holding(type(value).__name__, dict(enumerate(value)), where)
        if isinstance(value, dict):
            return [_tensors(value)] if _is_state(value) else self._holding("dict", value, where)
        if isinstance(value, list | tuple):
            return [f"{type(value).__name__} of {' and '.join(sorted({_kind(item) for item in value})) or 'nothing'}"]
        return [_kind(value)]

    def _holding(self, kind: str, value: Mapping[Any, object], where: str) -> list[str]:
        below = tuple(self._tree(value, f"{where}."))
        known = self._known.setdefault(below, where) if len(below) >= LARGE else where
        return [kind, *(f"  {line}" for line in below)] if known == where else [f"{kind} as {known}"]


def _numbered(described: Mapping[Any, list[str]]) -> dict[str, list[str]]:
    """Descriptions of numbered values; only one if they are all equal."""
    first, *others = described.values()
    if others and all(other == first for other in others):
        return {f"{min(described)} to {max(described)}": first}
    return {str(number): lines for number, lines in described.items()}


def _is_state(value: Mapping[Any, object]) -> bool:
    return len(value) > MAX_TENSORS and all(isinstance(item, torch.Tensor) for item in value.values())


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} tensor"
    return "None" if value is None else type(value).__name__


def _tensors(named: Mapping[Any, object]) -> str:
    """Many tensors in one line: the number of each type, and a digest of their names."""
    kinds = Counter(map(_kind, named.values()))
    digest = hashlib.sha256(json.dumps(list(named)).encode()).hexdigest()[:8]
    return f"dict of {', '.join(f'{count} {kind}s' for kind, count in sorted(kinds.items()))}, names {digest}"


def _mirror_listing(mirror: Path) -> str:
    """The files of the run in the newest manifest."""
    (place,) = mirror.iterdir()
    manifests = sorted((place / "manifests").iterdir())
    newest = json.loads(manifests[-1].read_text())
    head = [f"{place.name}: {_names(place)}", f"manifest: {' '.join(newest)}", f"finished: {newest['finished']}"]
    return "\n".join([*head, *(f"  {name}" for name in sorted(newest["files"]))])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(SITUATIONS))
