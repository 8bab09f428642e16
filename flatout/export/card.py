"""The model card beside exported files: what they take and give, how close they are to the network, their hashes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flatout import __version__

TITLES = {
    "input_layout": "layout",
    "input_colors": "colours",
    "input_range": "values",
    "input_size_hw": "height, width",
    "input_batch": "batch",
}
"""Entries of the metadata that describe the input, and what the card calls them."""


class CardFile(NamedTuple):
    """An exported file, or a folder of files that belong together."""

    path: Path
    compared: str
    """How far its outputs are from those of the network."""


def card_text(
    name: str, *, facts: Mapping[str, str], shape_rule: str, files: Sequence[CardFile], compared_on: str
) -> str:
    """The card in Markdown; the files must exist, because their hashes are in it."""
    names = json.loads(facts["names"])
    lines = [
        f"# {name}",
        "",
        f"Exported by flatout {__version__}. {len(names)} classes: {', '.join(map(str, names))}.",
        "",
    ]
    lines += ["## Input", "", "| | |", "|---|---|"]
    lines += [f"| {title} | {facts[key]} |" for key, title in TITLES.items() if key in facts]
    lines += ["", shape_rule, "", "## Output", "", f"{facts['output']}."]
    if "nms" in facts:
        lines += ["", f"NMS is inside the ONNX file: {facts['nms']}"]
    lines += [
        "",
        "## Files",
        "",
        f"Compared with the network on {compared_on}.",
        "",
        "| file | SHA-256 | |",
        "|---|---|---|",
    ]
    for file in files:
        for path in sorted(file.path.iterdir()) if file.path.is_dir() else [file.path]:
            shown = f"{file.path.name}/{path.name}" if file.path.is_dir() else path.name
            lines.append(f"| {shown} | `{hashlib.sha256(path.read_bytes()).hexdigest()}` | {file.compared} |")
    return "\n".join(lines) + "\n"
