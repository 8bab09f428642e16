"""Convert weights: any supported file to safetensors or to the .pt of flatout, a training network to deploy form.

source --read--> Weights --moving average or network--> [deploy form, compared] --> [half precision] --> out
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from flatout.errors import CheckpointError
from flatout.yolo.find_file import check_output_name, weights_file
from flatout.yolo.load_network import network_of
from flatout.yolo.model.deploy import largest_difference, to_deploy
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import small_side
from flatout.yolo.weights import State, Weights, read_weights, save_safetensors, save_weights

WRITERS: dict[str, Callable[[Path, Weights], None]] = {".safetensors": save_safetensors, ".pt": save_weights}

SAME_PX = 1e-6
"""Largest difference, in float64, between boxes that count as the same."""


class Agreement(NamedTuple):
    """Largest difference between the boxes of a training network and those of its deploy form, in pixels or score."""

    exact: float
    """Both networks in float64, to verify the conversion."""
    stored: float
    """With the deploy weights rounded as in the file."""


@dataclass(frozen=True)
class Conversion:
    """The result of a conversion."""

    out: Path
    num_bytes: int
    num_tensors: int
    taken: str
    """What was written: `moving average`, `network` or `everything`."""
    dtype: str
    """Type of the floating-point tensors."""
    agreement: Agreement | None
    """None without a conversion to deploy form."""


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
    """Write the weights of `source` to `out`, whose ending selects the format: .safetensors, or .pt of flatout.

    `ema` selects only the moving average (True) or only the network itself (False). By default a .pt keeps everything
    in the source, and the other forms take the moving average if there is one. The deploy form needs a model config:
    the one in the file, or `cfg`, which is then stored with the weights.
    """
    out = Path(out)
    check_output_name(out, force=force)
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
        reason = str(error).removesuffix(".")
        raise CheckpointError(
            f"{source}: contains something that a {out.suffix} file cannot store, so nothing was written: {reason}."
        ) from None
    state = weights.for_inference()
    return Conversion(out, out.stat().st_size, len(state), taken, _dtype(state), agreement)


def only_network(weights: Weights, ema: bool | None, source: str | Path) -> Weights:
    """The weights for inference, without training state; `ema` as in `convert_weights`."""
    if ema and weights.ema is None:
        raise CheckpointError(f"{source}: contains no moving average, only a network. Leave out --ema.")
    state = weights.state if ema is False else weights.for_inference()
    return replace(
        weights, state=state, ema=None, kind="stripped", epoch=-1, updates=None, optimizer=None, training_results=None
    )


def _deployed(weights: Weights, network: Network, dtype: torch.dtype, source: str | Path) -> tuple[Weights, Agreement]:
    """The deploy form, computed and compared in float64, then rounded."""
    network.double()
    try:
        deployed = to_deploy(network)
    except ValueError as error:
        raise CheckpointError(f"{source}: {error}") from None
    side_px = small_side(network.spec, max(128, 2 * int(network.stride.max())))
    exact = largest_difference(network, deployed, side_px=side_px)
    if not exact <= SAME_PX:
        raise CheckpointError(
            f"{source}: its deploy form gives different boxes (by {exact:.2g}), so nothing was written. "
            "Are all of its weights finite numbers?"
        )
    state = _rounded(deployed.state_dict(), dtype, source)
    deployed.load_state_dict(state)
    stored = largest_difference(network, deployed, side_px=side_px)
    converted = replace(weights, state=state, config=deployed.config, kind="deploy")
    return converted, Agreement(exact, stored)


def _rounded(state: State, dtype: torch.dtype, source: str | Path) -> State:
    """The state with floating-point tensors in another precision; CheckpointError if a value is too large for it."""
    rounded = {key: tensor.to(dtype) if tensor.is_floating_point() else tensor for key, tensor in state.items()}
    for key, tensor in state.items():
        if (rounded[key].isinf() & ~tensor.isinf()).any():
            raise CheckpointError(
                f"{source}: the tensor {key} contains {tensor.abs().max():.3g}, which is too large for "
                f"{_name(dtype)}. Convert without --half."
            )
    return rounded


def _dtype(state: State) -> str:
    return ", ".join(sorted({_name(tensor.dtype) for tensor in state.values() if tensor.is_floating_point()}))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
