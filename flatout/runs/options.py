"""What every training can be asked for, whatever it trains: where its run is, what it costs, who hears of it.

Jobs add their own options by inheritance. The defaults live here and nowhere else. No torch: help must answer at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from flatout.cli import changes_of, option
from flatout.errors import ConfigError
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
