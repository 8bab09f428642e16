"""The help of a job's commands as a text that does not depend on the layout of a Python version."""

import argparse
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from unittest.mock import patch

from flatout.__main__ import main

REPEATS: dict[str | int | None, str] = {None: "", "?": "(optional)", "*": "(any number)", "+": "(one or more)"}
"""Text for each value of `nargs`."""


def help_of(job: str) -> str:
    """The help of a job, then that of each of its commands."""
    commands = import_module(f"flatout.{job}.cli").COMMANDS
    return "\n\n".join(_described(_parser_of([job, *words])) for words in ((), *((name,) for name in commands))) + "\n"


def _parser_of(words: list[str]) -> argparse.ArgumentParser:
    """The parser that prints `flatout WORDS --help`, captured when it formats its help."""
    captured: list[argparse.ArgumentParser] = []

    def capture(parser: argparse.ArgumentParser) -> str:
        captured.append(parser)
        return ""

    with patch.object(argparse.ArgumentParser, "format_help", capture), suppress(SystemExit):
        main([*words, "--help"])
    return captured[-1]


def _described(parser: argparse.ArgumentParser) -> str:
    head = f"==== {parser.prog}{'' if parser.allow_abbrev else '  (no abbreviations)'}"
    return "\n".join([head, *_lines(parser)])


def _lines(parser: argparse.ArgumentParser) -> Iterator[str]:
    if parser.usage:
        yield f"usage: {' '.join(parser.usage.split())}"
    yield from (parser.description or "").strip().splitlines()
    for group in parser._action_groups:
        if group._group_actions:
            yield ""
            yield f"{group.title}:"
            if group.description:
                yield f"  {group.description}"
        for action in group._group_actions:
            yield from _flag(action, parser)
    if parser.epilog:
        yield ""
        yield from parser.epilog.replace("%(prog)s", parser.prog).strip().splitlines()


def _flag(action: argparse.Action, parser: argparse.ArgumentParser) -> Iterator[str]:
    yield " ".join(filter(None, (f"  {', '.join(action.option_strings) or action.dest}", *_values(action))))
    if action.help == argparse.SUPPRESS:
        yield "      (hidden)"
    elif action.help:
        known = {name: value for name, value in vars(action).items() if value is not argparse.SUPPRESS}
        known |= {"prog": parser.prog}
        if action.choices is not None:
            known["choices"] = ", ".join(map(str, action.choices))
        yield f"      {' '.join((action.help % known).split())}"


def _values(action: argparse.Action) -> Iterator[str]:
    """The values of a flag, whether it is required, and its default."""
    if action.nargs != 0:
        yield _placeholder(action)
        yield REPEATS.get(action.nargs, f"({action.nargs} of them)")
        if action.choices and action.metavar:
            yield f"of {', '.join(map(str, action.choices))}"
    if action.required and action.option_strings:
        yield "(required)"
    if not any(action.default is nothing for nothing in (None, False, argparse.SUPPRESS)):
        yield f"[{_plain(action.default)}]"


def _placeholder(action: argparse.Action) -> str:
    if action.metavar:
        return action.metavar if isinstance(action.metavar, str) else " ".join(action.metavar)
    if action.choices:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else ""


def _plain(default: object) -> str:
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
