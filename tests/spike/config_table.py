"""Prints the configuration as a Markdown table, generated from the classes that define it.

python -m tests.spike.config_table
"""

import ast
import inspect
import textwrap
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

from flatout.spike.config import SpikeConfig


def rows(kind: type, prefix: str = "") -> list[str]:
    """A row like '| `DATA.CLIP_LEN` | 5 | Frames per clip. |' for every key; nested keys follow their section."""
    explained = _explanations(kind)
    found: list[str] = []
    for each in fields(kind):
        group = _group(each)
        default = "" if group else _default(each)
        found.append(f"| `{prefix}{each.name}` | {default} | {explained[each.name]} |")
        if group:
            found += rows(group, f"{prefix}{each.name}.")
    return found


def _group(each: "Field[Any]") -> type | None:
    """The class of a section; None for a plain key."""
    for text in str(each.type).replace("typing.", "").split(" | "):
        found = _CLASSES.get(text.rpartition(".")[2].strip("'<>"))
        if found is not None:
            return found
    return None


def _default(each: "Field[Any]") -> str:
    if each.default is MISSING:
        return "required"
    value = list(each.default) if isinstance(each.default, tuple) else each.default
    return "unset" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _explanations(kind: type) -> dict[str, str]:
    """The docstring of each field, on one line."""
    (body,) = (
        node for node in ast.parse(textwrap.dedent(inspect.getsource(kind))).body if isinstance(node, ast.ClassDef)
    )
    texts = {}
    for field_, below in zip(body.body, body.body[1:], strict=False):
        match field_, below:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                texts[name] = " ".join(text.split()).replace("|", "\\|")
    return texts


def _classes() -> dict[str, type]:
    from flatout.spike import config

    return {name: value for name, value in vars(config).items() if isinstance(value, type) and is_dataclass(value)}


_CLASSES = _classes()

if __name__ == "__main__":
    print("\n".join(["| key | default | meaning |", "|---|---|---|", *rows(SpikeConfig)]))
