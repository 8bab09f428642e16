"""A flag in a table, and the parser that knows which flags may be shortened."""

import argparse
import difflib
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

from flatout.yaml_strict import load_yaml
from flatout.yolo.find_file import shipped_folder


class Flag(NamedTuple):
    """One row: how argparse reads it, all but its default."""

    name: str
    help: str
    also: tuple[str, ...]
    """Further spellings, never shortened."""
    settings: dict[str, Any]
    """Keywords of argparse's add_argument."""

    @property
    def dest(self) -> str:
        return self.name.removeprefix("--").replace("-", "_")


def switch(name: str, help: str) -> Flag:
    """Off unless it is there."""
    return Flag(name, help, (), {"action": "store_true"})


def value(name: str, help: str, *, type: Callable[[str], Any] = str, also: str = "", **settings: Any) -> Flag:
    """Takes a value, or several with `nargs`."""
    return Flag(name, help, (also,) if also else (), {"type": type, **settings})


class _Words(list[Any]):
    """A default of several words, which help shows as they would be typed."""

    def __str__(self) -> str:
        return " ".join(map(str, self))


class FlagParser(argparse.ArgumentParser):
    """argparse, where flags that YOLOv7 does not have are no reason to call a shortened one ambiguous."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        # Eighty flags in brackets help nobody.
        usage = f"{prog} [-h] [FLAG ...]"
        super().__init__(prog, usage, description=description, epilog=epilog, formatter_class=_Layout)
        self._in_full: set[str] = set()

    def add_flags(self, title: str, flags: Iterable[Flag], defaults: object, *, shortened: bool) -> None:
        """A group of flags; the default of each is the attribute of that name, a tuple becoming a list."""
        group = self.add_argument_group(title)
        for flag in flags:
            default = getattr(defaults, flag.dest)
            default = _Words(default) if isinstance(default, tuple) else default
            # Where the default is nothing, the help itself says what that means.
            shown = "" if default in (None, "", False) or "default" in flag.help else " (default: %(default)s)"
            group.add_argument(flag.name, *flag.also, default=default, help=flag.help + shown, **flag.settings)
            self._in_full |= set(flag.also) if shortened else {flag.name, *flag.also}

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(self._about(unknown))
        return options

    # argparse's own lookup of shortened flags: a private name, whose rows have the whole flag second in every version.
    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        may_be_short = [row for row in found if row[1] not in self._in_full]
        if found and not may_be_short:
            self.error(f"{option_string}: this flag is not shortened. Write {found[0][1]}.")
        return may_be_short

    def _about(self, unknown: Sequence[str]) -> str:
        """What to say about words that are no flags."""
        word = next((word for word in unknown if word.startswith("--")), unknown[0]).partition("=")[0]
        close = difflib.get_close_matches(word, self._option_string_actions, n=1)
        advice = f"Did you mean {close[0]}?" if close else "--help lists them all."
        key = word.removeprefix("--")
        if "--hyp" in self._option_string_actions and key in _keys_of_hyp_files():
            advice = f"{key} is a key of the hyp file: change it there, and name the file with --hyp."
        return f"{word} is no flag. {advice}"


def _keys_of_hyp_files() -> Container[object]:
    # From a file, because the class that knows them imports torch.
    keys = load_yaml(shipped_folder("data") / "hyp.scratch.p5.yaml")
    return keys if isinstance(keys, dict) else ()


class _Layout(argparse.RawDescriptionHelpFormatter):
    """One column wide enough for nearly every flag, so that most take one line or two."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32)
