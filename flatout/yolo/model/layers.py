"""The modules of a model row, except detection layers. State_dict names are those of YOLOv7's checkpoints.

Maps are [B, C, H, W] floats in either memory format; channels_last goes through unchanged, and is what a GPU wants.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.yolo.model.module_specs import Activation, Args, hidden_of, padding_of
from flatout.yolo.model.norm_act import norm_act
from flatout.yolo.model.pooling import max_pool, max_pool_same


def make_activation(act: bool | Activation | None) -> nn.Module:
    """True is SiLU; False and None are the identity."""
    if isinstance(act, Activation):
        module: nn.Module = getattr(nn, act.name)(*act.numbers)
        return module
    return nn.SiLU() if act else nn.Identity()


class Conv(nn.Module):
    """act(bn(conv(x))); once fused, act(conv(x)) with the batch norm inside the convolution."""

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
        y: Tensor = self.conv(x)
        if self.bn is not None:
            return norm_act(y, self.bn, self.act)
        z: Tensor = self.act(y)
        return z


class RepConv(nn.Module):
    """act(3x3 + 1x1 + identity), each with its own batch norm; once fused, a single 3x3 convolution."""

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
        """The branches that there are, added up."""
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
    """Spatial pyramid pooling between two paths that are concatenated at the end."""

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
        # A maximum over 9 is one over 5 of maxima over 5, and so on: the same numbers from smaller windows.
        pool5 = max_pool_same(x1, 5)
        pool9 = max_pool_same(pool5, 5)
        pool13 = max_pool_same(pool9, 5)
        y1 = self.cv6(self.cv5(torch.cat((x1, pool5, pool9, pool13), 1)))
        y: Tensor = self.cv7(torch.cat((y1, self.cv2(x)), 1))
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
        return torch.cat((self.cv2(self.cv1(x)), self.cv3(max_pool(x, self.k))), 1)


class MP(nn.Module):
    """Max-pool with kernel and stride k."""

    def __init__(self, k: int = 2) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: Tensor) -> Tensor:
        return max_pool(x, self.k)


class SP(nn.Module):
    """Max-pool with kernel k and stride s that keeps the middle of the window on the map."""

    def __init__(self, k: int = 3, s: int = 1) -> None:
        super().__init__()
        self.k, self.s = k, s

    def forward(self, x: Tensor) -> Tensor:
        if self.s == 1:
            return max_pool_same(x, self.k)
        return F.max_pool2d(x, self.k, self.s, self.k // 2)


class ReOrg(nn.Module):
    """Pixels of each 2 x 2 square to channels; the square's second row comes before its second column."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)


class Concat(nn.Module):
    """Maps beside each other, along the channels."""

    def __init__(self, d: int = 1) -> None:
        super().__init__()

    def forward(self, xs: list[Tensor]) -> Tensor:
        return torch.cat(xs, 1)


class Shortcut(nn.Module):
    """The sum of two maps; the argument is accepted, and means nothing."""

    def __init__(self, d: int = 0) -> None:
        super().__init__()

    def forward(self, xs: list[Tensor]) -> Tensor:
        return xs[0] + xs[1]


MADE_WITH_CHANNELS: dict[str, type[nn.Module]] = {"Conv": Conv, "RepConv": RepConv, "SPPCSPC": SPPCSPC, "DownC": DownC}
MADE_WITHOUT: dict[str, type[nn.Module]] = {
    "MP": MP,
    "SP": SP,
    "ReOrg": ReOrg,
    "Concat": Concat,
    "Shortcut": Shortcut,
    "nn.Upsample": nn.Upsample,
}


def make_layer(kind: str, c1: int, args: Args) -> nn.Module:
    """The module of a row; `args` are complete and checked (module_specs.py)."""
    if kind in MADE_WITH_CHANNELS:
        return MADE_WITH_CHANNELS[kind](c1, **args)
    return MADE_WITHOUT[kind](**args)
