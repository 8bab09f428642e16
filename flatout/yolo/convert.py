"""Weights from one form to another: any file to safetensors or to a file of ours, a training network to deploy form.

source --read--> Weights --moving average or network--> [deploy form, compared] --> [half precision] --> out
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from flatout.errors import CheckpointError
from flatout.yolo.find_file import check_out, weights_file
from flatout.yolo.load_network import network_of
from flatout.yolo.model.deploy import largest_difference, to_deploy
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import small_side
from flatout.yolo.weights import State, Weights, read_weights, save_safetensors, save_weights

WRITERS: dict[str, Callable[[Path, Weights], None]] = {".safetensors": save_safetensors, ".pt": save_weights}

SAME_PX = 1e-6
"""Boxes that differ by more than this, in float64, are not the same boxes."""


class Agreement(NamedTuple):
    """Largest difference between the boxes of a training network and those of its deploy form, in pixels or score."""

    exact: float
    """Both in float64: is the conversion right?"""
    stored: float
    """With the deploy weights as rounded in the file."""


@dataclass(frozen=True)
class Conversion:
    """What was written."""

    out: Path
    num_bytes: int
    num_tensors: int
    taken: str
    """`moving average`, `network` or `everything`."""
    dtype: str
    """Of the floating-point tensors."""
    agreement: Agreement | None
    """Of a conversion to deploy form."""


def convert_weights(
    source: str | Path,
    out: str | Path,
    *,
    deploy: bool = False,
    half: bool = False,
    ema: bool | None = None,
    cfg: str | Path | None = None,
    force: bool = False,
) -> Conversion:
    """Write the weights of `source` to `out`, whose ending says the format: .safetensors or .pt (ours).

    `ema` takes only the moving average (True) or only the network itself (False). By default a .pt keeps all that the
    source holds, and the other forms take the moving average where there is one. The deploy form needs a model config:
    the one in the file or `cfg`, which is then stored beside the weights.
    """
    out = Path(out)
    check_out(out, force=force)
    source = weights_file(source, flag="")
    weights = read_weights(source)
    taken = "network" if weights.ema is None or ema is False else "moving average"
    if ema is None and not deploy and out.suffix == ".pt":
        taken = "everything"
    else:
        weights = only_network(weights, ema, source)
    agreement = None
    if deploy or cfg is not None:
        network = network_of(weights, weights.for_inference(), where=source, cfg=cfg)
        weights = replace(weights, config=network.config, names=network.names, nc=network.nc)
    if deploy:
        weights, agreement = _deployed(weights, network, torch.float16 if half else torch.float32, source)
    elif half:
        average = weights.ema and _rounded(weights.ema, torch.float16, source)
        weights = replace(weights, state=_rounded(weights.state, torch.float16, source), ema=average)
    try:
        WRITERS[out.suffix](out, weights)
    except TypeError as error:
        told = str(error).removesuffix(".")
        raise CheckpointError(
            f"{source}: holds what no {out.suffix} can hold, so nothing was written: {told}."
        ) from None
    state = weights.for_inference()
    return Conversion(out, out.stat().st_size, len(state), taken, _dtype(state), agreement)


def only_network(weights: Weights, ema: bool | None, source: str | Path) -> Weights:
    """The weights for inference without the state of their training; `ema` as in `convert_weights`."""
    if ema and weights.ema is None:
        raise CheckpointError(f"{source}: holds no moving average beside its network. Leave --ema out.")
    state = weights.state if ema is False else weights.for_inference()
    return replace(
        weights, state=state, ema=None, kind="stripped", epoch=-1, updates=None, optimizer=None, training_results=None
    )


def _deployed(weights: Weights, network: Network, dtype: torch.dtype, source: str | Path) -> tuple[Weights, Agreement]:
    """The deploy form, computed in float64 and then rounded, after a look at its boxes."""
    network.double()
    try:
        deployed = to_deploy(network)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    side_px = small_side(network.spec, max(128, 2 * int(network.stride.max())))
    exact = largest_difference(network, deployed, side_px=side_px)
    if not exact <= SAME_PX:
        raise CheckpointError(
            f"{source}: its deploy form gives other boxes (by {exact:.2g}), so nothing was written. "
            "Are all of its weights finite numbers?"
        )
    state = _rounded(deployed.state_dict(), dtype, source)
    deployed.load_state_dict(state)
    stored = largest_difference(network, deployed, side_px=side_px)
    converted = replace(weights, state=state, config=deployed.config, kind="deploy")
    return converted, Agreement(exact, stored)


def _rounded(state: State, dtype: torch.dtype, source: str | Path) -> State:
    """The floating-point tensors in another precision; CheckpointError if it cannot hold one of them."""
    rounded = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    for key, tensor in state.items():
        if (rounded[key].isinf() & ~tensor.isinf()).any():
            raise CheckpointError(
                f"{source}: {key} holds {tensor.abs().max():.3g}, which {_name(dtype)} cannot. Convert without --half."
            )
    return rounded


def _dtype(state: State) -> str:
    return ", ".join(sorted({_name(tensor.dtype) for tensor in state.values() if tensor.is_floating_point()}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
