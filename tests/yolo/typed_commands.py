"""The commands that users of YOLOv7 type, from the golden list, parsed without flatout's parser.

Used to parse them (test_commands.py) and to run them (test_compat_commands.py).
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

BUILT = {
    "train.py": "train",
    "train_aux.py": "train",
    "test.py": "test",
    "detect.py": "detect",
    "export.py": "export",
}
"""Script -> command of `flatout yolo`."""
SECTIONS = {"seed_commands", "other_commands", "seed_new_flags", "seed_env"}


class Typed(NamedTuple):
    """One command of the list."""

    id: str
    text: str
    script: str
    """Empty for `python -c`."""
    words: list[str]
    env: Mapping[str, str]
    must: str

    def searched_for(self) -> str:
        """The word that `... | grep WORD` searches for in the output."""
        return shlex.split(self.text.rpartition("grep")[2])[-1]


def take_apart(record: Mapping[str, Any]) -> Typed:
    """Parse a record: the arguments without `time`, variables, the interpreter and anything after a pipe."""
    words = shlex.split(record["cmd"])
    words = words[: words.index("|")] if "|" in words else words
    while words[0] == "time" or "=" in words[0]:
        words.pop(0)
    assert words[0] in ("python", "python3"), record["cmd"]
    script = "" if words[1] == "-c" else words[1]
    assert script in ("", *BUILT), f"unknown script in {record['cmd']}"
    return Typed(record["id"], record["cmd"], script, words[2:], record.get("env", {}), record.get("must", ""))


def commands(path: Path) -> Iterator[tuple[str, Typed]]:
    """Every command of the golden file with its id."""
    content = json.loads(path.read_text())
    assert content.keys() <= SECTIONS, f"unknown sections {sorted(content.keys() - SECTIONS)} in {path}"
    for section in ("seed_commands", "other_commands"):
        for record in content.get(section, []):
            yield record["id"], take_apart(record)


def typed_values(words: Sequence[str], flags: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The values that a command sets, by the golden table of flags: destination -> value."""
    kinds = {"int": int, "float": float, "str": str}
    values: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not word.startswith("--"):
            continue
        meant = [flag for flag in flags if flag["flag"] == word] or [f for f in flags if f["flag"].startswith(word)]
        assert len(meant) == 1, f"{word} could be {[flag['flag'] for flag in meant]}"
        (flag,) = meant
        rest = list(words[position + 1 :])
        given = rest[: next((number for number, text in enumerate(rest) if text.startswith("--")), len(rest))]
        if flag["kind"] == "switch":
            values[flag["dest"]] = True
        elif flag["nargs"] == "+":
            values[flag["dest"]] = [kinds[flag["type"]](text) for text in given]
        else:
            values[flag["dest"]] = kinds[flag["type"]](given[0])
    return values
