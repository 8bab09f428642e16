"""`--update`: write weights again without the state of their training."""

from collections.abc import Sequence
from pathlib import Path

from flatout.engine.run_folder import read_record
from flatout.yolo.convert import only_network
from flatout.yolo.weights import read_weights, save_weights


def strip_weights(paths: Sequence[str]) -> list[str]:
    """Strip files of ours in place, whole or not at all; others are left as they are. What was done, a line each."""
    lines = []
    for path in paths:
        weights = read_weights(path)
        if weights.format != "flatout":
            lines.append(f"--update: {path} is no file of flatout, and is left as it is. See: flatout yolo convert")
        elif _is_in_use(path):
            lines.append(f"--update: {path} is left as it is: its training is not finished, and continues from it")
        elif weights.kind == "full":
            save_weights(path, only_network(weights, None, path))
            lines.append(f"--update: {path} no longer holds the state of its training")
        else:
            lines.append(f"--update: {path} holds nothing but the network already")
    return lines


def _is_in_use(path: str) -> bool:
    record = read_record(Path(path).absolute().parent.parent)
    return record is not None and not record.get("finished")
