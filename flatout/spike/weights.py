"""Loads networks from the weights files of a spike training.

ckpts/last.pt, last.prev.pt   checkpoints to resume from (flatout.engine.checkpoints)
ckpts/best.pt                 the moving average of the best validation so far, with its config
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from flatout.errors import CheckpointError, ConfigError
from flatout.safefiles import read_container
from flatout.spike.config import ModelConfig
from flatout.spike.model import DeblurNet, network_from


class LoadedWeights(NamedTuple):
    """A network and the metadata of its file."""

    network: DeblurNet
    metadata: dict[str, Any]
    """Everything in the file beside the tensors, such as `config`."""


def load_network(path: Path) -> LoadedWeights:
    """Load the network of best.pt, or the moving average of last.pt, in evaluation mode."""
    refuse_legacy_weights(path)
    match read_container(path):
        case {"weights": {"network": dict(spec), "state": dict(state), **rest}}:
            network = _network(path, spec)
            try:
                ema = rest.get("ema")
                network.load_state_dict(ema if isinstance(ema, dict) else state)
            except RuntimeError as error:
                raise CheckpointError(
                    f"{path}: its weights do not fit the network that it describes: {error}"
                ) from None
            return LoadedWeights(network.eval(), {str(key): value for key, value in rest.items() if key != "ema"})
    raise CheckpointError(f"{path}: holds no deblurring network. Use the best.pt or last.pt of a spike training.")


def _network(path: Path, spec: Mapping[str, Any]) -> DeblurNet:
    kinds = get_args(get_type_hints(ModelConfig)["KIND"])
    model = spec.get("model")
    kind = model.get("KIND", kinds[0]) if isinstance(model, dict) else None
    if kind not in kinds:
        raise CheckpointError(
            f"{path}: its network is of the kind {kind!r:.40}, which this version of flatout does not know; it knows "
            f"{' and '.join(kinds)}. Use the version that wrote the file, or a newer one."
        )
    try:
        return network_from(spec)
    except (ConfigError, KeyError) as error:
        raise CheckpointError(
            f"{path}: describes a network that this version of flatout does not know: {error}. Use the version that "
            "wrote the file, or a newer one."
        ) from None


def refuse_legacy_weights(path: Path) -> None:
    """Raise CheckpointError for files of the early VRT-based code."""
    if path.suffix == ".pth" and path.is_file():
        raise CheckpointError(
            f"{path}: .pth files of the early VRT-based code hold another network, which is not supported. Use the "
            "best.pt or last.pt of a `flatout spike train`."
        )
