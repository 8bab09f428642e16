"""A network as a TorchScript file: raw maps or decoded boxes, weights folded, compared with the network."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatout.engine.checkpoint.atomic import replacing
from flatout.export.onnx_model import quiet_tracing
from flatout.yolo.export.forms import DecodedBoxes, Judged, RawLevels
from flatout.yolo.export.parity import Difference, largest, of_decoded, of_raw
from flatout.yolo.model.network import Network

FACTS_FILE = "config.txt"
"""Inside the file: JSON, to be read with `_extra_files` of torch.jit.load."""


@torch.no_grad()
def scripted(network: Network, example: Tensor, facts: Mapping[str, str], *, grid: bool) -> bytes:
    """The content of a TorchScript file; the network is folded, in evaluation mode and on the CPU."""
    form: nn.Module = DecodedBoxes(network) if grid else RawLevels(network)
    with quiet_tracing():
        # Frozen: what only training needs would else stay in the file, with an auxiliary head a tenth of it.
        # Not checked by torch itself: `compared` does it on other inputs.
        frozen = torch.jit.freeze(torch.jit.trace(form.eval(), example, strict=False, check_trace=False))
        content = io.BytesIO()
        torch.jit.save(frozen, content, _extra_files={FACTS_FILE: json.dumps(dict(facts))})
    return content.getvalue()


def loaded(content: bytes) -> Any:
    """The module that a TorchScript file holds, on the CPU."""
    with quiet_tracing():
        return torch.jit.load(io.BytesIO(content), map_location="cpu")


@torch.no_grad()
def compared(content: bytes, judged: Iterable[Judged], *, grid: bool) -> Difference:
    """How far the file is from the network."""
    module = loaded(content)
    return largest(_difference(module, each, grid=grid) for each in judged)


def save(content: bytes, path: Path) -> int:
    """The file, whole or not at all; returns its bytes."""
    with replacing(path, needed_bytes=len(content)) as sink:
        sink.write(content)
    return len(content)


def _difference(module: Any, judged: Judged, *, grid: bool) -> Difference:
    found = module(torch.from_numpy(judged.images))
    if grid:
        return of_decoded(found.numpy(), judged.decoded)
    return largest(of_raw(level.numpy(), expected) for level, expected in zip(found, judged.raw, strict=True))
