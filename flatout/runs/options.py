"""The options that every job has, and which changes of options allow a run to be continued.

Jobs inherit from `RunOptions` and add their own options; defaults are defined only there. What a changed option means
for a run is one of five values of `Change`, the same in all jobs:

    call        budget, price, mirror, resume ...            never taken from the run: each command has its own
    exact       workers, caches, logs, device ...            the run continues
    rounding    number format, memory layout, compile ...    the run continues, and a log line says so
    place       paths of data, weights, configs              as `different`, unless --resume names the run
    different   recipe, size, batch ...                      another training: refused, with a list and alternatives

Settings are compared as given, after expanding shortcuts and filling in defaults: an option that did not exist when a
run was started does not keep it from being continued. Does not import torch, so that help is fast.
"""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

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
    project: str = option("runs", "folder that holds the run folders", change="exact", metavar="FOLDER")
    name: str = option("exp", "name of the run folder; a number is appended if it exists", change="exact")
    exist_ok: bool = option(False, "use exactly PROJECT/NAME, even if it exists", change="exact")
    resume: bool | str = option(
        False,
        "continue this run folder or checkpoint; without a value, the newest run below the current folder",
        change="call",
        nargs="?",
        const=True,
        metavar="PATH",
    )
    """True: the newest run; a path: that checkpoint or folder."""
    fresh: bool = option(False, "start a new run even if an unfinished one could be continued", change="call")
    once: bool = option(
        False,
        "do nothing and exit with 0 if the run is finished; for process managers that always restart",
        change="call",
    )
    allow_data_change: bool = option(False, "continue a run although its data has changed", change="call")
    break_lock: bool = option(
        False,
        "take over a run folder locked by another machine; make sure that it is not training",
        change="call",
    )

    # Device and kernels
    device: str = option(
        "",
        "cpu, one GPU (0), or several that train together (0,1,2,3); default: the first GPU, else the CPU",
        change="exact",
    )
    local_rank: int = option(-1, "set by launchers, like $LOCAL_RANK", flag="--local_rank", change="call", metavar="N")
    compile: Compile = option(
        "off", "torch.compile; auto: only if it pays within this run (default: off)", change="rounding"
    )
    deterministic: bool = option(
        False, "use deterministic kernels: repeatable to the last bit, but slower", change="rounding"
    )
    no_preflight: bool = option(False, "skip the check of disk, memory and GPU before training", change="call")
    profile: int = option(
        0,
        "profile the first N steps (default N: 30), write profile.html to the run folder, print what would be faster",
        change="call",
        nargs="?",
        const=30,
        metavar="N",
    )
    """Steps to profile at the start of the training; 0: none."""

    # Length and cost
    patience: int = option(0, "stop after this many epochs without improvement; 0: never", change="exact", metavar="N")
    price: float | None = option(
        None, "cost of an hour of this machine, in any currency", change="call", metavar="PER_HOUR"
    )
    budget: str = option(
        "",
        "save and stop when this much is spent: money (with --price) or time, such as 5.00 or 2h30m",
        change="call",
    )
    stop_after: int | None = option(None, "", change="call")
    """FLATOUT_STOP_AFTER: save and stop after this many steps."""

    # Checkpoints, logs and notifications
    save_every_minutes: float = option(10.0, "longest time between two checkpoints", change="exact", metavar="MINUTES")
    save_every_steps: int = option(
        1000, "maximum number of steps between two checkpoints", change="exact", metavar="STEPS"
    )
    log_every: int = option(50, "steps between two log lines", change="exact", metavar="STEPS")
    log_to: tuple[LogTo, ...] = option(
        (), f"loggers besides the files of the run folder (default: {DEFAULT}, if it is installed)", change="exact"
    )
    mirror: str = option(
        "",
        "copy checkpoints to s3://bucket/folder or another URL, and continue from there",
        change="call",
        metavar="URL",
    )
    on_done: str = option(
        "",
        "run this shell command at the end; $FLATOUT_OUTCOME and others describe what happened",
        change="call",
        metavar="COMMAND",
    )

    def __post_init__(self) -> None:
        if problems := [*self._run_problems(), *self._problems()]:
            raise ConfigError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        """Problems with the options of a job, a sentence each."""
        return iter(())

    def _run_problems(self) -> Iterator[str]:
        for name, least in self.LEAST.items():
            yield from too_small(self, least, name)
        if not self.save_every_minutes > 0:
            yield f"--save-every-minutes {self.save_every_minutes} must be greater than 0"


def own_and_run_options(model: type[RunOptions]) -> tuple[list[str], list[str]]:
    """Names of a job's own options, and of those that every job has."""
    of_runs = [each.name for each in fields(RunOptions)]
    return [each.name for each in fields(model) if each.name not in of_runs], of_runs


def too_small(options: object, least: int, *names: str, underscores: bool = False) -> Iterator[str]:
    """A message for each of these fields whose value is a number below `least`."""
    for name in names:
        number = getattr(options, name)
        if isinstance(number, int | float) and number < least:
            yield f"{f'--{name}' if underscores else flag_name(name)} {number} must be {least} or more"


def flag_name(name: str) -> str:
    return "FLATOUT_STOP_AFTER" if name == "stop_after" else f"--{name.replace('_', '-')}"


def check_mirror_url(url: str) -> None:
    """ConfigError if `url` is not a URL, or contains a login or a query; does not contact the store."""
    parts = urlsplit(url)
    if not parts.scheme or "://" not in url:
        raise ConfigError(f"--mirror {url}: not a URL. Use for example s3://bucket/folder or file:///mnt/disk/folder.")
    # Azure writes abfss://container@account.dfs.core.windows.net/folder, which is no login.
    is_login = "@" in parts.netloc and (parts.scheme not in ("abfs", "abfss") or ":" in parts.netloc)
    if is_login or parts.query:
        raise ConfigError(
            f"--mirror {parts.scheme}://...: URLs appear in logs and files and must not contain credentials. Pass them "
            "as environment variables (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, GOOGLE_APPLICATION_CREDENTIALS, "
            "AZURE_STORAGE_ACCOUNT_KEY)."
        )


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Option values from environment variables, by option name."""
    values = {
        "stop_after": whole_number(environ, "FLATOUT_STOP_AFTER"),
        "local_rank": whole_number(environ, "LOCAL_RANK"),
    }
    return {name: number for name, number in values.items() if number is not None}


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """The integer in an environment variable; None if it is unset or empty, ConfigError if it is something else."""
    text = environ.get(name, "")
    if text and not text.removeprefix("-").isdecimal():
        raise ConfigError(f"environment variable {name}={text}: not a whole number. Correct it or unset it.")
    return int(text) if text else None


def plain(options: RunOptions) -> dict[str, Any]:
    """Options as values that YAML and JSON can hold."""
    return {name: _listed(value) for name, value in asdict(options).items()}


def config_of(options: RunOptions) -> dict[str, Any]:
    """The options that determine the result, as given: commands that agree in them refer to the same run."""
    changes = changes_of(type(options))
    return {name: value for name, value in plain(options).items() if changes.get(name) not in ("call", "exact")}


def _listed(value: Any) -> Any:
    return [_listed(item) for item in value] if isinstance(value, tuple) else value


# Continuing a run under other options

RECORD_NAME = "run.json"
CONFIG_NAME = "config.yaml"
STATES = ("last.pt", "last.prev.pt")
EXTENDABLE = "epochs"
"""The one setting that may increase when a run is continued."""

Options = TypeVar("Options", bound=RunOptions)


class Comparison(NamedTuple):
    """Differences between the settings of a run and those of a command, as texts: 'batch_size 16 -> 32'."""

    rounding: list[str]
    different: list[str]
    extends: list[str]
    """Not empty if there are more epochs than before."""

    @property
    def is_same_training(self) -> bool:
        return not self.different


@dataclass(frozen=True)
class Identity:
    """The settings that identify a training."""

    config: Mapping[str, Any]
    """The settings that determine the result, as given, in values that JSON can hold."""
    in_effect: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda config: config
    """Resolves a config of this or an older version: fills in defaults and expands shortcuts."""
    changes: Mapping[str, Change] = field(default_factory=dict)
    """The class of a change of each resolved key; missing keys are `different`. Nested keys: 'DATA.ROOT'."""

    def compare(self, old: Mapping[str, Any], *, is_named: bool = False) -> Comparison:
        """Compare with `old`, the config recorded when a run was started. `is_named`: the run is given by --resume."""
        found = Comparison([], [], [])
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
    """The identity for jobs without shortcuts among their options."""
    known = {key: _listed(value) for key, value in defaults_of(type(options)).items() if key in config}
    return Identity(config, lambda old: known | dict(old), changes_of(type(options)))


def options_to_resume(stored: Options, requested: Options, typed: Collection[str] | None = None) -> Options:
    """The options of a resumed run: its stored ones, except those given by the command and those of class `call`.

    `typed` names the options given by the command; None: those that differ from their defaults. Whether such a change
    makes it another training is decided by `Identity.compare`.
    """
    changes, defaults = changes_of(type(requested)), defaults_of(type(requested))
    if typed is None:
        typed = {name for name, default in defaults.items() if getattr(requested, name) != default}
    replaced = [name for name in defaults if changes.get(name) == "call" or name in typed]
    opposites = {name: defaults[name] for name in map(_opposite, typed) if name in defaults and name not in typed}
    return replace(stored, **opposites, **{name: getattr(requested, name) for name in replaced})


def checkpoint_to_resume(options: RunOptions, *, root: Path = Path()) -> Path | None:
    """The file or folder given to `--resume`, by default the newest last.pt below `root`; None without `--resume`.

    CheckpointError if it does not exist, ConfigError if it is another file of a run than its newest checkpoint.
    """
    if not options.resume:
        return None
    if options.resume is True:
        return newest_last(root)
    path = Path(options.resume)
    if not path.exists():
        raise CheckpointError(
            f"--resume {path}: no such file. Give a run folder or its last.pt, or no value for the newest run."
        )
    if path.is_file() and path.name not in STATES:
        raise ConfigError(
            f"--resume {path}: a run continues from its newest checkpoint. Give its last.pt or the run folder. "
            f"To start a new run from this file, use --weights {path}"
        )
    return path


def newest_last(root: Path) -> Path:
    """The most recently changed `last*.pt` below a folder, for `--resume` without a value; CheckpointError if none."""
    found = [path for path in root.glob("**/last*.pt") if not path.name.endswith(".old.pt")]
    if not found:
        raise CheckpointError(f"{root.resolve()}: no last*.pt below this folder. Name a run: --resume RUN")
    newest = max(found, key=lambda path: path.stat().st_ctime)
    # The previous checkpoint is renamed after the newest one appears, and looks newer.
    return newest.with_name(newest.name.replace(".prev.pt", ".pt"))


def run_of(checkpoint: Path) -> Path:
    """The run folder of a checkpoint such as `runs/train/exp/weights/last.pt`; a run folder itself is returned.

    CheckpointError if it is not part of a run.
    """
    for folder in (checkpoint, checkpoint.parent, checkpoint.parent.parent):
        if (folder / RECORD_NAME).is_file():
            return folder
    raise CheckpointError(
        f"{checkpoint}: not part of a run that can be continued: no {RECORD_NAME} beside or above it. "
        "To start a new run from these weights, use --weights."
    )


def flat(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """A nested config with dotted keys on one level: {'DATA': {'ROOT': 'x'}} -> {'DATA.ROOT': 'x'}."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f"{above}{key}.") if isinstance(value, Mapping) and value else {f"{above}{key}": value}
    return found


def refused(folder: Path, comparison: Comparison) -> str:
    """The message for a command that cannot continue the run in a folder."""
    return (
        f"{folder} holds an unfinished run with other settings: {', '.join(comparison.different)}. Continue it as it "
        f"was with --resume {folder}, start over with --fresh, or choose another --name."
    )


def _opposite(name: str) -> str:
    """The opposite of an option: of `no_compile` and `compile`, the one given by the command wins."""
    return name.removeprefix("no_") if name.startswith("no_") else f"no_{name}"


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (f"{key} {_shown(old, key)} -> {_shown(new, key)}", key)
        for key in sorted(old.keys() | new.keys())
        if _shown(old, key) != _shown(new, key)
    ]


def _grows(old: Any, new: Any) -> bool:
    return isinstance(old, int) and isinstance(new, int) and old < new


def _shown(config: Mapping[str, Any], key: str) -> str:
    """A value as JSON, so that values read from a file compare equal to those written."""
    return json.dumps(config[key], sort_keys=True) if key in config else "unset"
