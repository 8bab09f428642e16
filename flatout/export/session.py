"""An ONNX model run by ONNX Runtime on the CPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from flatout.export.packages import need


class Session:
    """A loaded model: arrays in, arrays out by name."""

    def __init__(self, model: Any, *, threads: int = 0) -> None:
        """`model` is an onnx.ModelProto or the path of a file; 0 threads leaves the number to ONNX Runtime."""
        onnxruntime = need("onnxruntime")
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        settings.log_severity_level = 3
        source = model.SerializeToString() if hasattr(model, "SerializeToString") else str(model)
        self._session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        found = self._session.run(None, dict(inputs))
        return dict(zip(self._outputs, found, strict=True))
