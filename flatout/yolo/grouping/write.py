"""A grouping as a head configuration: YAML that `--head-config` takes."""

import json
from pathlib import Path

from flatout.engine.checkpoint.atomic import replacing
from flatout.yolo.grouping.groups import Grouping

LINE = 112
"""Longer lists of classes are broken."""


def write_grouping(grouping: Grouping, path: Path, *, generated_by: str) -> Path:
    """Whole or not at all."""
    content = as_yaml(grouping, generated_by=generated_by).encode()
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
    return path


def as_yaml(grouping: Grouping, *, generated_by: str) -> str:
    """The keys of the head configuration in the order in which people read them."""
    config = grouping.config
    lines = [
        f"nc: {config.nc}",
        f"heads: {config.num_heads}",
        f"grouping: {config.grouping}",
        f"generated_by: {_quoted(generated_by)}",
        "",
        "head_assignments:",
    ]
    for number, (head, comment) in enumerate(zip(config.heads, grouping.comments, strict=True)):
        lines += [f"  head_{number}:", f"    name: {_quoted(head.name)}", *_listed(head.classes)]
        lines += [f"    weight: {head.weight}"]
        lines += [f"    comment: {_quoted(comment)}"] if comment else []
    return "\n".join(lines) + "\n"


def _listed(classes: tuple[int, ...]) -> list[str]:
    whole = f"    classes: [{', '.join(map(str, classes))}]"
    if len(whole) <= LINE:
        return [whole]
    lines, line = ["    classes: ["], "     "
    for place, number in enumerate(classes):
        word = f" {number}" if place == len(classes) - 1 else f" {number},"
        if len(line) + len(word) > LINE:
            lines.append(line)
            line = "     "
        line += word
    return [*lines, line, "    ]"]


def _quoted(text: str) -> str:
    # JSON's quotes are YAML's, and keep colons and hashes text.
    return json.dumps(text, ensure_ascii=False)
