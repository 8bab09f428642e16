"""Which parameter the numbers in a YOLOv7 optimizer state mean.

The state numbers parameters consecutively over three groups: 0 batch-norm weights and implicit vectors (no decay),
1 all other weights (decay), 2 biases. Names follow from the state_dict alone, because its order is the order in which
YOLOv7 walks the modules; only the implicit vectors of the detection layer are taken multiplicative ones first.
"""

from collections.abc import Iterable


def parameter_groups(keys: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Parameter names of the three groups, each in the optimizer's order; `keys` is a state_dict's, in its order."""
    ordered = list(keys)
    known = set(ordered)
    weights = [key for key in ordered if key.endswith(".weight")]
    is_norm = {key: key.removesuffix("weight") + "running_mean" in known for key in weights}
    implicit = [key for part in (".im.", ".ia.") for key in ordered if part in key and key.endswith(".implicit")]
    return (
        [key for key in weights if is_norm[key]] + implicit,
        [key for key in weights if not is_norm[key]],
        [key for key in ordered if key.endswith(".bias")],
    )
