"""Files of weights: what each holds, and how a network comes out of one.

ckpts/last.pt, last.prev.pt   everything, to continue from (flatout.engine.checkpoints)
ckpts/best.pt                 the best average so far, with the config it needs
"""

from pathlib import Path
from typing import Any, NamedTuple

from flatout.errors import CheckpointError
from flatout.safefiles import read_container
from flatout.spike.model import DeblurNet, network_from


class Loaded(NamedTuple):
    """A network out of a file, and what the file says about it."""

    network: DeblurNet
    about: dict[str, Any]


def load_network(path: Path) -> Loaded:
    """From best.pt or last.pt: of the latter its moving average."""
    refuse_early(path)
    match read_container(path):
        case {"weights": {"network": dict(about), "state": dict(state), **rest}}:
            network = network_from(about)
            try:
                ema = rest.get("ema")
                network.load_state_dict(ema if isinstance(ema, dict) else state)
            except RuntimeError as error:
                raise CheckpointError(f"{path}: its weights do not fit the network it describes: {error}") from None
            return Loaded(network.eval(), {str(key): value for key, value in rest.items() if key != "ema"})
    raise CheckpointError(f"{path}: holds no deblurring network. Name the best.pt or last.pt of a spike training.")


def refuse_early(path: Path) -> None:
    """CheckpointError for files of the code before this one."""
    if path.suffix == ".pth" and path.is_file():
        raise CheckpointError(
            f"{path}: .pth files of the early VRT-based code hold another network, which is not built here. Name the "
            "best.pt or last.pt of a `flatout spike train`."
        )
