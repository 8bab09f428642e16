"""Weights in files of ours: the section "weights" of a container."""

from dataclasses import fields
from pathlib import Path

from flatout.engine.checkpoint.container import write_container
from flatout.engine.checkpoint.refusal import Refusal
from flatout.yolo.weights.weights import Weights, checked_state, checked_weights

SECTION = "weights"


def save_weights(path: str | Path, weights: Weights) -> None:
    """Write weights in our own format, whole or not at all; ResourceError if the disk cannot take them."""
    write_container(path, {SECTION: section_of(weights)})


def section_of(weights: Weights) -> dict[str, object]:
    """What a container keeps of weights; the format is the container's."""
    return {field.name: getattr(weights, field.name) for field in fields(weights) if field.name != "format"}


def weights_from(sections: dict[str, object]) -> Weights:
    """The weights of a container; a Refusal says what is wrong with them."""
    section = sections.get(SECTION)
    if not isinstance(section, dict):
        raise Refusal("is a file of flatout without weights. Give one with weights.")
    state = checked_state(section.get("state"), "state")
    ema = section.get("ema")
    return checked_weights(
        state, None if ema is None else checked_state(ema, "ema"), section, str(section.get("kind")), "flatout"
    )
