"""The front door: weights from any file, told apart by content."""

from pathlib import Path

from flatout.safefiles import file_kind, is_container, read_objects, reading, sections_of
from flatout.yolo.weights.legacy import legacy_vocabulary, weights_from_legacy
from flatout.yolo.weights.safetensors_file import weights_from_safetensors
from flatout.yolo.weights.weights import Weights, weights_from


def read_weights(path: str | Path) -> Weights:
    """The weights in a legacy .pt, a .pt of ours or a safetensors file, on the CPU, as stored.

    Nothing in the file is run, whoever wrote it. CheckpointError says in one line why a file is not read.
    """
    with reading(path) as file:
        if file_kind(file) == "safetensors":
            return weights_from_safetensors(file)
        # A file that claims to be ours is read with the same suspicion; placeholders do not pass as plain data.
        objects = read_objects(file, legacy_vocabulary)
        return weights_from(sections_of(objects)) if is_container(objects) else weights_from_legacy(objects)
