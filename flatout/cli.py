"""The machinery of the command line: tables of commands, flags out of the fields of options, and the jobs there are."""

import argparse
import difflib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field, fields
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from flatout.errors import ConfigError

JOBS = {
    "yolo": "flatout.yolo.commands.train",
    "defect": "flatout.defect.commands.train",
    "spike": "flatout.spike.commands.train",
}
"""The jobs there are, and the module of each whose `COMMAND` trains it; nothing of them is imported."""


class Command(NamedTuple):
    """What the help says about a command, and the module that answers it with `main(argv) -> exit code`."""

    help: str
    module: str


def listing(commands: Mapping[str, Command]) -> str:
    """The commands as help shows them."""
    width = max(map(len, commands))
    return "\n".join(["commands:", *(f"  {name:<{width}}  {command.help}" for name, command in commands.items())])


def answer(words: Sequence[str], commands: Mapping[str, Command], *, door: str) -> int:
    """Hand the words after its name to a command; `door` is what was typed before them."""
    name, *argv = words
    if name not in commands:
        close = difflib.get_close_matches(name, commands, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"`{door} --help` lists the commands."
        raise ConfigError(f"unknown command {name!r}; {advice}")
    code: int = import_module(commands[name].module).main(argv)
    return code


def answer_or_explain(argv: list[str], commands: Mapping[str, Command], *, door: str, description: str) -> int:
    """A door within the door, such as `flatout yolo`: run the command that is named, or list what there is."""
    if argv and not argv[0].startswith("-"):
        return answer(argv, commands, door=door)
    parser = argparse.ArgumentParser(
        prog=door,
        usage=f"{door} [-h] COMMAND [ARGUMENT ...]",
        description=description,
        epilog=f"{listing(commands)}\n\n`{door} COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    parser.print_help()
    return 0


def show_log(*, only_warnings: bool = False) -> None:
    """Print messages of flatout from now on: plain to stdout, warnings marked. Calling it twice changes nothing.

    Of several ranks the first speaks; the others show warnings only.
    """
    logger = logging.getLogger("flatout")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines())
    logger.setLevel(logging.WARNING if only_warnings else logging.INFO)


class _Lines(logging.Handler):
    """Writes to whatever stdout is at that moment, so that it may be redirected later."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            print(f"{mark}{text}", file=sys.stdout, flush=True)
        except BrokenPipeError:
            raise  # nobody reads any more: the command ends, and says so by its exit code
        except Exception:
            self.handleError(record)


# Flags of a command out of the fields of an options class: help, choices and spelling stand beside the field.
#
#     epochs: int = option(300, "passes over the training images")      -->      --epochs EPOCHS
#
# An option is also told apart by what it may do to a run that is continued (`Change`): the same table serves the
# command line and whoever compares two commands. No torch, no pydantic: help must answer at once.

Change = Literal["call", "exact", "rounding", "place", "different"]
"""What another value means for a run that goes on.

call: said by every command for itself, and never taken from a run. exact: the same bits. rounding: the same samples,
schedule and recipe, other last bits. place: where files lie; another training, unless the run itself is named, since
what is in them is compared too. different: another training."""

_KEY = "option"


class Flag(NamedTuple):
    """One flag: how argparse reads it, all but its default."""

    name: str
    help: str
    also: tuple[str, ...]
    """Further spellings, never shortened."""
    settings: dict[str, Any]
    """Keywords of argparse's add_argument."""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


class _Option(NamedTuple):
    """What `option` keeps beside a field."""

    help: str
    flag: str
    also: tuple[str, ...]
    change: Change
    settings: dict[str, Any]


def option(
    default: Any,
    help: str,
    *,
    flag: str = "",
    also: tuple[str, ...] = (),
    change: Change = "different",
    **settings: Any,
) -> Any:
    """A field of an options class that a flag sets; without `help` there is a field and no flag.

    `flag` is its name where that is not the field's with dashes; `settings` are keywords of argparse, where the type
    does not say enough.
    """
    return field(default=default, metadata={_KEY: _Option(help, flag, also, change, settings)})


def switch(name: str, help: str) -> Flag:
    """Off unless it is there."""
    return Flag(name, help, (), {"action": "store_true"})


def value(name: str, help: str, *, type: Callable[[str], Any] = str, also: str = "", **settings: Any) -> Flag:
    """Takes a value, or several with `nargs`."""
    return Flag(name, help, (also,) if also else (), {"type": type, **settings})


def flags_of(model: type, names: Iterable[str] = (), *, converts: bool = True, underscores: bool = False) -> list[Flag]:
    """The flags of these fields, or of all that have one.

    Without `converts` values stay text, and a switch may be followed by true or false: whoever builds the options then
    names all mistakes at once. `underscores`: names are spelled like the fields.
    """
    hints, options = get_type_hints(model), options_of(model)
    made = []
    for name in names or options:
        if not (own := options[name]).help:
            continue
        spelled = own.flag or f"--{name if underscores else name.replace('_', '-')}"
        settings = _settings(hints[name], converts=converts) | own.settings
        if settings.get("action") == "store_true":
            settings = {"action": "store_true"}
        made.append(Flag(spelled, own.help, own.also, settings))
    return made


def options_of(model: type) -> dict[str, _Option]:
    """What stands beside the fields of an options class, those of its bases first."""
    return {each.name: each.metadata[_KEY] for each in fields(model) if _KEY in each.metadata}


def changes_of(model: type) -> dict[str, Change]:
    """What another value of each field means for a run that goes on."""
    return {name: own.change for name, own in options_of(model).items()}


def defaults_of(model: type) -> dict[str, Any]:
    return {each.name: each.default for each in fields(model) if each.default is not MISSING}


def _settings(hint: Any, *, converts: bool) -> dict[str, Any]:
    """What a type says about its flag."""
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
    """A default of several words, which help shows as they would be typed."""

    def __str__(self) -> str:
        return " ".join(map(str, self))


NOT_GIVEN = object()


class FlagParser(argparse.ArgumentParser):
    """argparse for many flags: dashes and underscores are the same, and only some flags may be shortened."""

    def __init__(
        self, prog: str, description: str, epilog: str, *, about: Callable[[str], str | None] = lambda key: None
    ) -> None:
        """`about` explains a word that is no flag, or gives None."""
        # Eighty flags in brackets help nobody.
        usage = f"{prog} [-h] [FLAG ...]"
        super().__init__(prog, usage, description=description, epilog=epilog, formatter_class=_Layout)
        self._in_full: set[str] = set()
        self._explain = about

    def add_flags(self, title: str, flags: Iterable[Flag], defaults: object, *, shortened: bool = False) -> None:
        """A group of flags; the default of each is the attribute of that name, a tuple becoming a list."""
        group = self.add_argument_group(title)
        for flag in flags:
            default = getattr(defaults, flag.dest)
            default = _Words(default) if isinstance(default, tuple) else default
            # Where the default is nothing, the help itself says what that means.
            shown = "" if default in (None, "", False, []) or "default" in flag.help else " (default: %(default)s)"
            group.add_argument(flag.name, *flag.also, default=default, help=flag.help + shown, **flag.settings)
            self._in_full |= set(flag.also) if shortened else {flag.name, *flag.also}

    def parse_typed(self, words: Sequence[str]) -> dict[str, Any]:
        """Only what was typed, by the names of the fields."""
        # What is given several times is appended to a list, or to nothing.
        blank = {each.dest: None if isinstance(each, argparse._AppendAction) else NOT_GIVEN for each in self._actions}
        given = vars(self.parse_args(words, argparse.Namespace(**blank)))
        return {name: value for name, value in given.items() if name != "help" and value not in (None, NOT_GIVEN)}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._about(unknown))
        return options

    # argparse's own lookups: private names, whose rows have the whole flag second in every version.
    def _parse_optional(self, arg_string: str) -> Any:
        return super()._parse_optional(self._spelled(arg_string))

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        may_be_short = [row for row in found if row[1] not in self._in_full]
        if found and not may_be_short:
            self.error(f"{option_string}: this flag is not shortened. Write {found[0][1]}.")
        return may_be_short

    def _spelled(self, word: str) -> str:
        """A flag as it is spelled here, if it is one that was typed with dashes for underscores or the other way."""
        name, equals, rest = word.partition("=")
        if name.startswith("--") and name not in self._option_string_actions:
            for other in (name[2:].replace("_", "-"), name[2:].replace("-", "_")):
                if f"--{other}" in self._option_string_actions:
                    return f"--{other}{equals}{rest}"
        return word

    def _about(self, unknown: Sequence[str]) -> str:
        """What to say about words that are no flags."""
        word = next((word for word in unknown if word.startswith("--")), unknown[0]).partition("=")[0]
        close = difflib.get_close_matches(word, self._option_string_actions, n=1)
        advice = f"Did you mean {close[0]}?" if close else "--help lists them all."
        return f"{word} is no flag. {self._explain(word.removeprefix('--')) or advice}"


class _Layout(argparse.RawDescriptionHelpFormatter):
    """One column wide enough for nearly every flag, so that most take one line or two."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
