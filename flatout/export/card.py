"""The model card beside exported files: what they take and give, how to open them, how close they are, their hashes."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from flatout import __version__
from flatout.safefiles import write_file


class CardFile(NamedTuple):
    """An exported file, or a folder of files that belong together."""

    path: Path
    compared: str
    """How far its outputs are from those of the network."""
    use: str
    """How to open it, and what is particular about it; Markdown, without the name of the file in front."""


def write_card(
    stem: Path,
    *,
    about: str,
    inputs: Mapping[str, str],
    input_rule: str,
    output: str,
    files: Sequence[CardFile],
    compared_on: str,
) -> Path:
    """Write `<stem>.card.md`, in Markdown; returns its path. The files must exist, because their hashes are in it.

    It may be published: folders of this machine do not belong into the texts.
    """
    lines = [f"# {stem.name}", "", f"Exported by flatout {__version__}. {about}", ""]
    lines += ["## Input", "", "| | |", "|---|---|", *(f"| {title} | {value} |" for title, value in inputs.items())]
    lines += ["", input_rule, "", "## Output", "", output, "", "## Use", ""]
    lines += [f"- `{file.path.name}`: {file.use}" for file in files]
    lines += ["", "## Files", "", f"Compared with the network on {compared_on}.", ""]
    lines += ["| file | SHA-256 | |", "|---|---|---|"]
    for file in files:
        for path in sorted(file.path.iterdir()) if file.path.is_dir() else [file.path]:
            shown = f"{file.path.name}/{path.name}" if file.path.is_dir() else path.name
            lines.append(f"| {shown} | `{hashlib.sha256(path.read_bytes()).hexdigest()}` | {file.compared} |")
    card = stem.with_name(f"{stem.name}.card.md")
    write_file(card, "\n".join(lines) + "\n")
    return card


def openvino_use(xml: str) -> str:
    """How to open an OpenVINO model, for the card."""
    return (
        f'`openvino.Core().compile_model("{xml}", "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})`. Without this '
        "setting, OpenVINO computes in bfloat16 on CPUs that can, and the outputs differ far more than below."
    )
