"""What every training can be asked for, whatever it trains: where its run is, what it costs, who hears of it.

Jobs add their own options by inheritance. The defaults live here and nowhere else. No torch: help must answer at once.

May a run go on under other options? Every change belongs to one of three classes, the same in all jobs.

    exact       workers, caches, logs, device, price ...     it goes on
    rounding    number format, memory layout, compile ...    it goes on, and a line says so
    different   data, recipe, size, batch ...                it is another training: refused, with a list and a way out

What is compared are settings as they were typed, with shortcuts spelled out and defaults filled in: an option that did
not exist when a run was begun does not keep the run from going on.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

from flatout.cli import Change, changes_of, defaults_of, option
from flatout.errors import CheckpointError, ConfigError
from flatout.runs.loggers.choose import DEFAULT, LogTo

Compile = Literal["on", "off", "auto"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run."""

    LEAST: ClassVar[Mapping[str, int]] = {
        "save_every_steps": 1, "log_every": 1, "stop_after": 1, "patience": 0, "profile": 0, "price": 0,
    }  # fmt: skip

    # Which run
    project: str = option("runs", "folder of the folders of runs", change="exact", metavar="FOLDER")
    name: str = option("exp", "name of the run; a number is added if that name is taken", change="exact")
    exist_ok: bool = option(False, "use the folder of that name even if it exists", change="exact")
    resume: bool | str = option(
        False,
        "go on with this run folder or checkpoint, or with the newest run below this folder",
        change="call",
        nargs="?",
        const=True,
        metavar="PATH",
    )
    """True: the newest run; a text: that checkpoint or folder."""
    fresh: bool = option(False, "begin again even if a run of that name could be continued", change="exact")
    once: bool = option(
        False,
        "exit with 0 if the run is complete, instead of beginning the next one; for what restarts always",
        change="call",
    )
    allow_data_change: bool = option(False, "continue a run although its data is not what it was", change="call")
    break_lock: bool = option(
        False,
        "take over a run folder that another machine has locked; be sure that it is not at work",
        change="call",
    )

    # On what
    device: str = option(
        "",
        "cpu, a GPU: 0, or several that train together: 0,1,2,3; '' is the first GPU, else the CPU",
        change="exact",
    )
    local_rank: int = option(-1, "set by launchers, as is $LOCAL_RANK", flag="--local_rank", change="call", metavar="N")
    compile: Compile = option(
        "off", "torch.compile; auto: if it pays within this run (default: off)", change="rounding"
    )
    deterministic: bool = option(False, "repeat a run bit by bit, at some cost in speed", change="rounding")
    no_preflight: bool = option(False, "do not look at disk, memory and GPU before training", change="call")
    profile: int = option(
        0,
        "time N steps (30), write profile.html into the run folder, and say what would be faster",
        change="call",
        nargs="?",
        const=30,
        metavar="N",
    )
    """Steps to time before training goes on; 0: none."""

    # How long
    patience: int = option(
        0, "end after this many epochs without a better score; 0: never", change="exact", metavar="N"
    )
    price: float | None = option(
        None, "what an hour of this machine costs, in any currency", change="call", metavar="PER_HOUR"
    )
    budget: str = option(
        "", "stop, saved, when this much is spent: money (with --price) or time, like 5.00 or 2h30m", change="call"
    )
    stop_after: int | None = option(None, "", change="call")
    """FLATOUT_STOP_AFTER: end cleanly after this many steps."""

    # Who hears of it
    save_every_minutes: float = option(10.0, "longest time between two checkpoints", change="exact", metavar="MINUTES")
    save_every_steps: int = option(1000, "most steps between two checkpoints", change="exact", metavar="STEPS")
    log_every: int = option(50, "steps between two lines of the log", change="exact", metavar="STEPS")
    log_to: tuple[LogTo, ...] = option(
        (), f"where numbers go besides the run folder (default: {DEFAULT}, if it is installed)", change="exact"
    )
    mirror: str = option(
        "",
        "copy saved states to s3://bucket/folder or another URL, and go on from there",
        change="call",
        metavar="URL",
    )
    on_done: str = option(
        "",
        "run this command when all is over; $FLATOUT_OUTCOME and others tell what",
        change="call",
        metavar="COMMAND",
    )

    def __post_init__(self) -> None:
        if problems := [*self._run_problems(), *self._problems()]:
            raise ConfigError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        """What is wrong with the options of a job."""
        return iter(())

    def _run_problems(self) -> Iterator[str]:
        for name, least in self.LEAST.items():
            yield from too_small(self, least, name)
        if not self.save_every_minutes > 0:
            yield f"--save-every-minutes {self.save_every_minutes} must be more than 0"


def own_and_run_options(model: type[RunOptions]) -> tuple[list[str], list[str]]:
    """Names of the options that a job has for itself, and of those that every run has."""
    of_runs = [each.name for each in fields(RunOptions)]
    return [each.name for each in fields(model) if each.name not in of_runs], of_runs


def too_small(options: object, least: int, *names: str, underscores: bool = False) -> Iterator[str]:
    """A complaint for each of these fields whose value is a number below `least`."""
    for name in names:
        number = getattr(options, name)
        if isinstance(number, int | float) and number < least:
            yield f"{f'--{name}' if underscores else flag_name(name)} {number} must be {least} or more"


def flag_name(name: str) -> str:
    return "FLATOUT_STOP_AFTER" if name == "stop_after" else f"--{name.replace('_', '-')}"


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """What the environment asks of a run, by names of options."""
    asked = {
        "stop_after": whole_number(environ, "FLATOUT_STOP_AFTER"),
        "local_rank": whole_number(environ, "LOCAL_RANK"),
    }
    return {name: number for name, number in asked.items() if number is not None}


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """A number in the environment, if there is one."""
    text = environ.get(name, "")
    if text and not text.removeprefix("-").isdecimal():
        raise ConfigError(f"{name}={text}: write a whole number, or unset it.")
    return int(text) if text else None


def plain(options: RunOptions) -> dict[str, Any]:
    """Options in values that YAML and JSON know."""
    return {name: _listed(value) for name, value in asdict(options).items()}


def config_of(options: RunOptions) -> dict[str, Any]:
    """What a result depends on, as typed: commands that agree in it mean the same run."""
    changes = changes_of(type(options))
    return {name: value for name, value in plain(options).items() if changes.get(name) not in ("call", "exact")}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


RECORD_NAME = "run.json"
STATES = ("last.pt", "last.prev.pt")
EXTENDABLE = "epochs"
"""The one setting that may grow when a run is continued."""

Options = TypeVar("Options", bound=RunOptions)


class Comparison(NamedTuple):
    """What differs between the settings of a run and those of a command, a text each: 'batch_size 16 -> 32'."""

    rounding: list[str]
    different: list[str]
    extends: list[str]
    """Not empty where there are more epochs than before."""

    @property
    def is_same_training(self) -> bool:
        return not self.different


@dataclass(frozen=True)
class Identity:
    """Which training a command means."""

    config: Mapping[str, Any]
    """What the result depends on, as typed, in values that JSON knows."""
    in_effect: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    """A config of this or an older version -> what it stands for: defaults filled in, shortcuts spelled out."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """Of each key of what it stands for; keys that are not listed are `different`. Groups of keys: 'DATA.ROOT'."""

    def compare(self, old: Mapping[str, Any], *, is_named: bool = False) -> Comparison:
        """`old` is the config of a run, as it was written down when it began; `is_named`: by --resume."""
        found = Comparison([], [], [])
        if _same(old, self.config):
            return found
        before, now = flat(self.in_effect(old)), flat(self.in_effect(self.config))
        for line, key in _differences(before, now):
            change = self.changes.get(key, "different")
            if key == EXTENDABLE and _grows(before.get(key), now.get(key)):
                found.extends.append(line)
            elif change == "rounding":
                found.rounding.append(line)
            elif change == "different" or (change == "place" and not is_named):
                found.different.append(line)
        return found


def identity_of(options: RunOptions, config: Mapping[str, Any]) -> Identity:
    """For jobs whose options are what they say: nothing in them is a shortcut."""
    known = {key: _plain(value) for key, value in defaults_of(type(options)).items() if key in config}
    return Identity(config, lambda old: known | dict(old), changes_of(type(options)))


def options_to_resume(stored: Options, asked: Options, typed: Collection[str] | None = None) -> Options:
    """The options of a run that is taken up again: its own, but for what was typed and what every command says anew.

    `typed` names the options of the command; None: those that are not at their defaults. Whether such a change makes
    another training of it is for `Identity.compare` to say.
    """
    changes, defaults = changes_of(type(asked)), defaults_of(type(asked))
    if typed is None:
        typed = {name for name, default in defaults.items() if getattr(asked, name) != default}
    taken = [name for name in defaults if changes.get(name) == "call" or name in typed]
    opposites = {name: defaults[name] for name in map(_opposite, typed) if name in defaults and name not in typed}
    return replace(stored, **opposites, **{name: getattr(asked, name) for name in taken})


def checkpoint_to_resume(options: RunOptions, *, root: Path = Path()) -> Path | None:
    """The file or folder that `--resume` names, else the newest last.pt below `root`; None without `--resume`."""
    if not options.resume:
        return None
    if options.resume is True:
        return newest_last(root)
    path = Path(options.resume)
    if not path.exists():
        raise CheckpointError(f"--resume {path}: no such file. Name a last.pt, or nothing to take the newest.")
    if path.is_file() and path.name not in STATES:
        raise ConfigError(
            f"--resume {path}: a run continues from its newest state, last.pt: name that, or the folder of the run. "
            f"To start a new run from this file: --weights {path}"
        )
    return path


def newest_last(root: Path) -> Path:
    """The most recently changed `last*.pt` below a folder: what `--resume` means without a value."""
    # The previous checkpoint changes its name after the newest one has appeared, and would look newer.
    found = [path for path in root.glob("**/last*.pt") if not path.name.endswith((".prev.pt", ".old.pt"))]
    found += [newer for path in root.glob("**/last*.prev.pt") if not (newer := _newest_beside(path)).exists()]
    if not found:
        raise CheckpointError(f"{root.resolve()}: no last*.pt lies below this folder. Say which one: --resume FILE")
    return max(found, key=_changed)


def run_of(checkpoint: Path) -> Path:
    """The run folder of `runs/train/exp/weights/last.pt`, or of itself."""
    for folder in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
        if (folder / RECORD_NAME).is_file():
            return folder
    raise CheckpointError(
        f"{checkpoint}: belongs to no run that can be continued: there is no {RECORD_NAME} beside or above it. "
        "To start from these weights, give them as --weights."
    )


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs between two configs, one text per key: 'batch_size 16 -> 32'."""
    return [line for line, _ in _differences(flat(old), flat(new))]


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Groups of keys as one level: {'DATA': {'ROOT': 'x'}} -> {'DATA.ROOT': 'x'}."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {f"{above}{key}": value}
    return found


def refused(folder: Path, comparison: Comparison) -> str:
    """Why a command does not go on with a run, and what to do."""
    return (
        f"{folder} holds an unfinished run of another config: {', '.join(comparison.different)}. Continue it as it was "
        f"with --resume {folder}, start over with --fresh, or choose another --name."
    )


def _opposite(name: str) -> str:
    """`no_compile` and `compile` cannot both hold: what is typed counts."""
    return name.removeprefix("no_") if name.startswith("no_") else f"no_{name}"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"{key} {_shown(old, key)} -> {_shown(new, key)}", key)
        for key in sorted(old.keys() | new.keys())
        if _shown(old, key) != _shown(new, key)
    ]


def _grows(old: Any, new: Any) -> bool:
    return isinstance(old, int) and isinstance(new, int) and old < new


def _same(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    return json.dumps(old, sort_keys=True) == json.dumps(new, sort_keys=True)


def _shown(config: Mapping[str, Any], key: str) -> str:
    """A value as JSON has it: what comes back from a file equals what went in."""
    return json.dumps(config[key], sort_keys=True) if key in config else "unset"


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _newest_beside(previous: Path) -> Path:
    return previous.with_name(previous.name.removesuffix(".prev.pt") + ".pt")


def _changed(path: Path) -> float:
    beside = path.with_name(path.name.removesuffix(".pt") + ".prev.pt")
    return max(each.stat().st_ctime for each in (path, beside) if each.exists())
