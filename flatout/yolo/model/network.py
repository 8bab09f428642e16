"""Detection networks: a ModelSpec as a torch module, test-time augmentation and ensembles.

    images [B, C, H, W], 0..1 --rows--> maps --head--> training: raw predictions; evaluation: Predictions

Rows run in order; each reads the outputs of the rows it names.

Dimension key:  B images   C channels   H, W height and width   K boxes   O = 5 + classes
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.copies import forked
from flatout.yolo.model.layers import Detect, IAuxDetect, IDetect, Predictions, conv_pair, make_layer, suits_pair
from flatout.yolo.model.module_specs import MODULE_SPECS
from flatout.yolo.model.pooling import continues
from flatout.yolo.model.spec import IMAGE, Head, ModelSpec, Row, needed_rows, parse_model
from flatout.yolo.multihead.head_config import HeadConfig
from flatout.yolo.multihead.layer import MultiHeadDetect, MultiHeadDetectAttention

# Casting weights under autocast
#
# Autocast casts each weight when its convolution runs, and each gradient on the way back: 210 small kernels per step of
# YOLOv7, each of which costs the host as much as a large one. Here one call casts them all; the numbers are the same.


@contextmanager
def cast_weights(convolutions: Iterable[nn.Conv2d], device: torch.device) -> Iterator[None]:
    """Under autocast, replace the convolutions' weights by cast copies inside the block; gradients reach the originals.

    Does nothing with several ranks: they send gradients while the backward pass runs, and the gradients of a joint cast
    would all arrive at its end.
    """
    trainable = [each for each in convolutions if each.weight.requires_grad] if _should_cast(device) else []
    originals = [each.weight for each in trainable]
    if trainable:
        copies = _CastAll.apply(torch.get_autocast_dtype(device.type), *originals)
        for each, cast in zip(trainable, copies, strict=True):
            _set_weight(each, cast)
    try:
        yield
    finally:
        for each, weight in zip(trainable, originals, strict=True):
            _set_weight(each, weight)


def _set_weight(convolution: nn.Conv2d, weight: Tensor) -> None:
    # Bypasses the setter, which accepts parameters only. A cast must not be one, or it would be trained instead.
    convolution._parameters["weight"] = weight  # type: ignore[assignment]


def _should_cast(device: torch.device) -> bool:
    # The meta device has no autocast. (torch 2.11 cannot compile a query for the devices that have one.)
    is_cast = device.type != "meta" and torch.is_autocast_enabled(device.type)
    is_alone = not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    return is_cast and torch.is_grad_enabled() and is_alone


class _CastAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = weights[0].dtype
        return tuple(_copied(weights, dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        copies = iter(_copied([each for each in gradients if each is not None], ctx.dtype))
        return (None, *(None if each is None else next(copies) for each in gradients))


def _copied(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copy = torch.ops.flatout.copied if torch.compiler.is_compiling() else _copy_all
    return copy(list(tensors), dtype)


def _copy_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = _like_all(tensors, dtype)
    torch._foreach_copy_(copies, tensors)
    return copies


def _like_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(each, dtype=dtype) for each in tensors]


# An operator that torch.compile does not trace into; it would generate a kernel per tensor.
_library = torch.library.Library("flatout", "FRAGMENT")
_library.define("copied(Tensor[] tensors, ScalarType dtype) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
_library.impl("copied", _copy_all, "CompositeExplicitAutograd")
torch.library.register_fake("flatout::copied", _like_all, lib=_library)


# Networks

DETECTION_LAYERS: dict[str, type[Detect]] = {
    layer.__name__: layer for layer in (Detect, IDetect, IAuxDetect, MultiHeadDetect, MultiHeadDetectAttention)
}
"""Detection layers by their name in a config."""


def build_network(
    config: object,
    *,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadConfig | None = None,
    where: str = "model config",
) -> "Network":
    """A network with random weights from the content of a model YAML; overrides as in `parse_model`."""
    return Network(parse_model(config, nc=nc, anchors=anchors, heads=heads, where=where))


class Network(nn.Module):
    """A detection network. Its state_dict names are `model.<row>.<inner name>`, as in YOLOv7's checkpoints."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.names = [str(index) for index in range(spec.head.num_classes)]
        self.model = nn.Sequential(*map(_make_row, spec.rows), DETECTION_LAYERS[spec.head.module](spec.head))
        head = spec.head
        self._training_steps = _schedule((*spec.rows, head))
        # Evaluation does not use the auxiliary outputs, so the rows that only they depend on are left out.
        lead = needed_rows(spec.rows, head.lead_sources)
        kept = [row for row in spec.rows if row.index in lead]
        self._lead_steps = _schedule((*kept, replace(head, sources=head.lead_sources)))
        self.head.initialise()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                _initialise_batch_norm(module)
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # Without those of the head, whose weights are folded from several tensors before they are cast.
        rows = self.model[:-1].modules() if mode else ()
        self._convolutions = tuple(each for each in rows if isinstance(each, nn.Conv2d))
        return self

    @property
    def head(self) -> Detect:
        head = self.model[-1]
        assert isinstance(head, Detect)
        return head

    @property
    def nc(self) -> int:
        return self.head.nc

    @property
    def stride(self) -> Tensor:
        return self.head.stride

    @property
    def config(self) -> dict[str, object]:
        """The content of the model YAML that this network was built from, with overrides applied."""
        return self.spec.config

    def forward(self, x: Tensor) -> list[Tensor] | Predictions:
        if not self.training:
            return self._run(x)
        with cast_weights(self._convolutions, x.device):
            return self._run(x)

    def _run(self, x: Tensor) -> list[Tensor] | Predictions:
        maps: dict[int, list[Tensor]] = {}
        result = None
        for step in self._training_steps if self.training else self._lead_steps:
            if step.row in maps:
                continue
            # Each reader takes its own reference, so that a map is released with the last one.
            inputs = [x if source == IMAGE else maps[source].pop() for source in step.sources]
            # By name: a Sequential iterates up to an index, and torch.compile would trace every step of the iteration.
            layer = getattr(self.model, str(step.row))
            if step.twin and suits_pair(inputs[0], layer, twin := getattr(self.model, str(step.twin.row))):
                result, other = conv_pair(inputs[0], layer, twin)
                maps[step.twin.row] = forked(other, step.twin.num_readers)
                maps[step.sources[0]].pop()  # the twin's reference
            elif step.narrower_k:
                result = layer(*inputs, step.narrower_k)
            else:
                result = layer(inputs if step.joins else inputs[0])
            if step.num_readers:
                maps[step.row] = forked(result, step.num_readers)
        return result  # type: ignore[return-value]


class _Twin(NamedTuple):
    """A later 1 x 1 convolution of the same map."""

    row: int
    num_readers: int


class _Step(NamedTuple):
    """One row of the execution order."""

    row: int
    sources: tuple[int, ...]
    num_readers: int
    """How often later rows read the result."""
    joins: bool
    """Whether the module takes the list of its inputs instead of a single one."""
    narrower_k: int
    """If not 0, the second source is the first one after max-pooling with this smaller kernel, to begin with."""
    twin: _Twin | None
    """The row that our kernels compute together with this one."""


def _schedule(rows: Sequence[Row | Head]) -> tuple[_Step, ...]:
    narrower = {row.index: pool for row in rows if (pool := _narrower_pool(row, rows)) is not None}
    sources = {
        row.index: (*row.sources, narrower[row.index].index) if row.index in narrower else row.sources for row in rows
    }
    num_readers = Counter(source for each in sources.values() for source in each)
    twins = _twins(rows)
    return tuple(
        _Step(
            row.index,
            sources[row.index],
            num_readers[row.index],
            joins=row.module not in MODULE_SPECS or MODULE_SPECS[row.module].inputs != "one",
            narrower_k=_pool_kernel(narrower[row.index]) if row.index in narrower else 0,
            twin=_Twin(twins[row.index], num_readers[twins[row.index]]) if row.index in twins else None,
        )
        for row in rows
    )


def _twins(rows: Sequence[Row | Head]) -> dict[int, int]:
    """Pairs of 1 x 1 convolutions of the same map: the row of the first -> that of the second."""
    twins: dict[int, int] = {}
    waiting: dict[int, int] = {}
    for row in rows:
        if not (isinstance(row, Row) and row.module == "Conv" and row.repeats == 1 and row.sources[0] != IMAGE):
            continue
        if (row.args["k"], row.args["s"], row.args["p"], row.args["g"]) not in ((1, 1, None, 1), (1, 1, 0, 1)):
            continue
        first = waiting.pop(row.sources[0], None)
        if first is None:
            waiting[row.sources[0]] = row.index
        else:
            twins[first] = row.index
    return twins


def _narrower_pool(row: Row | Head, rows: Sequence[Row | Head]) -> Row | None:
    """The row before this one with the widest max-pool of the same map that this one can begin with."""
    if not _pool_kernel(row):
        return None
    pools = [each for each in rows if isinstance(each, Row) and each.index < row.index and each.sources == row.sources]
    usable = [each for each in pools if _pool_kernel(each) and continues(_pool_kernel(row), _pool_kernel(each))]
    return max(usable, key=_pool_kernel, default=None)


def _pool_kernel(row: Row | Head) -> int:
    """The kernel of a single SP of stride 1; 0 for other rows."""
    if not isinstance(row, Row) or row.module != "SP" or row.repeats != 1 or row.args["s"] != 1:
        return 0
    return int(row.args["k"])


def _make_row(row: Row) -> nn.Module:
    layers = [make_layer(row.module, row.ins[0].channels, row.args) for _ in range(row.repeats)]
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _initialise_batch_norm(norm: nn.BatchNorm2d) -> None:
    """Set the statistics to those after a training step on a black image, which is how YOLOv7 measures its strides."""
    assert norm.running_var is not None and norm.num_batches_tracked is not None
    norm.running_var.fill_(0.9)
    norm.num_batches_tracked.fill_(1)
    norm.eps, norm.momentum = 1e-3, 0.03


# Test-time augmentation and ensembles

VIEWS = ((1.0, False), (0.83, True), (0.67, False))
"""Scale and left-right flip of each view."""

PADDING = 0.447
"""Grey of the padding: the mean brightness of ImageNet."""


def predict_augmented(network: nn.Module, x: Tensor, largest_stride: int) -> Tensor:
    """Boxes of all views of `x` [B, C, H, W], in the coordinates of `x`, concatenated view by view: [B, K, O]."""
    width = x.shape[-1]
    return torch.cat([_boxes_of_view(network, x, scale, flip, largest_stride, width) for scale, flip in VIEWS], 1)


def _boxes_of_view(network: nn.Module, x: Tensor, scale: float, flip: bool, stride: int, width: int) -> Tensor:
    view = resize_and_pad(x.flip(-1) if flip else x, scale, stride)
    prediction: Predictions = network(view)
    centre, size, scores = prediction.decoded.split((2, 2, prediction.decoded.shape[-1] - 4), -1)
    # By the nominal scale, although the view's sides were rounded: YOLOv7 does the same, and golden `tta` pins it.
    centre, size = centre / scale, size / scale
    if flip:
        centre = torch.stack((width - centre[..., 0], centre[..., 1]), -1)
    return torch.cat((centre, size, scores), -1)


def resize_and_pad(x: Tensor, scale: float, stride: int) -> Tensor:
    """`x` scaled bilinearly, then padded on the right and at the bottom to multiples of the stride."""
    if scale == 1.0:
        return x
    height, width = x.shape[-2:]
    small = F.interpolate(x, (int(height * scale), int(width * scale)), mode="bilinear", align_corners=False)
    full_height, full_width = (math.ceil(side * scale / stride) * stride for side in (height, width))
    return F.pad(small, [0, full_width - small.shape[-1], 0, full_height - small.shape[-2]], value=PADDING)


class Ensemble(nn.Module):
    """Several networks on the same images; their boxes are concatenated, for NMS to choose from."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        if len({network.nc for network in networks}) != 1:
            classes = ", ".join(str(network.nc) for network in networks)
            raise ValueError(f"the networks of an ensemble must have the same number of classes, not {classes}.")
        self.members = nn.ModuleList(networks)
        self.names = networks[-1].names
        self.stride = networks[-1].stride

    def forward(self, x: Tensor) -> Predictions:
        """Decoded boxes of all members; `raw` is empty."""
        return Predictions(torch.cat([member(x).decoded for member in self.members], 1), [])
