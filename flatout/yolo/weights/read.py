"""The front door: weights from any file, told apart by content."""

from pathlib import Path

from flatout.engine.checkpoint.container import is_container, sections_of
from flatout.engine.checkpoint.opening import file_kind, reading
from flatout.engine.checkpoint.torch_file import read_objects
from flatout.yolo.compat.legacy_names import legacy_vocabulary
from flatout.yolo.weights.legacy import weights_from_legacy
from flatout.yolo.weights.own import weights_from
from flatout.yolo.weights.safetensors_file import weights_from_safetensors
from flatout.yolo.weights.weights import Weights


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
