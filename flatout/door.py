"""A door with a table of commands, of which only the one that is named is imported."""

import argparse
import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from flatout.errors import ConfigError


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
