"""Models for other runtimes than ONNX Runtime: OpenVINO and ncnn, built, run for comparison, and written.

Each has the interface of `Session`: arrays in, arrays out by name. So a job compares them as it compares an ONNX model.
TensorRT builds its engines on the GPU that will run them; `TENSORRT_COMMAND` is what to type there.
"""

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from flatout.errors import ConfigError
from flatout.export.onnx_model import Model, quiet_tracing, require_package
from flatout.safefiles import write_file

TENSORRT_COMMAND = "trtexec --onnx={onnx} --saveEngine={engine} --fp16"
"""Turns an ONNX file into an engine, on the machine that will run it. Not run in the tests of this project."""

Run = Callable[[Mapping[str, np.ndarray]], dict[str, np.ndarray]]
"""A loaded model: arrays in, arrays out by name."""


class OpenVino:
    """An ONNX model converted to OpenVINO and compiled for the CPU."""

    def __init__(self, model: Model, *, threads: int = 0) -> None:
        """With 0 threads, OpenVINO chooses their number."""
        openvino = require_package("openvino")
        core = openvino.Core()
        self._openvino, self._model = openvino, core.read_model(model=model.SerializeToString())
        # Its default precision on some CPUs is bf16, which is another network.
        settings = {"INFERENCE_PRECISION_HINT": "f32"} | ({"INFERENCE_NUM_THREADS": threads} if threads else {})
        self._compiled = core.compile_model(self._model, "CPU", settings)
        self._names = [output.name for output in model.graph.output]

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        # In the order of the ONNX model; OpenVINO may know an output by the name of a node inside as well.
        found = self._compiled(dict(inputs)).values()
        return {name: np.array(value) for name, value in zip(self._names, found, strict=True)}

    def files(self) -> dict[str, bytes]:
        """The content of the two files of the model, by ending; weights in float32."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.xml")
            self._openvino.save_model(self._model, str(path), compress_to_fp16=False)
            return {ending: path.with_suffix(ending).read_bytes() for ending in (".xml", ".bin")}


class Ncnn:
    """A torch module converted to ncnn by pnnx; its input has a fixed size and a batch of 1."""

    def __init__(
        self, module: nn.Module, example: Tensor, *, input_name: str, output_names: Sequence[str], threads: int = 0
    ) -> None:
        """`module` is in evaluation mode and on the CPU; its outputs are called `output_names`, in their order."""
        if len(example) != 1:
            raise ConfigError("ncnn has no batches: export with --batch-size 1.")
        ncnn, pnnx = require_package("ncnn"), require_package("pnnx")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "model.pt")
            with torch.no_grad(), quiet_tracing():
                torch.jit.trace(module, example, strict=False, check_trace=False).save(str(path))
            shape = ",".join(map(str, example.shape))
            # fp16=0: the same numbers as the network; ncnn itself reduces the precision when it is asked to.
            command = [str(pnnx.EXEC_PATH), str(path), f"inputshape=[{shape}]", "fp16=0"]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            parts = [path.with_name(f"model.ncnn{ending}") for ending in (".param", ".bin")]
            if done.returncode or not all(part.exists() for part in parts):
                last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
                raise ConfigError(f"pnnx could not convert this network to ncnn: {''.join(last)}")
            self._files = {".param": parts[0].read_bytes(), ".bin": parts[1].read_bytes()}
            self._net = ncnn.Net()
            self._net.opt.num_threads = threads or torch.get_num_threads()
            self._net.opt.use_fp16_packed = self._net.opt.use_fp16_storage = self._net.opt.use_fp16_arithmetic = False
            self._net.load_param(str(parts[0]))
            self._net.load_model(str(parts[1]))
        self._ncnn, self._input, self._names = ncnn, input_name, list(output_names)

    def __call__(self, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Images one by one, since ncnn has no batches; outputs are put together again."""
        found = [self._run_one(image) for image in inputs[self._input]]
        return {name: np.stack([each[name] for each in found]) for name in self._names}

    def files(self) -> dict[str, bytes]:
        """The content of the two files of the model, by ending."""
        return self._files

    def _run_one(self, image: np.ndarray) -> dict[str, np.ndarray]:
        extractor = self._net.create_extractor()
        extractor.input("in0", self._ncnn.Mat(np.ascontiguousarray(image)))
        outputs: dict[str, np.ndarray] = {}
        for number, name in enumerate(self._names):
            code, found = extractor.extract(f"out{number}")
            if code:
                raise ConfigError(f"ncnn could not compute {name} of the converted network (code {code}).")
            outputs[name] = np.array(found)
        return outputs


def save_parts(folder: Path, stem: str, parts: Mapping[str, bytes]) -> int:
    """Write the files of a model into a folder, each completely or not at all; returns their size in bytes."""
    folder.mkdir(exist_ok=True)
    for ending, content in parts.items():
        write_file(folder / f"{stem}{ending}", content)
    return sum(map(len, parts.values()))
