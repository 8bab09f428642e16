"""A network as ONNX and OpenVINO files that give its numbers, for the jobs whose network has one output.

    module, examples --traced--> ONNX model --compared--> FILE.onnx --converted, compared--> FILE_openvino/

The first axis of inputs and output is free; the model is traced with one example and compared on all of them, so that
another number is tried as well.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from flatout.errors import ParityError, ResourceError
from flatout.export.card import CardFile, openvino_use
from flatout.export.onnx_model import (
    Session,
    is_installed,
    refuse_missing,
    require_package,
    save,
    set_metadata,
    traced,
)
from flatout.export.runtimes import OpenVino, Run, save_parts

logger = logging.getLogger(__name__)

OPSET = 17
TOLERANCE = 1e-4
"""Largest difference, of outputs in 0..1, that an exported file may have from the network."""


@dataclass(frozen=True)
class Exported:
    """The exported files, and how much they differ from the network."""

    path: Path
    largest_difference: float | None
    """Largest difference of outputs in 0..1, computed by ONNX Runtime; None if that is not installed."""
    openvino: Path | None = None
    """The folder with the OpenVINO model, if one was requested."""
    openvino_difference: float | None = None
    """The same difference, computed by OpenVINO."""
    smaller: Path | None = None
    """The additional file of reduced precision, if one was requested."""
    card: Path | None = None
    """The model card that was written beside them."""

    def __str__(self) -> str:
        """One line about each file."""
        lines = []
        if self.openvino is not None:
            lines.append(f"{self.openvino}: OpenVINO, within {self.openvino_difference:.1e} of the network")
        if self.smaller is not None:
            lines.append(f"{self.smaller}: smaller, but its results differ: compare them before you use it")
        difference = self.largest_difference
        checked = "not verified" if difference is None else f"within {difference:.1e} of the network"
        lines.append(f"{self.path}: {self.path.stat().st_size / 2**20:.1f} MiB, {checked}")
        return "\n".join([*lines, f"model card: {self.card}"])

    def card_files(self) -> Iterator[CardFile]:
        """The files, for the model card."""
        run = '`onnxruntime.InferenceSession("{name}")`.'
        yield CardFile(self.path, _in_words(self.largest_difference), run.format(name=self.path.name))
        if self.openvino is not None:
            use = openvino_use(f"{self.openvino.name}/{self.path.stem}.xml")
            yield CardFile(self.openvino, _in_words(self.openvino_difference), use)
        if self.smaller is not None:
            use = f"{run.format(name=self.smaller.name)} Of reduced precision: measure its results before you use it."
            yield CardFile(self.smaller, "reduced precision, not compared", use)


def _in_words(difference: float | None) -> str:
    return "not compared" if difference is None else f"largest difference {difference:.1e} (limit {TOLERANCE:g})"


@dataclass(frozen=True)
class ComparedModel:
    """A network to export."""

    module: nn.Module
    """In evaluation mode and on the CPU."""
    examples: Mapping[str, np.ndarray]
    """Inputs by name, of at least two items."""
    output: str
    """Name of the output."""
    axis: str
    """Name of the free first axis."""
    facts: Mapping[str, str]
    """What a consumer of the model must know, for the metadata."""

    def write_onnx(self, path: Path) -> Exported:
        """Write the ONNX file; if ONNX Runtime is installed, its results are compared first."""
        refuse_missing("onnx")
        model = traced(
            self.module,
            {name: torch.from_numpy(each[:1]) for name, each in self.examples.items()},
            output_names=[self.output],
            free_axes={name: {0: self.axis} for name in (*self.examples, self.output)},
            opset=OPSET,
        )
        set_metadata(model, self.facts)
        difference = None
        if is_installed("onnxruntime"):
            difference = self._compared(Session(model), path)
        else:
            logger.warning(
                "%s was not verified, because onnxruntime is not installed: pip install onnxruntime, and export again.",
                path,
            )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(f"{path}: cannot be written: {error.strerror}. Choose another folder.") from None
        save(model, path)
        return Exported(path, difference)

    def write_openvino(self, done: Exported) -> Exported:
        """Convert the file that `write_onnx` wrote to `<stem>_openvino/<stem>.xml` and `.bin` beside it."""
        stem = done.path.stem
        runtime = OpenVino(require_package("onnx").load(str(done.path)))
        folder = done.path.with_name(f"{stem}_openvino")
        difference = self._compared(runtime, folder)
        save_parts(folder, stem, {**runtime.files(), ".json": json.dumps(dict(self.facts), indent=1).encode()})
        return replace(done, openvino=folder, openvino_difference=difference)

    def _compared(self, run: Run, path: Path) -> float:
        """Largest difference of a loaded model from the network; ParityError that names `path` if it is too large."""
        found = run(self.examples)[self.output]
        with torch.inference_mode():
            expected = self.module(*map(torch.from_numpy, self.examples.values())).numpy()
        difference = float(np.abs(found - expected).max())
        if not difference <= TOLERANCE:
            raise ParityError(
                f"{path}: the exported model differs from the network by {difference:.1e}, more than {TOLERANCE:g}, so "
                "nothing was written. Please report it."
            )
        return difference
