"""Which layers of a training step are slowest compared with what the hardware needs?

The operations of a step are recorded while the network runs once as in training (bf16, channels_last, our kernels).
Each distinct one is then timed alone, pass by pass (forward; backward, for convolutions split into dgrad for the input
and wgrad for the weights), on alternating inputs, so that they do not come from the L2 cache. It is compared with its
roofline: the longer of bytes / bandwidth and FLOPs / rate, with every input read once and every output written once,
and with the bandwidth of a copy and the rate of a bf16 matrix product measured in the same run. "floor now" counts the
passes of our current kernels (a batch norm reads its map twice). In a real step small maps may still be in the L2
cache, while here they are read from memory, so the sum can exceed the step.

For the convolutions with the largest gaps, cheap alternatives to cuDNN's choice are timed. Padded channels are taken as
given: the copy that pads is not included. `every engine` lets cudnn.benchmark try all engines of cuDNN instead of ten.

The run ends after --seconds (operations that were not reached are counted), and --out keeps partial results.
Answer: bench/results/layer_roofline_<machine>_<yyyymm>.md (rewritten with --write).
"""

import gc
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from math import ceil, prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bench.measure import Timing, arguments, facts, facts_line, measure, report, summarize
from bench.model_step import CASES, Case, make_step
from flatout.yolo.model import convolutions, layers
from flatout.yolo.model import network as network_module
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.convolutions import convolve, predict
from flatout.yolo.model.copies import concat, double, forked
from flatout.yolo.model.fused import norm_act
from flatout.yolo.model.layers import Detect, IDetect
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.model.pooling import max_pool, max_pool_same

Shape = tuple[int, ...]
Call = Callable[[], object]

DTYPE = torch.bfloat16
BYTES = DTYPE.itemsize
TOP_CONVOLUTIONS = 12
TABLE_ROWS = 40
OPERATIONS_SHARE = 0.6
"""Fraction of a case's time for its operations; the rest is for alternatives."""
REPEATS, REPEAT_MS = 5, 4.0
MAX_SETS = 24
SPIN_HZ = 2e9
"""Approximate clock of a GPU, for the wait that lets the host get ahead; its length is not critical."""


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name contains one of these: 'yolov7 640'")
    parser.add_argument("--seconds", type=float, default=150.0, help="time for the whole run (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for partial results ($OUT)")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        print("bench/layer_roofline.py needs a GPU, and this machine has none; --quick shows that the script works.")
        return 0
    torch.backends.cudnn.benchmark = True
    print(facts_line(), flush=True)
    cases = [case for case in CASES[:4] if any(pattern in str(case) for pattern in options.only)]
    if options.quick:
        cases = list({case.name: case._replace(side_px=64, batch=2) for case in cases}.values())
    end = time.monotonic() + options.seconds
    timer = Timer(device, repeats=1 if options.quick else REPEATS)
    results = Results(Path(options.out) if options.out else None, measure_ceilings(timer))
    print(results.ceilings.text(), flush=True)
    for number, case in enumerate(cases):
        now = time.monotonic()
        measure_case(case, timer, results, end_s=now + (end - now) / (len(cases) - number))
    report("layer_roofline", results.text(), results.numbers(), options)
    return 0


# The operations of a step


@dataclass(frozen=True)
class Operation:
    """One call of a layer, with everything that its duration depends on: equal operations are timed once."""

    kind: str
    what: str
    inputs: tuple[Shape, ...]
    output: Shape
    settings: tuple[Any, ...] = ()
    """What is needed to run it, besides the shapes."""
    gradient_channels: int = 0
    """If not 0, the gradient of the output is a slice of a map with this many channels, as before a concatenation."""
    learns_input: bool = True
    """Whether the gradient of its input is needed."""

    def text(self) -> str:
        sliced = f" dz of {self.gradient_channels}" if self.gradient_channels else ""
        what = f"{self.kind} {self.what}".strip()
        return f"{what} {_shape_text(self.inputs[0])}>{_shape_text(self.output[1:])}{sliced}"


class ConvSettings(NamedTuple):
    weight: Shape
    has_bias: bool
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int


class Recorded(NamedTuple):
    """A recorded operation, with the maps it read and wrote."""

    operation: Operation
    read: list[Tensor]
    wrote: Tensor | None


class Recorder(TorchFunctionMode):
    """Records the operations of a forward pass. Keeps all maps alive, because they are recognised by identity."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Recorded] = []
        self._is_inside = False

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        describe = DESCRIPTIONS.get(getattr(func, "__name__", ""))
        if describe is not None and not self._is_inside:
            self._note(describe, result, *args, **(kwargs or {}))
        return result

    def noting(self, function: Callable[..., Any], describe: Callable[..., Operation]) -> Callable[..., Any]:
        """The function, recorded as one operation without the operations inside."""

        def noted(*args: Any) -> Any:
            outside, self._is_inside = self._is_inside, True
            try:
                result = function(*args)
            finally:
                self._is_inside = outside
            if not outside:
                self._note(describe, result, *args)
            return result

        return noted

    def _note(self, describe: Callable[..., Operation], result: Any, *args: Any, **kwargs: Any) -> None:
        first = args[0] if args else None
        read = [each for each in (first if isinstance(first, list | tuple) else [first]) if isinstance(each, Tensor)]
        operation = describe(result, *args, **kwargs)
        if describe is _max_pool_same and len(args) > 2 and isinstance(args[2], Tensor):
            read = [args[2]]
        if operation.kind == "add":
            read = [each for each in args[:2] if isinstance(each, Tensor)]
        if read:
            operation = replace(operation, learns_input=any(each.requires_grad for each in read))
        self.calls.append(Recorded(operation, read, result if isinstance(result, Tensor) else None))


def record(network: Network, images: Tensor) -> Counter[Operation]:
    """The operations of a training step, and how often each occurs."""
    recorder = Recorder()
    head = network.head
    norm, convolution = recorder.noting(norm_act, _norm_act), recorder.noting(convolve, _convolve)
    with (
        mock.patch.object(layers, "norm_act", norm),
        # Apart, although our kernels compute the gradients of the first convolution and its norm together.
        mock.patch.object(layers, "conv_norm_act", lambda x, conv, *rest: norm(convolution(x, conv), *rest)),
        mock.patch.object(layers, "max_pool", recorder.noting(max_pool, _max_pool)),
        mock.patch.object(layers, "max_pool_same", recorder.noting(max_pool_same, _max_pool_same)),
        mock.patch.object(layers, "predict", recorder.noting(predict, _predict)),
        mock.patch.object(layers, "concat", recorder.noting(concat, _cat)),
        mock.patch.object(layers, "double", recorder.noting(double, _interpolate)),
        # Maps are recognised by identity; sums of their gradients follow from the number of readers.
        mock.patch.object(network_module, "forked", lambda x, num: [x] * num),
        mock.patch.object(
            head, "folded_weights", recorder.noting(head.folded_weights, lambda result, level: _folded(head, level))
        ),
        mock.patch.object(
            head, "split_outputs", recorder.noting(head.split_outputs, lambda result, x: _loss(head, tuple(x.shape)))
        ),
        torch.autocast(images.device.type, DTYPE),
        recorder,
    ):
        network(images)
    operations = Counter(with_gradients(recorder.calls))
    weights = tuple(each.weight for each in network._convolutions)
    num_values = sum(map(Tensor.numel, network.parameters()))
    num_cast = sum(map(Tensor.numel, weights))
    operations[Operation("weight casts", "", ((num_cast,),), (1, num_cast), (weights,))] += 1
    parameters = tuple(network.parameters())
    operations[Operation("optimizer", "SGD", ((num_values,),), (1, num_values), (parameters,))] += 1
    return operations


def with_gradients(calls: Sequence[Recorded]) -> Iterator[Operation]:
    """The recorded operations with the layout of their gradients, and gradient sums of maps with several readers."""
    readers: dict[int, list[Operation]] = defaultdict(list)
    for call in calls:
        for tensor in call.read:
            readers[id(tensor)].append(call.operation)
    for call in calls:
        widths = [_gradient_width(each) for each in readers[id(call.wrote)]] if call.wrote is not None else []
        yield replace(call.operation, gradient_channels=widths[0] if len(widths) == 1 else 0)
        if len(widths) > 1:
            shape = call.operation.output
            yield Operation("gradient sum", _sum_text(widths), (shape,) * len(widths), shape, tuple(sorted(widths)))


def _sum_text(widths: Sequence[int]) -> str:
    num_slices = sum(map(bool, widths))
    return f"of {len(widths)}" + (f" ({num_slices} sliced)" if num_slices else "")


def _gradient_width(reader: Operation) -> int:
    return reader.output[1] if reader.kind == "concat" else 0


def _shapes(xs: Sequence[Tensor]) -> tuple[Shape, ...]:
    return tuple(tuple(each.shape) for each in xs)


def _conv2d(
    y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Operation:
    settings = ConvSettings(
        tuple(weight.shape), bias is not None, _pair(stride), _pair(padding), _pair(dilation), groups
    )
    return _conv_operation(tuple(x.shape), tuple(y.shape), settings)


def _conv_operation(x: Shape, y: Shape, settings: ConvSettings) -> Operation:
    high, wide = settings.weight[2:]
    strided = f"/{settings.stride[0]}" if settings.stride[0] > 1 else ""
    bias = " + bias" if settings.has_bias else ""
    return Operation("convolution", f"{high}x{wide}{strided}{bias}", (x,), y, settings)


def _pair(value: Any) -> Shape:
    return (value, value) if isinstance(value, int) else tuple(value)


def _convolve(y: Tensor, x: Tensor, conv: nn.Conv2d) -> Operation:
    operation = _conv2d(y, x, conv.weight, None, conv.stride, conv.padding, conv.dilation, conv.groups)
    return replace(operation, kind="stem") if x.is_cuda and convolutions._is_stem(conv) else operation


def _predict(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Operation:
    operation = _conv2d(y, x, weight, bias)
    return replace(operation, kind="predictions") if x.is_cuda and weight.shape[0] % 8 else operation


def _norm_act(z: Tensor, x: Tensor, norm: nn.Module, act: nn.Module) -> Operation:
    slope = float(getattr(act, "negative_slope", 0.0))
    return Operation("norm + act", type(act).__name__, _shapes([x]), tuple(z.shape), (type(act).__name__, slope))


def _max_pool(z: Tensor, x: Tensor, k: int) -> Operation:
    return Operation("max-pool", f"{k}x{k}/{k}", _shapes([x]), tuple(z.shape), (k, False))


def _max_pool_same(z: Tensor, x: Tensor, k: int, narrower: Tensor | None = None, narrower_k: int = 1) -> Operation:
    """With `narrower` as our kernels compute it: a pooling of that map with the kernel that is left."""
    left_k = k - narrower_k + 1
    return Operation("max-pool", f"{left_k}x{left_k}", _shapes([x]), tuple(z.shape), (left_k, True))


def _cat(z: Tensor, xs: Sequence[Tensor], *_: Any) -> Operation:
    return Operation("concat", f"of {len(xs)}", _shapes(xs), tuple(z.shape))


def _interpolate(z: Tensor, x: Tensor, *_: Any, **__: Any) -> Operation:
    return Operation("upsample", f"x{z.shape[2] // x.shape[2]}", _shapes([x]), tuple(z.shape))


def _add(z: Tensor, x: Tensor, y: Any, **_: Any) -> Operation:
    return Operation("add", "", _shapes([x, y]), tuple(z.shape))


def _activation(z: Tensor, x: Tensor, *_: Any, **__: Any) -> Operation:
    return Operation("activation", "SiLU", _shapes([x]), tuple(z.shape))


def _folded(head: Detect, level: int) -> Operation:
    weight = head.m[level].weight
    assert isinstance(weight, Tensor)
    return Operation("implicit", f"level {level}", _shapes([weight]), tuple(weight.shape), (head, level))


def _loss(head: Detect, shape: Shape) -> Operation:
    return Operation("loss = mean", "", (shape,), shape, (head,))


DESCRIPTIONS: dict[str, Callable[..., Operation]] = {
    "conv2d": _conv2d,
    "cat": _cat,
    "interpolate": _interpolate,
    "add": _add,
    "silu": _activation,
}
"""Functions of torch that the networks call outside of our own, by name."""


# Running an operation alone


@dataclass
class Pass:
    """One direction of an operation, with its bytes and FLOPs."""

    name: str
    bytes_once: int
    """With every input read once and every output written once."""
    prepare: Callable[[], Call]
    """Creates new inputs and returns a call that works on them."""
    flops: int = 0
    bytes_now: int = 0
    """Bytes that the current kernels move, if that is more."""

    def __post_init__(self) -> None:
        self.bytes_now = self.bytes_now or self.bytes_once


def a_map(device: str, shape: Shape, wide: int = 0, *, channels_last: bool = True) -> Tensor:
    """A map of random values; with `wide`, a slice of a map with that many channels."""
    batch, channels, height, width = shape
    if not channels_last:
        return torch.randn(shape, dtype=DTYPE, device=device)
    values = torch.randn((batch, height, width, max(wide, channels)), dtype=DTYPE, device=device)
    return values.permute(0, 3, 1, 2)[:, :channels]


def passes_of(operation: Operation, device: str) -> list[Pass]:
    return PASSES[operation.kind](operation, device)


def conv_passes(operation: Operation, device: str, *, channels_last: bool = True) -> list[Pass]:
    (x_shape,), y_shape, settings = operation.inputs, operation.output, ConvSettings(*operation.settings)
    x_bytes, y_bytes, weight_bytes = (BYTES * prod(each) for each in (x_shape, y_shape, settings.weight))
    flops = 2 * prod(y_shape) * prod(settings.weight[1:])
    where = (settings.stride, settings.padding, settings.dilation)
    bias_sizes = [settings.weight[0]] if settings.has_bias else None

    def new_map(shape: Shape) -> Tensor:
        return a_map(device, shape, channels_last=channels_last)

    def new_weight() -> Tensor:
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return torch.randn(settings.weight, dtype=DTYPE, device=device).to(memory_format=layout)

    def forward() -> Call:
        x, weight = new_map(x_shape), new_weight()
        bias = torch.zeros(bias_sizes, dtype=DTYPE, device=device) if bias_sizes else None
        return lambda: torch.conv2d(x, weight, bias, *where, settings.groups)

    def backward(*mask: bool) -> Call:
        dy, x, weight = new_map(y_shape), new_map(x_shape), new_weight()
        rest = (bias_sizes, *where, False, (0, 0), settings.groups, mask)
        return lambda: torch.ops.aten.convolution_backward(dy, x, weight, *rest)

    all_bytes = x_bytes + y_bytes + weight_bytes
    dgrad = [Pass("dgrad", all_bytes, lambda: backward(True, False, False), flops)] * operation.learns_input
    return [
        Pass("forward", all_bytes, forward, flops),
        *dgrad,
        Pass("wgrad", all_bytes, lambda: backward(False, True, settings.has_bias), flops),
    ]


def stem_passes(operation: Operation, device: str) -> list[Pass]:
    """The first convolution by our kernels."""
    templates = {each.name: each for each in conv_passes(operation, device)}
    stride = operation.settings.stride[0]  # type: ignore[attr-defined]

    def forward() -> Call:
        x, weight = a_map(device, operation.inputs[0]), torch.randn(operation.settings[0], dtype=DTYPE, device=device)
        return lambda: convolutions.stem(x, weight, stride)

    def wgrad() -> Call:
        x, dy = a_map(device, operation.inputs[0]), a_map(device, operation.output)
        return lambda: convolutions.stem_weight_gradient(dy, x, stride)

    return [replace(templates["forward"], prepare=forward), replace(templates["wgrad"], prepare=wgrad)]


def prediction_passes(operation: Operation, device: str) -> list[Pass]:
    """Predictions by our kernels; one call computes all gradients."""
    templates = {each.name: each for each in conv_passes(operation, device)}

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        weight = torch.randn(operation.settings[0], device=device)
        return a_map(device, operation.inputs[0]), weight, torch.zeros(len(weight), device=device)

    def forward() -> Call:
        x, weight, bias = inputs()
        return lambda: convolutions.predictions(x, weight, bias)

    def backward() -> Call:
        x, weight, _ = inputs()
        dy = a_map(device, operation.output)
        return lambda: convolutions.predictions_backward(dy, x, weight)

    both = templates["dgrad"]
    both = replace(both, name="backward", prepare=backward, flops=2 * both.flops, bytes_once=2 * both.bytes_once)
    return [replace(templates["forward"], prepare=forward), both]


def matmul_passes(operation: Operation, device: str) -> list[Pass]:
    """A 1x1 convolution as products of matrices: pixels x channels."""
    template = {each.name: each for each in conv_passes(operation, device)}
    channels_out, channels_in = operation.settings[0][:2]
    rows = prod(operation.output) // channels_out

    def matrix(height: int, width: int) -> Tensor:
        return torch.randn(height, width, dtype=DTYPE, device=device)

    def forward() -> Call:
        x, weight = matrix(rows, channels_in), matrix(channels_out, channels_in)
        return lambda: x @ weight.t()

    def dgrad() -> Call:
        dy, weight = matrix(rows, channels_out), matrix(channels_out, channels_in)
        return lambda: dy @ weight

    def wgrad() -> Call:
        dy, x = matrix(rows, channels_out), matrix(rows, channels_in)
        return lambda: dy.t() @ x

    prepare = {"forward": forward, "dgrad": dgrad, "wgrad": wgrad}
    return [replace(each, prepare=prepare[name]) for name, each in template.items()]


def differentiated(
    function: Callable[[Tensor], Tensor], operation: Operation, device: str, parameters: Sequence[Tensor] = ()
) -> tuple[Callable[[], Call], Callable[[], Call]]:
    """Both passes of a function of one map, by autograd."""

    def forward() -> Call:
        x = a_map(device, operation.inputs[0])
        return lambda: function(x)

    def backward() -> Call:
        x = a_map(device, operation.inputs[0]).requires_grad_()
        z = function(x)
        dz = a_map(device, operation.output, operation.gradient_channels) if z.dim() else torch.ones_like(z)
        return lambda: torch.autograd.grad(z, (x, *parameters), dz, retain_graph=True)

    return forward, backward


def norm_act_passes(operation: Operation, device: str) -> list[Pass]:
    name, slope = operation.settings
    act = nn.LeakyReLU(slope) if name == "LeakyReLU" else getattr(nn, name)()
    norm = nn.BatchNorm2d(operation.output[1], eps=1e-3, momentum=0.03).to(device)
    forward, backward = differentiated(lambda x: norm_act(x, norm, act), operation, device, tuple(norm.parameters()))
    one = BYTES * prod(operation.output)
    # The sums are a separate pass now: x twice and z; x and dz twice, and dx.
    return [
        Pass("forward", 2 * one, forward, bytes_now=3 * one),
        Pass("backward", 3 * one, backward, bytes_now=5 * one),
    ]


def max_pool_passes(operation: Operation, device: str) -> list[Pass]:
    k, is_same = operation.settings
    pool = max_pool_same if is_same else max_pool
    forward, backward = differentiated(lambda x: pool(x, k), operation, device)
    both = (("forward", forward), ("backward", backward))
    x_bytes, z_bytes = BYTES * prod(operation.inputs[0]), BYTES * prod(operation.output)
    if not is_same:
        return [Pass("forward", x_bytes + z_bytes, forward), Pass("backward", 2 * x_bytes + z_bytes, backward)]
    # With a byte for the position of the maximum. Wide windows are now computed as successive windows of 5.
    once = x_bytes + z_bytes + z_bytes // BYTES
    return [Pass(name, once, prepare, bytes_now=(k // 4) * once) for name, prepare in both]


def upsample_passes(operation: Operation, device: str) -> list[Pass]:
    upsample = layers.Upsample(scale_factor=operation.output[2] // operation.inputs[0][2], mode="nearest")
    forward, backward = differentiated(upsample, operation, device)
    moved = BYTES * (prod(operation.inputs[0]) + prod(operation.output))
    return [Pass("forward", moved, forward), Pass("backward", moved, backward)]


def activation_passes(operation: Operation, device: str) -> list[Pass]:
    forward, backward = differentiated(nn.SiLU(), operation, device)
    one = BYTES * prod(operation.output)
    return [Pass("forward", 2 * one, forward), Pass("backward", 3 * one, backward)]


def concat_passes(operation: Operation, device: str) -> list[Pass]:
    """Forward only, because the gradients are slices."""

    def prepare() -> Call:
        xs = [a_map(device, shape) for shape in operation.inputs]
        return lambda: concat(xs)

    return [Pass("forward", 2 * BYTES * prod(operation.output), prepare)]


def add_passes(operation: Operation, device: str) -> list[Pass]:
    """Forward only, because both gradients are that of the output."""

    def prepare() -> Call:
        x, y = (a_map(device, shape) for shape in operation.inputs)
        return lambda: x + y

    return [Pass("forward", 3 * BYTES * prod(operation.output), prepare)]


def gradient_sum_passes(operation: Operation, device: str) -> list[Pass]:
    one, num = BYTES * prod(operation.output), len(operation.inputs)

    def prepare() -> Call:
        x = a_map(device, operation.output).requires_grad_()
        gradients = [a_map(device, operation.output, wide) for wide in operation.settings]
        readers = [each.view_as(each) for each in forked(x, num)]
        return lambda: torch.autograd.grad(readers, x, gradients, retain_graph=True)

    return [Pass("backward", (num + 1) * one, prepare)]


def implicit_passes(operation: Operation, device: str) -> list[Pass]:
    head, level = operation.settings
    learned = [head.m[level].weight, head.m[level].bias]
    if isinstance(head, IDetect):
        learned += [head.ia[level].implicit, head.im[level].implicit]

    def backward() -> Call:
        results = head.folded_weights(level)
        gradients = [torch.randn_like(each) for each in results]
        return lambda: torch.autograd.grad(results, learned, gradients, retain_graph=True)

    moved = 2 * 4 * prod(operation.output)
    return [Pass("forward", moved, lambda: lambda: head.folded_weights(level)), Pass("backward", moved, backward)]


def loss_passes(operation: Operation, device: str) -> list[Pass]:
    """The loss of the benchmark's step, which is not that of a training."""
    (head,) = operation.settings
    forward, derive = differentiated(lambda x: head.split_outputs(x).mean(), operation, device)

    def backward() -> Call:
        call = derive()
        return lambda: call()[0].contiguous(memory_format=torch.channels_last)  # type: ignore[index]

    one = BYTES * prod(operation.output)
    return [Pass("forward", one, forward), Pass("backward", one, backward)]


def cast_passes(operation: Operation, device: str) -> list[Pass]:
    (weights,) = operation.settings

    def casting(before: torch.dtype, after: torch.dtype) -> Call:
        tensors = [each.detach().to(before, copy=True) for each in weights]
        return lambda: network_module._copy_all(tensors, after)

    moved = (4 + BYTES) * prod(operation.output)
    return [
        Pass("forward", moved, lambda: casting(torch.float32, DTYPE)),
        Pass("backward", moved, lambda: casting(DTYPE, torch.float32)),
    ]


def optimizer_passes(operation: Operation, device: str) -> list[Pass]:
    (parameters,) = operation.settings

    def prepare() -> Call:
        copies = [nn.Parameter(each.detach().clone()) for each in parameters]
        for each in copies:
            each.grad = torch.zeros_like(each)
        return torch.optim.SGD(copies, lr=1e-3, momentum=0.937, nesterov=True, fused=True).step

    return [Pass("step", 5 * 4 * prod(operation.output), prepare)]


PASSES: dict[str, Callable[[Operation, str], list[Pass]]] = {
    "convolution": conv_passes,
    "stem": stem_passes,
    "predictions": prediction_passes,
    "norm + act": norm_act_passes,
    "max-pool": max_pool_passes,
    "concat": concat_passes,
    "upsample": upsample_passes,
    "add": add_passes,
    "activation": activation_passes,
    "gradient sum": gradient_sum_passes,
    "implicit": implicit_passes,
    "loss = mean": loss_passes,
    "weight casts": cast_passes,
    "optimizer": optimizer_passes,
}


# Alternatives for a convolution


class Alternative(NamedTuple):
    name: str
    passes: list[Pass]
    cudnn: str = ""
    """A key of CUDNN, if only a setting differs."""


Ways = Callable[[Operation, str], Iterator[Alternative]]


def common_alternatives(operation: Operation, device: str) -> Iterator[Alternative]:
    """Alternatives, the cheapest to try first."""
    settings = ConvSettings(*operation.settings)
    one = (1, 1)
    if settings.weight[2:] == one and settings.stride == one and settings.padding == (0, 0) and settings.groups == 1:
        yield Alternative("as matmul", matmul_passes(operation, device))
    for padded in padded_inputs(operation):
        yield Alternative(f"input channels {padded.inputs[0][1]}", conv_passes(padded, device))
    for padded in padded_outputs(operation):
        yield Alternative(f"output channels {padded.output[1]}", conv_passes(padded, device))
    yield Alternative("benchmark off", conv_passes(operation, device), "benchmark off")
    yield Alternative("NCHW", conv_passes(operation, device, channels_last=False))


def rare_alternatives(operation: Operation, device: str) -> Iterator[Alternative]:
    yield Alternative("every engine", conv_passes(operation, device), "every engine")


def padded_counts(channels: int) -> list[int]:
    """Numbers of channels to try instead: the next multiples of 4 (for three colours), 8 and 16."""
    multiples = (4, 8, 16) if channels < 4 else (8, 16)
    return sorted({ceil(channels / each) * each for each in multiples} - {channels})


def padded_inputs(operation: Operation) -> Iterator[Operation]:
    (x_shape,), settings = operation.inputs, ConvSettings(*operation.settings)
    for channels in padded_counts(x_shape[1]) if settings.groups == 1 else ():
        weight = (settings.weight[0], channels, *settings.weight[2:])
        shape = (x_shape[0], channels, *x_shape[2:])
        yield replace(operation, inputs=(shape,), settings=settings._replace(weight=weight))


def padded_outputs(operation: Operation) -> Iterator[Operation]:
    y_shape, settings = operation.output, ConvSettings(*operation.settings)
    for channels in padded_counts(y_shape[1]) if settings.groups == 1 else ():
        weight = (channels, *settings.weight[1:])
        yield replace(operation, output=(y_shape[0], channels, *y_shape[2:]), settings=settings._replace(weight=weight))


@contextmanager
def benchmark_off() -> Iterator[None]:
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = True


@contextmanager
def every_engine() -> Iterator[None]:
    limit = torch.backends.cudnn.benchmark_limit
    torch.backends.cudnn.benchmark_limit = 0
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark_limit = limit


CUDNN = {"benchmark off": benchmark_off, "every engine": every_engine}


# Timing


def l2_bytes(device: str) -> int:
    return getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 2**26) if device == "cuda" else 2**20


class Timer:
    """Times calls on the device."""

    def __init__(self, device: str, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self._l2_bytes = l2_bytes(device)
        # torch caches per thread which cuDNN kernel a shape gets, and ignores later settings, so each setting has its
        # own thread. The threads stay alive, so that nothing of cuDNN is torn down during the run.
        self._threads = {name: ThreadPoolExecutor(1) for name in CUDNN}

    def time(self, work: Pass, cudnn: str = "") -> Timing:
        """Seconds per call."""
        if not cudnn:
            return self._time(work)
        with CUDNN[cudnn]() if self.device == "cuda" else nullcontext():
            return self._threads[cudnn].submit(self._time, work).result()

    def _time(self, work: Pass) -> Timing:
        num_sets = min(max(ceil(4 * self._l2_bytes / work.bytes_once), 2), MAX_SETS)
        calls = [work.prepare() for _ in range(num_sets)]
        with torch.no_grad():
            # Results are kept until the next call on the same inputs; otherwise all would use the same memory.
            kept = [call() for call in calls]
            self.synchronize()
            begin = time.perf_counter()
            kept = [call() for call in calls]
            host_s = (time.perf_counter() - begin) / num_sets
            self.synchronize()
            whole_s = (time.perf_counter() - begin) / num_sets
            num_calls = min(max(ceil(REPEAT_MS / 1e3 / whole_s), num_sets), 100)
            return summarize([self._once(calls, kept, num_calls, host_s) for _ in range(self.repeats)])

    def _once(self, calls: list[Call], kept: list[object], num_calls: int, host_s: float) -> float:
        if self.device == "cpu":
            begin_s = time.perf_counter()
            kept[0] = calls[0]()
            return time.perf_counter() - begin_s
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The device waits until the host has launched most calls, so that launches are not measured.
        torch.cuda._sleep(int(min(1.2 * host_s * num_calls + 1e-4, 0.05) * SPIN_HZ))
        begin.record()
        for number in range(num_calls):
            kept[number % len(calls)] = calls[number % len(calls)]()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / num_calls / 1e3

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()


class Ceilings(NamedTuple):
    """The measured limits of the device."""

    bytes_per_s: float
    flops_per_s: float

    def floor_ms(self, num_bytes: int, flops: int) -> float:
        return 1e3 * max(num_bytes / self.bytes_per_s, flops / self.flops_per_s)

    def text(self) -> str:
        return (
            f"ceilings of this run: copy {self.bytes_per_s / 1e12:.3g} TB/s, "
            f"bf16 matrix product {self.flops_per_s / 1e12:.3g} TFLOP/s"
        )


def measure_ceilings(timer: Timer) -> Ceilings:
    is_gpu = timer.device == "cuda"
    copied, side = (2**30, 8192) if is_gpu else (2**22, 256)

    def copy() -> Call:
        source, target = (torch.zeros(copied // BYTES, dtype=DTYPE, device=timer.device) for _ in range(2))
        return lambda: target.copy_(source)

    def product() -> Call:
        a, b = (torch.randn(side, side, dtype=DTYPE, device=timer.device) for _ in range(2))
        return lambda: a @ b

    copy_s = timer.time(Pass("forward", 2 * copied, copy)).median
    product_s = timer.time(Pass("forward", 3 * BYTES * side**2, product)).median
    timer.free()
    return Ceilings(2 * copied / copy_s, 2 * side**3 / product_s)


@dataclass
class Row:
    """One pass of one distinct operation."""

    kind: str
    operation: str
    direction: str
    count: int
    ms: float
    p10_ms: float
    p90_ms: float
    gigabytes: float
    gigabytes_now: float
    gigaflops: float
    floor_ms: float
    floor_now_ms: float

    @property
    def total_ms(self) -> float:
        return self.count * self.ms

    @property
    def gap_ms(self) -> float:
        """Time beyond the roofline, of all occurrences."""
        return self.count * (self.ms - self.floor_ms)


@dataclass
class Trial:
    """An alternative for one pass of a convolution."""

    operation: str
    direction: str
    count: int
    alternative: str
    ms: float
    baseline_ms: float
    floor_ms: float


@dataclass
class CaseResults:
    case: str
    step_ms: float | None = None
    step_way: str = ""
    rows: list[Row] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_operations: int = 0
    num_not_timed: int = 0
    """Distinct operations for which there was not enough time."""
    num_convolutions_not_tried: int = 0
    seconds: float = 0.0


@dataclass
class Results:
    """All results so far; `save` writes them to the folder, if there is one."""

    folder: Path | None
    ceilings: Ceilings
    cases: list[CaseResults] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        return {"ceilings": self.ceilings._asdict(), "cases": [asdict(case) for case in self.cases]}

    def text(self) -> str:
        parts = ["\n".join(case_lines(case)) for case in self.cases]
        return "\n\n".join([self.ceilings.text(), *parts])

    def save(self) -> None:
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            numbers = {"facts": facts(), **self.numbers()}
            (self.folder / "layer_roofline.json").write_text(json.dumps(numbers, indent=1) + "\n")
            (self.folder / "layer_roofline.txt").write_text(f"{facts_line()}\n\n{self.text()}\n")


def measure_case(case: Case, timer: Timer, results: Results, end_s: float) -> None:
    """Record the operations, time the step, every operation, then alternatives; failures are noted without stopping."""
    begin = time.monotonic()
    result = CaseResults(str(case))
    results.cases.append(result)
    operations: Counter[Operation] = Counter()
    with noted(result, "recording"):
        operations = record_case(case, timer.device)
    timer.free()
    result.num_operations = len(operations)
    print(f"{case}: {sum(operations.values())} operations, {len(operations)} distinct", flush=True)
    for way in ("graph", "eager") if timer.device == "cuda" else ("eager",):
        if result.step_ms is None:
            with noted(result, f"step, {way}"):
                result.step_ms, result.step_way = 1e3 * step_s(case, way, timer), way
                print(f"{case}: step, {way}: {result.step_ms:.2f} ms", flush=True)
        timer.free()
    results.save()
    operations_end = time.monotonic() + OPERATIONS_SHARE * (end_s - time.monotonic())
    for operation in most_work_first(operations, results.ceilings, timer.device):
        if time.monotonic() > operations_end:
            result.num_not_timed += 1
            continue
        time_operation(operation, operations[operation], timer, results.ceilings, result)
        results.save()
    worst = worst_convolutions(operations, result.rows)
    # The common alternatives of all come first: trying every engine takes longest, and some engines may fail.
    for ways in (common_alternatives, rare_alternatives):
        for operation in worst:
            try_alternatives(operation, operations[operation], ways, timer, results.ceilings, result, end_s)
            results.save()
    tried = {trial.operation for trial in result.trials}
    result.num_convolutions_not_tried = sum(each.text() not in tried for each in worst)
    result.seconds = time.monotonic() - begin
    results.save()
    operations.clear()
    timer.free()


@contextmanager
def noted(result: CaseResults, what: str) -> Iterator[None]:
    """Records a failure instead of ending the run, because time on a GPU is scarce."""
    try:
        yield
    except Exception as error:  # Any failure of one measurement must not end the others.
        failure = f"{what}: {type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
        result.failures.append(failure)
        print(f"FAILED {failure}", flush=True)


def record_case(case: Case, device: str) -> Counter[Operation]:
    torch.manual_seed(0)
    network = build_network(load_config(case.name)).to(device).train()
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.rand(case.batch, 3, case.side_px, case.side_px, device=device, dtype=DTYPE)
    return record(network, images.to(memory_format=torch.channels_last))


def step_s(case: Case, way: str, timer: Timer) -> float:
    """A whole step as in bench/model_step.py."""
    step = make_step(case, way, timer.device)
    if timer.device == "cpu":
        return measure(step, warmup=0, repeats=timer.repeats).median
    durations = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(4):
            step()
        end.record()
        end.synchronize()
        durations.append(begin.elapsed_time(end) / 4e3)
    return summarize(durations).median


def most_work_first(operations: Counter[Operation], ceilings: Ceilings, device: str) -> list[Operation]:
    """Operations by descending work, so that those that are not reached matter least."""

    def work_ms(operation: Operation) -> float:
        passes = passes_of(operation, device)
        return operations[operation] * sum(ceilings.floor_ms(each.bytes_now, each.flops) for each in passes)

    return sorted(operations, key=work_ms, reverse=True)


def time_operation(operation: Operation, count: int, timer: Timer, ceilings: Ceilings, result: CaseResults) -> None:
    timed_passes = []
    for work in passes_of(operation, timer.device):
        with noted(result, f"{operation.text()}, {work.name}"):
            timing = timer.time(work)
            result.rows.append(row_of(operation, count, work, timing, ceilings))
            timed_passes.append(f"{work.name} {result.rows[-1].ms:.3f} (floor {result.rows[-1].floor_ms:.3f})")
    print(f"  {count} x {operation.text()}: {', '.join(timed_passes)} ms", flush=True)


def row_of(operation: Operation, count: int, work: Pass, timing: Timing, ceilings: Ceilings) -> Row:
    return Row(
        kind=operation.kind,
        operation=operation.text(),
        direction=work.name,
        count=count,
        ms=1e3 * timing.median,
        p10_ms=1e3 * timing.p10,
        p90_ms=1e3 * timing.p90,
        gigabytes=work.bytes_once / 1e9,
        gigabytes_now=work.bytes_now / 1e9,
        gigaflops=work.flops / 1e9,
        floor_ms=ceilings.floor_ms(work.bytes_once, work.flops),
        floor_now_ms=ceilings.floor_ms(work.bytes_now, work.flops),
    )


def worst_convolutions(operations: Counter[Operation], rows: list[Row]) -> list[Operation]:
    """The convolutions with the largest gaps, and always the first of the network."""
    gap_ms: dict[str, float] = defaultdict(float)
    for row in rows:
        gap_ms[row.operation] += row.gap_ms
    timed = [each for each in operations if each.kind == "convolution" and each.text() in gap_ms]
    ordered = sorted(timed, key=lambda each: gap_ms[each.text()], reverse=True)
    return [each for rank, each in enumerate(ordered) if rank < TOP_CONVOLUTIONS or not each.learns_input]


def try_alternatives(
    operation: Operation,
    count: int,
    ways: Ways,
    timer: Timer,
    ceilings: Ceilings,
    result: CaseResults,
    end_s: float,
) -> None:
    name = operation.text()
    baseline_ms = {row.direction: row.ms for row in result.rows if row.operation == name}
    for alternative in ways(operation, timer.device):
        timed_passes = []
        for work in alternative.passes:
            if time.monotonic() > end_s or work.name not in baseline_ms:
                continue
            with noted(result, f"{name}, {work.name}, {alternative.name}"):
                ms = 1e3 * timer.time(work, alternative.cudnn).median
                floor_ms = ceilings.floor_ms(work.bytes_once, work.flops)
                before_ms = baseline_ms[work.name]
                result.trials.append(Trial(name, work.name, count, alternative.name, ms, before_ms, floor_ms))
                timed_passes.append(f"{work.name} {ms:.3f} ({before_ms:.3f})")
        if timed_passes:
            print(f"  {name}, {alternative.name}: {', '.join(timed_passes)} ms", flush=True)


# Results as text


def case_lines(result: CaseResults) -> list[str]:
    if result.step_ms is None:
        step = "the step itself could not be timed"
    else:
        step = f"a step ({result.step_way}) takes {result.step_ms:.2f} ms"
    lines = [f"{result.case}: {step}; timed in {result.seconds:.0f} s", ""]
    lines += [*kind_lines(result), "", *row_lines(result), "", *trial_lines(result)]
    if result.num_not_timed:
        lines.append(f"not timed, because time ran out: {result.num_not_timed} of {result.num_operations} operations")
    if result.num_convolutions_not_tried:
        lines.append(f"no alternatives tried, because time ran out: {result.num_convolutions_not_tried} convolutions")
    return [*lines, *(f"FAILED {failure}" for failure in result.failures)]


def _share(ms: float, result: CaseResults) -> str:
    return f"{ms / result.step_ms:8.1%}" if result.step_ms else f"{'-':>8}"


def kind_lines(result: CaseResults) -> list[str]:
    """Totals per kind and pass, and overall."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in result.rows:
        groups[row.kind, row.direction].append(row)
    ordered = sorted(groups.items(), key=lambda item: -sum(row.gap_ms for row in item[1]))
    head = f"{'kind':16}{'pass':>9}{'calls':>7}{'ms':>9}{'roofline':>10}{'floor now':>11}{'gap ms':>9}{'of step':>8}"
    return [
        head,
        *(_total_line(kind, direction, rows, result) for (kind, direction), rows in ordered),
        _total_line("sum", "", result.rows, result),
    ]


def _total_line(kind: str, direction: str, rows: list[Row], result: CaseResults) -> str:
    total_ms, gap_ms = sum(row.total_ms for row in rows), sum(row.gap_ms for row in rows)
    floor_ms = sum(row.count * row.floor_ms for row in rows)
    now_ms = sum(row.count * row.floor_now_ms for row in rows)
    calls = sum(row.count for row in rows)
    return (
        f"{kind:16}{direction:>9}{calls:7}{total_ms:9.3f}{floor_ms:10.3f}{now_ms:11.3f}{gap_ms:9.3f}"
        f"{_share(total_ms, result)}"
    )


def row_lines(result: CaseResults) -> list[str]:
    ordered = sorted(result.rows, key=lambda row: row.gap_ms, reverse=True)
    lines = [
        f"{'operation':52}{'pass':>9}{'n':>3}{'ms':>8}{'p10':>8}{'p90':>8}{'GB':>7}{'GFLOP':>8}{'roofline':>9}"
        f"{'ratio':>6}{'n x gap':>9}{'of step':>8}"
    ]
    for row in ordered[:TABLE_ROWS]:
        ratio = row.ms / row.floor_ms
        lines.append(
            f"{row.operation:52}{row.direction:>9}{row.count:3}{row.ms:8.3f}{row.p10_ms:8.3f}{row.p90_ms:8.3f}"
            f"{row.gigabytes:7.3f}{row.gigaflops:8.1f}{row.floor_ms:9.3f}{ratio:6.1f}{row.gap_ms:9.3f}"
            f"{_share(row.total_ms, result)}"
        )
    left = ordered[TABLE_ROWS:]
    if left:
        lines.append(f"... and {len(left)} rows with a gap of {sum(row.gap_ms for row in left):.3f} ms in all (.json)")
    return lines


def trial_lines(result: CaseResults) -> list[str]:
    """A line per convolution and alternative; the gain is the time saved by all occurrences in the passes shown."""
    if not result.trials:
        return []
    names = ("forward", "dgrad", "wgrad")
    lines = [f"{'alternatives, ms per call':24}" + "".join(f"{name:>10}" for name in names) + f"{'n x gain':>10}"]
    for operation in dict.fromkeys(trial.operation for trial in result.trials):
        rows = {row.direction: row for row in result.rows if row.operation == operation}
        lines.append(f"{next(iter(rows.values())).count} x {operation}")
        lines.append(_trial_line("now", {name: row.ms for name, row in rows.items()}, names))
        lines.append(_trial_line("roofline", {name: row.floor_ms for name, row in rows.items()}, names))
        trials = [trial for trial in result.trials if trial.operation == operation]
        for way in dict.fromkeys(trial.alternative for trial in trials):
            of_way = [trial for trial in trials if trial.alternative == way]
            gain_ms = sum(trial.count * (trial.baseline_ms - trial.ms) for trial in of_way)
            lines.append(_trial_line(way, {trial.direction: trial.ms for trial in of_way}, names) + f"{gain_ms:10.3f}")
    return [*lines, ""]


def _trial_line(way: str, ms: dict[str, float], names: Sequence[str]) -> str:
    return f"  {way:22}" + "".join(f"{ms[name]:10.3f}" if name in ms else f"{'-':>10}" for name in names)


def _shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape))


if __name__ == "__main__":
    raise SystemExit(main())
