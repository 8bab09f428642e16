"""The state_dict of a pickled network, by walking its placeholders as nn.Module would walk its children."""

from collections.abc import Iterator

from torch import Tensor

from flatout.engine.checkpoint.refusal import DAMAGED, SUSPECT, Budget, Refusal, quoted
from flatout.yolo.compat.legacy_names import ModuleStandIn

MAX_MODULES_AND_TENSORS = 200_000
MAX_DEPTH = 32


def network_inside(module: ModuleStandIn) -> ModuleStandIn:
    """The network itself, where it was saved inside a wrapper for several GPUs."""
    for _ in range(MAX_DEPTH):
        inner = _children(module).get("module")
        if not isinstance(inner, ModuleStandIn) or "yaml" in module.attributes:
            return module
        module = inner
    raise Refusal(f"its network is wrapped without end. {DAMAGED}")


def state_of(module: ModuleStandIn) -> dict[str, Tensor]:
    """Key -> tensor in state_dict order: parameters and persistent buffers of a module, then its children."""
    budget = Budget(MAX_MODULES_AND_TENSORS, "modules and tensors")
    state: dict[str, Tensor] = {}
    for key, tensor in _walk(module, "", budget, depth=0):
        if key in state:
            raise Refusal(f"its network has two tensors called {quoted(key)}. {DAMAGED}")
        state[key] = tensor
    return state


def _walk(module: ModuleStandIn, prefix: str, budget: Budget, depth: int) -> Iterator[tuple[str, Tensor]]:
    if depth > MAX_DEPTH:
        raise Refusal(f"its network is nested deeper than {MAX_DEPTH} levels or contains itself. {SUSPECT}")
    transient = module.attributes.get("_non_persistent_buffers_set", ())
    for group in ("_parameters", "_buffers"):
        for name, value in _entries(module, group, budget):
            # A bias that is not there is stored as None.
            if value is None or (group == "_buffers" and isinstance(transient, set) and name in transient):
                continue
            if not isinstance(value, Tensor):
                raise Refusal(f"its {quoted(prefix + name)} is a {type(value).__name__}, no tensor. {DAMAGED}")
            yield prefix + name, value.detach()
    for name, child in _entries(module, "_modules", budget):
        if isinstance(child, ModuleStandIn):
            yield from _walk(child, f"{prefix}{name}.", budget, depth + 1)
        elif child is not None:
            raise Refusal(f"its {quoted(prefix + name)} is a {type(child).__name__}, no module. {DAMAGED}")


def _children(module: ModuleStandIn) -> dict[object, object]:
    children = module.attributes.get("_modules")
    return children if isinstance(children, dict) else {}


def _entries(module: ModuleStandIn, group: str, budget: Budget) -> Iterator[tuple[str, object]]:
    entries = module.attributes.get(group, {})
    if not isinstance(entries, dict):
        raise Refusal(f"its {module.type_name} has {group} that are no dict. {DAMAGED}")
    for name, value in entries.items():
        budget.spend(1)
        # Names are joined on the way down, so a long one would be copied at every level.
        if type(name) is not str or len(name) > 100:
            raise Refusal(f"its {module.type_name} has {group} without proper names. {DAMAGED}")
        yield name, value
