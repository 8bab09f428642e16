"""Command lines: tables of commands, flags from the fields of options classes, and the list of jobs."""

import argparse
import difflib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from functools import partial
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from flatout.errors import ConfigError, did_you_mean

JOBS = {
    "yolo": "flatout.yolo.commands.train",
    "defect": "flatout.defect.commands.train",
    "spike": "flatout.spike.commands.train",
}
"""The jobs, and for each the module with its training command, `COMMAND`; none is imported here."""

TRAINING_EXIT_CODES = """\
Exit codes: 0 done, 2 wrong options, 3 unusable data, 4 unusable weights, 5 not enough disk, memory or GPUs, 6 diverged,
7 a worker or another rank was lost, 75 interrupted and saved (run the same command again), 130 interrupted twice and
stopped at once.
"""
"""A paragraph for the help of every training command."""

# Commands


class Command(NamedTuple):
    """The help text of a command, and the module with its `main(argv) -> exit code`."""

    help: str
    module: str


HABITS = {
    "val": ("test",),
    "validate": ("test",),
    "eval": ("test",),
    "evaluate": ("test",),
    "predict": ("detect",),
    "detect": ("predict",),
    "infer": ("detect", "predict"),
    "inference": ("detect", "predict"),
}
"""What other programs, or other jobs, call a command -> its possible names here."""
WITH_FLAG = {"track": "detect --track"}
"""Commands of other programs -> the command with the flag that does it here."""
HELP_WORD = "help"


def known_as(name: str, commands: Mapping[str, Command]) -> str | None:
    """The command of this name, or of another name that it is known by; None if there is none."""
    return next((each for each in (name, *HABITS.get(name, ())) if each in commands), None)


def other_names(commands: Mapping[str, Command]) -> str:
    """What the help says about habits: 'Other names: val for test, predict for detect.'; may be empty."""
    found = {name: HABITS[name][0] for name in ("val", "predict", "detect") if name not in commands}
    pairs = [f"{name} for {real}" for name, real in found.items() if real in commands]
    return f" Other names: {', '.join(pairs)}." if pairs else ""


def listing(commands: Mapping[str, Command]) -> str:
    """The list of commands for the help text."""
    width = max(map(len, commands))
    return "\n".join(["commands:", *(f"  {name:<{width}}  {command.help}" for name, command in commands.items())])


def dispatch(words: Sequence[str], commands: Mapping[str, Command], *, prog: str) -> int:
    """Run the command that the first word names with the other words; returns its exit code.

    `prog` is the program, such as `flatout yolo`. ConfigError for an unknown command.
    """
    typed, *argv = words
    name = known_as(typed, commands)
    if name is None:
        if (meant := WITH_FLAG.get(typed, "")).partition(" ")[0] in commands:
            raise ConfigError(f"unknown command {typed!r}; run `{' '.join([prog, meant, *argv])}`.")
        advice = did_you_mean(typed, commands, f"`{prog} --help` lists the commands.")
        raise ConfigError(f"unknown command {typed!r}; {advice}")
    code: int = import_module(commands[name].module).main(argv)
    return code


def dispatch_or_help(argv: list[str], commands: Mapping[str, Command], *, prog: str, description: str) -> int:
    """Run the command that `argv` names; returns its exit code. Without one, print the help of `prog` and return 0."""
    if argv[:1] == [HELP_WORD]:
        argv = [*argv[1:], "--help"]
    if argv and not argv[0].startswith("-"):
        return dispatch(argv, commands, prog=prog)
    epilog = f"{listing(commands)}\n\n`{prog} COMMAND --help` shows the help of a command.{other_names(commands)}"
    parser = parser_of(prog, description, epilog, (), usage=f"{prog} [-h] COMMAND [ARGUMENT ...]")
    parser.parse_args(argv)
    parser.print_help()
    return 0


def show_log(*, only_warnings: bool = False) -> None:
    """Print log messages of flatout to stdout, with warnings marked. May be called twice.

    `only_warnings` is for all ranks but the first.
    """
    logger = logging.getLogger("flatout")
    if not any(isinstance(handler, _StdoutHandler) for handler in logger.handlers):
        logger.addHandler(_StdoutHandler())
    logger.setLevel(logging.WARNING if only_warnings else logging.INFO)


class _StdoutHandler(logging.Handler):
    """Writes to the current sys.stdout, which may be redirected later."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            print(f"{mark}{text}", file=sys.stdout, flush=True)
        except BrokenPipeError:
            raise  # the reader of stdout has left: the command ends with exit code 141
        except Exception:  # as logging handlers do: an error in a log line must not end the program
            self.handleError(record)


# Flags from the fields of an options class
#
#     epochs: int = option(300, "passes over the training images")      -->      --epochs EPOCHS
#
# A field also says what a changed value means for a run that is continued (`Change`), for the comparison of commands.
# Neither torch nor pydantic is imported, so that help is fast.

Change = Literal["call", "exact", "rounding", "place", "different"]
"""What a changed value means for a run that is continued.

call: belongs to each single command and is never taken from a run. exact: the same bits. rounding: the same samples,
schedule and recipe, other last bits. place: the location of files; another training, unless --resume names the run,
since the content of the files is compared as well. different: another training."""

_KEY = "option"


class Flag(NamedTuple):
    """One flag for argparse, without its default."""

    name: str
    help: str
    settings: dict[str, Any]
    """Keyword arguments of argparse's add_argument."""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


class _Option(NamedTuple):
    """The metadata that `option` adds to a field."""

    help: str
    flag: str
    change: Change
    settings: dict[str, Any]


def option(default: Any, help: str, *, flag: str = "", change: Change = "different", **settings: Any) -> Any:
    """A dataclass field that is set by a flag; with an empty `help` there is no flag.

    `flag` is the name of the flag, by default that of the field with dashes. `settings` are keyword arguments of
    add_argument that do not follow from the type.
    """
    return field(default=default, metadata={_KEY: _Option(help, flag, change, settings)})


def switch(name: str, help: str) -> Flag:
    """A flag without a value, off by default."""
    return Flag(name, help, {"action": "store_true"})


def value(name: str, help: str, *, type: Callable[[str], Any] = str, **settings: Any) -> Flag:
    """A flag with a value, or several with `nargs`."""
    return Flag(name, help, {"type": type, **settings})


def parser_of(
    prog: str,
    description: str,
    epilog: str,
    flags: Iterable[Flag],
    groups: Mapping[str, Iterable[Flag]] | None = None,
    *,
    usage: str | None = None,
    shortened: bool = False,
) -> argparse.ArgumentParser:
    """The parser of a command with a few flags; `groups` are further ones by title. `shortened`: may be abbreviated.

    A name without dashes is that of an argument by its position. `usage` replaces the list of all flags.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=usage,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=shortened,
    )
    for title, own in {"": flags, **(groups or {})}.items():
        group = parser.add_argument_group(title) if title else parser
        for flag in own:
            group.add_argument(flag.name, help=flag.help, **flag.settings)
    return parser


def flags_of(model: type, names: Iterable[str] = (), *, converts: bool = True, underscores: bool = False) -> list[Flag]:
    """The flags of these fields, by default of all that have one.

    With `converts=False`, values stay text and switches accept true or false: the options are validated later, which
    reports all mistakes at once. `underscores`: flags are spelled like the fields.
    """
    hints, options = get_type_hints(model), options_of(model)
    made = []
    for name in names or options:
        if not (own := options[name]).help:
            continue
        flag = own.flag or f"--{name if underscores else name.replace('_', '-')}"
        settings = _settings(hints[name], converts=converts) | own.settings
        if settings.get("action") == "store_true":
            settings = {"action": "store_true"}
        made.append(Flag(flag, own.help, settings))
    return made


def options_of(model: type) -> dict[str, _Option]:
    """The metadata of the fields of an options class, those of its bases first."""
    return {each.name: each.metadata[_KEY] for each in fields(model) if _KEY in each.metadata}


def changes_of(model: type) -> dict[str, Change]:
    """What a changed value of each field means for a run that is continued."""
    return {name: own.change for name, own in options_of(model).items()}


def defaults_of(model: type) -> dict[str, Any]:
    return {each.name: each.default for each in fields(model) if each.default is not MISSING}


def _settings(hint: Any, *, converts: bool) -> dict[str, Any]:
    """Keyword arguments of add_argument that follow from the type of a field."""
    plain = (
        [kind for kind in get_args(hint) if kind is not type(None)] if get_origin(hint) not in (tuple, Literal) else []
    )
    (kind, *others) = plain or [hint]
    if kind is bool and not others:
        return {"action": "store_true"} if converts else {"nargs": "?", "const": True, "metavar": "BOOL"}
    if get_origin(kind) is tuple:
        inner = get_args(kind)
        many = "+" if Ellipsis in inner else len(inner)
        return _settings(inner[0], converts=converts) | {"nargs": many}
    if get_origin(kind) is Literal and not others:
        return {"choices": get_args(kind)}
    if kind in (int, float) and not others:
        return {"metavar": "N" if kind is int else "X"} | ({"type": kind} if converts else {})
    return {}


class _Words(list[Any]):
    """A default of several words, shown in help as they are typed."""

    def __str__(self) -> str:
        return " ".join(map(str, self))


NOT_GIVEN = object()


class FlagParser(argparse.ArgumentParser):
    """An argument parser for many flags: dashes and underscores are equal, and only some flags may be abbreviated."""

    def __init__(
        self, prog: str, description: str, epilog: str, *, about: Callable[[str], str | None] = lambda key: None
    ) -> None:
        """`about` returns an explanation for an unknown flag, or None."""
        # A usage line with eighty flags would be unreadable.
        usage = f"{prog} [-h] [FLAG ...]"
        super().__init__(prog, usage, description=description, epilog=epilog, formatter_class=_LAYOUT)
        self._in_full: set[str] = set()
        self._explain = about

    def add_flags(self, title: str, flags: Iterable[Flag], defaults: object, *, shortened: bool = False) -> None:
        """Add a group of flags with the defaults in attributes of `defaults`; `shortened`: they may be abbreviated."""
        group = self.add_argument_group(title)
        for flag in flags:
            default = getattr(defaults, flag.dest)
            default = _Words(default) if isinstance(default, tuple) else default
            # Empty defaults are explained in the help text itself.
            is_empty = default is None or default is False or default in ("", [])
            shown = "" if is_empty or "default" in flag.help else " (default: %(default)s)"
            group.add_argument(flag.name, default=default, help=flag.help + shown, **flag.settings)
            self._in_full |= set() if shortened else {flag.name}

    def parse_typed(self, words: Sequence[str]) -> dict[str, Any]:
        """Only the values given on the command line, by field name."""
        # Flags that may be repeated append to a list or to None.
        blank = {each.dest: None if isinstance(each, argparse._AppendAction) else NOT_GIVEN for each in self._actions}
        given = vars(self.parse_args(words, argparse.Namespace(**blank)))
        return {name: value for name, value in given.items() if name != "help" and value not in (None, NOT_GIVEN)}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._about(unknown))
        return options

    # Overrides of private methods of argparse; in every version the second item of a row is the full flag.
    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(self._spelled(arg_string))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        may_be_short = [row for row in found if row[1] not in self._in_full]
        if found and not may_be_short:
            self.error(f"{option_string}: this flag cannot be abbreviated. Write {found[0][1]}.")
        return may_be_short

    def _spelled(self, word: str) -> str:
        """The word as a known flag is spelled: dashes and underscores swapped, or by another name; else unchanged."""
        name, equals, rest = word.partition("=")
        if name.startswith("--") and name not in self._option_string_actions:
            for other in (name[2:].replace("_", "-"), name[2:].replace("-", "_"), OTHER_NAMES.get(name[2:], "")):
                if f"--{other}" in self._option_string_actions:
                    return f"--{other}{equals}{rest}"
        return word

    def _about(self, unknown: Sequence[str]) -> str:
        """The error message for unknown arguments."""
        first = next((word for word in unknown if word.startswith("--")), unknown[0])
        word, equals, value = first.partition("=")
        if equals and not word.startswith("-") and (flag := self._flag_for(word)):
            return f"unknown argument {first}. Flags are written with dashes: {flag} {value}"
        if equals and not word.startswith("-") and "--set" in self._option_string_actions:
            return f"unknown argument {first}. Write --set before every key: --set {first}"
        if first in COMMANDS_OF_OTHERS:
            job = self.prog.rpartition(" ")[0]
            return f"unknown argument {first}. A command is one word: `{job or 'flatout yolo'} {first}`"
        meant = self._flag_for(word[2:]) if word.startswith("--") and word[2:] in FLAG_HABITS else None
        # Without their dashes, which all flags share.
        known = {flag.lstrip("-"): flag for flag in self._option_string_actions}
        close = [known[name] for name in difflib.get_close_matches(word.lstrip("-"), list(known), n=1)]
        advice = f"Did you mean {meant or close[0]}?" if meant or close else "--help lists all flags."
        kind = "flag" if word.startswith("-") else "argument"
        return f"unknown {kind} {word}. {self._explain(word.removeprefix('--')) or advice}"

    def _flag_for(self, key: str) -> str | None:
        """The flag that is meant by the key of `key=value`, as other programs write it."""
        wanted = f"--{FLAG_HABITS.get(key, key).replace('_', '-')}"
        known = [flag for flag in self._option_string_actions if flag.replace("_", "-").startswith(wanted)]
        return min(known, key=len, default=None)


FLAG_HABITS = {"model": "weights", "imgsz": "img-size", "batch": "batch-size", "format": "formats"}
"""Names of settings in other programs -> our flags."""
OTHER_NAMES = {"imgsz": "img-size", "format": "formats"}
"""Flags of other programs that mean exactly the same as ours, and are accepted."""
COMMANDS_OF_OTHERS = ("train", "val", "predict", "export", "track", "test", "detect")
"""Words that other programs have as a second command: detect train."""


_LAYOUT = partial(argparse.RawDescriptionHelpFormatter, max_help_position=32)
"""Help with a wide first column, so that most flags take only one or two lines."""
