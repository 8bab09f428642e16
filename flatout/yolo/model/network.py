"""A blueprint as a torch module: rows run in order, each reading the outputs it names.

picture [B, C, H, W], 0..1 --rows--> maps --head--> training: raw predictions; evaluation: Predictions

Boxes from several views of a picture, and from several networks: test-time augmentation and ensembles.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.layers import Detect, IAuxDetect, IDetect, Predictions, make_layer
from flatout.yolo.model.module_specs import KINDS
from flatout.yolo.model.spec import IMAGE, Head, ModelSpec, Row, needed_rows, parse_model
from flatout.yolo.multihead.head_config import HeadConfig
from flatout.yolo.multihead.layer import MultiHeadDetect, MultiHeadDetectAttention

# Weights in the format that autocast computes in, all with one call.
#
# Autocast copies every weight by itself when its convolution runs, and every gradient back: 210 small kernels of a
# step of YOLOv7, each of which costs the host as much as a large one. The numbers are the same either way.


@contextmanager
def weights_cast(convolutions: Iterable[nn.Conv2d], device: torch.device) -> Iterator[None]:
    """In the block, under autocast, the convolutions have weights that need no cast; what they learn goes to their own.

    Ranks send gradients off while the backward pass goes on, and these would all come at its end: there, nothing is
    changed.
    """
    learning = [each for each in convolutions if each.weight.requires_grad] if _pays(device) else []
    own = [each.weight for each in learning]
    if learning:
        for each, cast in zip(learning, _CastAll.apply(torch.get_autocast_dtype(device.type), *own), strict=True):
            _set_weight(each, cast)
    try:
        yield
    finally:
        for each, weight in zip(learning, own, strict=True):
            _set_weight(each, weight)


def _set_weight(convolution: nn.Conv2d, weight: Tensor) -> None:
    # Past its setter, which takes parameters only; a cast is none, or it would be trained in their place.
    convolution._parameters["weight"] = weight  # type: ignore[assignment]


def _pays(device: torch.device) -> bool:
    # The device of shapes alone has no autocast. (torch 2.11 cannot compile a question which devices have one.)
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
    copies: list[Tensor] = copy(list(tensors), dtype)
    return copies


def _copy_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    copies = _like_all(tensors, dtype)
    torch._foreach_copy_(copies, tensors)
    return copies


def _like_all(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(each, dtype=dtype) for each in tensors]


# An operator that torch.compile does not look into: of what it sees it makes a kernel per tensor.
_library = torch.library.Library("flatout", "FRAGMENT")
_library.define("copied(Tensor[] tensors, ScalarType dtype) -> Tensor[]", tags=torch.Tag.pt2_compliant_tag)
_library.impl("copied", _copy_all, "CompositeExplicitAutograd")
torch.library.register_fake("flatout::copied", _like_all, lib=_library)


DETECTION_LAYERS: dict[str, type[Detect]] = {
    "Detect": Detect,
    "IDetect": IDetect,
    "IAuxDetect": IAuxDetect,
    "MultiHeadDetect": MultiHeadDetect,
    "MultiHeadDetectAttention": MultiHeadDetectAttention,
}
"""Detection layers by the name a config gives them."""


def build_network(
    config: object,
    *,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadConfig | None = None,
    where: str = "model config",
) -> "Network":
    """A fresh network from the content of a model YAML; overrides as in `parse_model`."""
    return Network(parse_model(config, nc=nc, anchors=anchors, heads=heads, where=where))


class Network(nn.Module):
    """A detection network. Its state_dict names are `model.<row>.<inner name>`, as in YOLOv7's checkpoints."""

    def __init__(self, blueprint: ModelSpec) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.names = [str(index) for index in range(blueprint.head.num_classes)]
        self.model = nn.Sequential(
            *map(_make_row, blueprint.rows), DETECTION_LAYERS[blueprint.head.kind](blueprint.head)
        )
        head = blueprint.head
        self._training_steps = _schedule((*blueprint.rows, head))
        # Outside of training nobody reads the auxiliary outputs, so the rows that only serve them are left out.
        lead = needed_rows(blueprint.rows, head.lead_sources)
        kept = [row for row in blueprint.rows if row.index in lead]
        self._lead_steps = _schedule((*kept, replace(head, sources=head.lead_sources)))
        self.head.start()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                _start_batch_norm(module)
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # Not those of the head, which are put together from several weights before they are cast.
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
        """The model YAML this network was built from, with overrides in force."""
        return self.blueprint.config

    def forward(self, x: Tensor) -> list[Tensor] | Predictions:
        if not self.training:
            return self._run(x)
        with weights_cast(self._convolutions, x.device):
            return self._run(x)

    def _run(self, x: Tensor) -> list[Tensor] | Predictions:
        maps = {IMAGE: x}
        result = None
        for step in self._training_steps if self.training else self._lead_steps:
            inputs = [maps[source] for source in step.sources]
            for source in step.released:
                del maps[source]
            # By name, because a Sequential walks to an index, and torch.compile would trace every step of the walk.
            result = getattr(self.model, str(step.row))(inputs if step.joins else inputs[0])
            maps[step.row] = result
        return result  # type: ignore[return-value]


class _Step(NamedTuple):
    """A row as it is run."""

    row: int
    sources: tuple[int, ...]
    released: tuple[int, ...]
    """Maps that nobody reads after this row."""
    joins: bool
    """Does it take the list of its inputs, and not just one?"""


def _schedule(rows: Sequence[Row | Head]) -> tuple[_Step, ...]:
    last_reader = {source: row.index for row in rows for source in row.sources}
    return tuple(
        _Step(
            row.index,
            row.sources,
            tuple(source for source in sorted(set(row.sources)) if last_reader[source] == row.index),
            joins=row.kind not in KINDS or KINDS[row.kind].inputs != "one",
        )
        for row in rows
    )


def _make_row(row: Row) -> nn.Module:
    layers = [make_layer(row.kind, row.ins[0].channels, row.args) for _ in range(row.repeats)]
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _start_batch_norm(norm: nn.BatchNorm2d) -> None:
    """As after one training step on a black picture, which is how YOLOv7 measures its strides."""
    assert norm.running_var is not None and norm.num_batches_tracked is not None
    norm.running_var.fill_(0.9)
    norm.num_batches_tracked.fill_(1)
    norm.eps, norm.momentum = 1e-3, 0.03


VIEWS = ((1.0, False), (0.83, True), (0.67, False))
"""Scale and left-right flip of each view."""

PADDING = 0.447
"""Grey of the padding: the mean brightness of ImageNet."""


def predict_augmented(network: nn.Module, x: Tensor, largest_stride: int) -> Tensor:
    """Boxes of all views in the frame of `x` [B, C, H, W], view after view, [B, K, O]."""
    width = x.shape[-1]
    return torch.cat([_boxes_of_view(network, x, scale, flip, largest_stride, width) for scale, flip in VIEWS], 1)


def _boxes_of_view(network: nn.Module, x: Tensor, scale: float, flip: bool, stride: int, width: int) -> Tensor:
    view = resize_and_pad(x.flip(-1) if flip else x, scale, stride)
    prediction: Predictions = network(view)
    centre, size, scores = prediction.decoded.split((2, 2, prediction.decoded.shape[-1] - 4), -1)
    # By the nominal scale, although the view's sides were rounded: YOLOv7 does so, and golden `tta` pins it.
    centre, size = centre / scale, size / scale
    if flip:
        centre = torch.stack((width - centre[..., 0], centre[..., 1]), -1)
    return torch.cat((centre, size, scores), -1)


def resize_and_pad(x: Tensor, scale: float, stride: int) -> Tensor:
    """`x` scaled bilinearly, then padded on the right and below to multiples of the stride."""
    if scale == 1.0:
        return x
    height, width = x.shape[-2:]
    small = F.interpolate(x, (int(height * scale), int(width * scale)), mode="bilinear", align_corners=False)
    full_height, full_width = (math.ceil(side * scale / stride) * stride for side in (height, width))
    return F.pad(small, [0, full_width - small.shape[-1], 0, full_height - small.shape[-2]], value=PADDING)


class Ensemble(nn.Module):
    """Several networks that look at the same picture; their boxes stand side by side for NMS to choose from."""

    def __init__(self, networks: Sequence[Network]) -> None:
        super().__init__()
        if len({network.nc for network in networks}) != 1:
            classes = ", ".join(str(network.nc) for network in networks)
            raise ValueError(f"the networks of an ensemble must know the same classes, not {classes} of them.")
        self.members = nn.ModuleList(networks)
        self.names = networks[-1].names
        self.stride = networks[-1].stride

    def forward(self, x: Tensor) -> Predictions:
        """Decoded boxes of all members; `raw` is empty."""
        return Predictions(torch.cat([member(x).decoded for member in self.members], 1), [])
