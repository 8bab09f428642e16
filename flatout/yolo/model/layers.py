"""The torch modules of model rows and of single-head detection layers, with the state_dict names of YOLOv7.

    rows                feature maps [B, C, H, W] in and out
    detection layers    feature maps in; raw predictions out in training, boxes in pixels out otherwise

Maps are floats in either memory format. channels_last is preserved, and is the fast one on a GPU.

Dimension key:  B images   C channels   H, W height and width of a map   A anchors per level
                Y, X rows and columns of a level   O = 5 + classes: (x, y, w, h, objectness, classes ...)
                K = sum over levels of A * Y * X
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.convolutions import conv_norm_act, predict
from flatout.yolo.model.copies import concat, double
from flatout.yolo.model.fused import norm_act, norm_act_pair, suits_norm_act
from flatout.yolo.model.module_specs import Activation, Args, hidden_of, padding_of
from flatout.yolo.model.pooling import max_pool, max_pool_same
from flatout.yolo.model.spec import Head

# Modules of rows


def make_activation(act: bool | Activation | None) -> nn.Module:
    """The activation module: SiLU for True, the identity for False and None."""
    if isinstance(act, Activation):
        module: nn.Module = getattr(nn, act.name)(*act.numbers)
        return module
    return nn.SiLU() if act else nn.Identity()


class Conv(nn.Module):
    """act(bn(conv(x))); after fusing, act(conv(x)) with the batch norm folded into the convolution."""

    def __init__(
        self,
        c1: int,
        c2: int,
        k: int | tuple[int, int] = 1,
        s: int | tuple[int, int] = 1,
        p: int | tuple[int, int] | None = None,
        g: int = 1,
        act: bool | Activation | None = True,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, padding_of({"k": k, "p": p}), groups=g, bias=False)
        self.bn: nn.BatchNorm2d | None = nn.BatchNorm2d(c2)
        self.act = make_activation(act)

    def forward(self, x: Tensor) -> Tensor:
        if self.bn is not None:
            return conv_norm_act(x, self.conv, self.bn, self.act)
        z: Tensor = self.act(self.conv(x))
        return z


def suits_pair(x: Tensor, first: Conv, second: Conv) -> bool:
    """Whether our kernels compute two 1 x 1 convolutions of a map together: it is read once, and so is its gradient."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return False
    return all(suits_norm_act(x, each.bn, each.act) and each.conv.out_channels % 8 == 0 for each in (first, second))


def conv_pair(x: Tensor, first: Conv, second: Conv) -> tuple[Tensor, Tensor]:
    """first(x) and second(x)."""
    assert first.bn is not None and second.bn is not None
    y = F.conv2d(x, torch.cat((first.conv.weight, second.conv.weight)))
    return norm_act_pair(y, (first.bn, second.bn), (first.act, second.act))


class RepConv(nn.Module):
    """act(3x3 + 1x1 + identity), each with its own batch norm; after fusing, a single 3x3 convolution."""

    def __init__(
        self,
        c1: int,
        c2: int,
        k: int = 3,
        s: int | tuple[int, int] = 1,
        p: int | tuple[int, int] | None = None,
        g: int = 1,
        act: bool | Activation | None = True,
    ) -> None:
        super().__init__()
        self.act = make_activation(act)
        has_identity = c1 == c2 and s in (1, (1, 1))
        self.rbr_identity = nn.BatchNorm2d(c1) if has_identity else None
        self.rbr_dense: nn.Sequential | None = _conv_bn(c1, c2, k, s, 1, g)
        self.rbr_1x1: nn.Sequential | None = _conv_bn(c1, c2, 1, s, 0, g)
        self.rbr_reparam: nn.Conv2d | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(self._sum(x) if self.rbr_reparam is None else self.rbr_reparam(x))
        return y

    def _sum(self, x: Tensor) -> Tensor:
        """The sum of the branches."""
        assert self.rbr_dense is not None and self.rbr_1x1 is not None
        y = _normed(self.rbr_dense, x) + _normed(self.rbr_1x1, x)
        return y if self.rbr_identity is None else y + norm_act(x, self.rbr_identity, LINEAR)


LINEAR = nn.Identity()


def _normed(branch: nn.Sequential, x: Tensor) -> Tensor:
    conv, norm = branch
    assert isinstance(norm, nn.BatchNorm2d | nn.SyncBatchNorm)
    return norm_act(conv(x), norm, LINEAR)


def _conv_bn(c1: int, c2: int, k: int, s: int | tuple[int, int], p: int, g: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(c1, c2, k, s, p, groups=g, bias=False), nn.BatchNorm2d(c2))


class SPPCSPC(nn.Module):
    """Spatial pyramid pooling on one of two paths that are concatenated at the end."""

    def __init__(
        self,
        c1: int,
        c2: int,
        n: int = 1,
        shortcut: bool = False,
        g: int = 1,
        e: float = 0.5,
        k: tuple[int, ...] = (5, 9, 13),
    ) -> None:
        super().__init__()
        h = hidden_of({"c2": c2, "e": e})
        self.cv1 = Conv(c1, h)
        self.cv2 = Conv(c1, h)
        self.cv3 = Conv(h, h, 3)
        self.cv4 = Conv(h, h)
        self.cv5 = Conv(4 * h, h)
        self.cv6 = Conv(h, h, 3)
        self.cv7 = Conv(2 * h, c2)

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.cv4(self.cv3(self.cv1(x)))
        # A maximum over 9 is a maximum over 5 of maxima over 5, and so on: the same numbers from smaller windows.
        pool5 = max_pool_same(x1, 5)
        pool9 = max_pool_same(pool5, 5)
        pool13 = max_pool_same(pool9, 5)
        y1 = self.cv6(self.cv5(concat((x1, pool5, pool9, pool13))))
        y: Tensor = self.cv7(concat((y1, self.cv2(x))))
        return y


class DownC(nn.Module):
    """Halves the map on two paths: strided convolution, and max-pool with 1x1 convolution."""

    def __init__(self, c1: int, c2: int, n: int = 1, k: int = 2) -> None:
        super().__init__()
        self.k = k
        self.cv1 = Conv(c1, c1)
        self.cv2 = Conv(c1, c2 // 2, 3, k)
        self.cv3 = Conv(c1, c2 // 2)

    def forward(self, x: Tensor) -> Tensor:
        return concat((self.cv2(self.cv1(x)), self.cv3(max_pool(x, self.k))))


class MP(nn.Module):
    """Max-pool with kernel and stride k."""

    def __init__(self, k: int = 2) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return max_pool(x, self.k)


class SP(nn.Module):
    """Max-pool with kernel k, stride s and padding k // 2."""

    def __init__(self, k: int = 3, s: int = 1) -> None:
        super().__init__()
        self.k, self.s = k, s

    def forward(self, x: Tensor, narrower: Tensor | None = None, narrower_k: int = 1) -> Tensor:
        """`narrower` is the same map after an SP with a smaller kernel, if the network has one."""
        if self.s == 1:
            return max_pool_same(x, self.k, narrower, narrower_k)
        return F.max_pool2d(x, self.k, self.s, self.k // 2)


class ReOrg(nn.Module):
    """Each 2 x 2 square of pixels moved into the channels; the second row of the square precedes its second column."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)


class Concat(nn.Module):
    """Concatenation along the channels."""

    def __init__(self, d: int = 1) -> None:
        super().__init__()

    def forward(self, xs: list[Tensor]) -> Tensor:
        return concat(xs)


class Upsample(nn.Upsample):
    """nn.Upsample, with our kernel for the nearest neighbour and a factor of 2."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "nearest" and self.scale_factor == 2:
            return double(x)
        return super().forward(x)


class Shortcut(nn.Module):
    """The sum of two maps; the argument is accepted and ignored."""

    def __init__(self, d: int = 0) -> None:
        super().__init__()

    def forward(self, xs: list[Tensor]) -> Tensor:
        return xs[0] + xs[1]


LAYERS: dict[str, type[nn.Module]] = {
    layer.__name__: layer for layer in (Conv, RepConv, SPPCSPC, DownC, MP, SP, ReOrg, Concat, Shortcut)
} | {"nn.Upsample": Upsample}
WITH_CHANNELS = (Conv, RepConv, SPPCSPC, DownC)
"""Layers whose constructor takes the number of input channels."""


def make_layer(module: str, c1: int, args: Args) -> nn.Module:
    """The module of a row with `c1` input channels; `args` are complete and checked (module_specs.py)."""
    layer = LAYERS[module]
    return layer(c1, **args) if issubclass(layer, WITH_CHANNELS) else layer(**args)


# Detection layers


class Predictions(NamedTuple):
    """The output of a network in evaluation mode."""

    decoded: Tensor
    """[B, K, O]: cx, cy, w, h in pixels of the input, then objectness and class scores in 0..1; float32 or float64."""
    raw: list[Tensor]
    """Per level [B, A, Y, X, O], as in training."""


class Implicit(nn.Module):
    """A learned vector, initially near `mean`: 0 to be added to the channels of a map, 1 to multiply them."""

    def __init__(self, channels: int, mean: float) -> None:
        super().__init__()
        self.implicit = nn.Parameter(torch.zeros(1, channels, 1, 1))
        nn.init.normal_(self.implicit, mean, 0.02)


class Detect(nn.Module):
    """A detection layer with one 1x1 convolution per level."""

    anchors: Tensor
    """[levels, A, 2] in cells of the level; used by the loss."""
    anchor_grid: Tensor
    """[levels, 1, A, 1, 1, 2] in pixels; used to decode."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.nc, self.nl = head.num_classes, head.num_levels
        self.no = self.nc + 5
        self.na = head.num_anchors
        self.strides = head.strides
        anchors_px = torch.tensor(head.anchors_px).view(self.nl, self.na, 2)
        self.register_buffer("anchors", anchors_px)
        self.register_buffer("anchor_grid", anchors_px.clone().view(self.nl, 1, self.na, 1, 1, 2))
        self._add_convolutions(head)

    def _add_convolutions(self, head: Head) -> None:
        self.m = prediction_convs(head.channels[: self.nl], head.num_outputs)

    @property
    def stride(self) -> Tensor:
        """Strides of the levels, float32 on the CPU."""
        return torch.tensor(self.strides)

    def forward(self, xs: list[Tensor]) -> list[Tensor] | Predictions:
        raw = [self.split_outputs(self.predict(level, x)) for level, x in enumerate(xs[: self.nl])]
        return raw if self.training else Predictions(self.decode(raw), raw)

    @torch.no_grad()
    def initialise(self) -> None:
        """Initialise: anchors from pixels to cells, biases to a prior of few objects."""
        self.anchors /= self.stride.view(-1, 1, 1)
        for convs in self._prediction_convs():
            for conv, stride in zip(convs, self.strides, strict=True):
                assert isinstance(conv.bias, Tensor)
                bias_AO = conv.bias.view(self.na, -1)
                bias_AO[:, 4] += math.log(8 / (640 / stride) ** 2)
                bias_AO[:, 5:] += math.log(0.6 / (bias_AO.shape[1] - 5 - 0.99))

    def _prediction_convs(self) -> list[nn.ModuleList]:
        """All lists of prediction convolutions, one for each level."""
        return [self.m]

    def predict(self, level: int, x: Tensor) -> Tensor:
        """Raw outputs of a lead level, [B, A * O, Y, X]."""
        return predict(x, *self.folded_weights(level))

    def folded_weights(self, level: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of a lead level's convolution, with all linear operations around it folded in."""
        conv = self.m[level]
        assert isinstance(conv, nn.Conv2d) and conv.bias is not None
        return conv.weight, conv.bias

    def split_outputs(self, x: Tensor) -> Tensor:
        """[B, A * O, Y, X] -> [B, A, Y, X, O], in memory [B, Y, X, A, O]: a view of a channels_last map."""
        outputs: Tensor = x.permute(0, 2, 3, 1).contiguous()
        return outputs.view(*outputs.shape[:3], self.na, self.no).permute(0, 3, 1, 2, 4)

    def decode(self, raw: list[Tensor]) -> Tensor:
        """Raw maps of all levels, without auxiliary ones -> boxes in pixels and scores from 0 to 1, [B, K, O]."""
        levels = [
            # By index: iteration would export a Split of constants, which OpenCV cannot read.
            decode_level(raw_BAYXO, self.anchor_grid[level], stride)
            for level, (raw_BAYXO, stride) in enumerate(zip(raw, self.strides, strict=True))
        ]
        return torch.cat(levels, 1)


def predict_by(conv: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(conv, nn.Conv2d) and conv.bias is not None
    return predict(x, conv.weight, conv.bias)


def prediction_convs(channels: tuple[int, ...], num_outputs: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Conv2d(each, num_outputs, 1) for each in channels)


def decode_level(raw_BAYXO: Tensor, anchor_px: Tensor, stride: float) -> Tensor:
    """Boxes and scores of one level, [B, A * Y * X, O]; `anchor_px` is [1, A, 1, 1, 2]."""
    # In half precision a coordinate of 600 px would be rounded to 4 px (bf16) or 0.5 px (fp16).
    dtype = torch.promote_types(raw_BAYXO.dtype, torch.float32)
    batch, _, height, width, num_outputs = raw_BAYXO.shape
    score = raw_BAYXO.to(dtype).sigmoid()
    rows = torch.arange(height, device=score.device, dtype=dtype)
    columns = torch.arange(width, device=score.device, dtype=dtype)
    cell_YX2 = torch.stack((columns.expand(height, width), rows[:, None].expand(height, width)), -1)
    centre = (score[..., :2] * 2 - 0.5 + cell_YX2) * stride
    size = (score[..., 2:4] * 2) ** 2 * anchor_px.to(dtype)
    return torch.cat((centre, size, score[..., 4:]), -1).reshape(batch, -1, num_outputs)


class IDetect(Detect):
    """A detection layer that computes im * m(x + ia) per level, with learned vectors ia and im.

    All of it is linear, so every call folds the vectors into the convolution's weights: some thousand numbers instead
    of two passes over the maps. Fusing folds them in permanently.
    """

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self.ia = nn.ModuleList(Implicit(each, 0.0) for each in head.channels[: self.nl])
        self.im = nn.ModuleList(Implicit(head.num_outputs, 1.0) for _ in range(self.nl))
        self.fused = False

    def folded_weights(self, level: int) -> tuple[Tensor, Tensor]:
        weight, bias = super().folded_weights(level)
        if self.fused:
            return weight, bias
        add, scale = self.ia[level].implicit, self.im[level].implicit
        assert isinstance(add, Tensor) and isinstance(scale, Tensor)
        # Not a matrix product, which autocast would compute in half precision.
        shift = (weight * add).sum((1, 2, 3))
        return weight * scale.view(-1, 1, 1, 1), (bias + shift) * scale.flatten()


class IAuxDetect(IDetect):
    """IDetect with auxiliary predictions from the second half of its inputs, in training only and not after fusing."""

    def _add_convolutions(self, head: Head) -> None:
        super()._add_convolutions(head)
        self.m2 = prediction_convs(head.channels[self.nl :], head.num_outputs)

    def _prediction_convs(self) -> list[nn.ModuleList]:
        return [self.m, self.m2]

    def forward(self, xs: list[Tensor]) -> list[Tensor] | Predictions:
        lead = super().forward(xs)
        if isinstance(lead, Predictions) or self.fused:
            return lead
        return lead + [self.split_outputs(predict_by(conv, x)) for conv, x in zip(self.m2, xs[self.nl :], strict=True)]
