"""What YOLOv7 saved, in its various forms, as Weights.

Forms: the dict of a training (full, or stripped when it ended), the dict of a converted network, the bare network
(`init.pt`), and a state_dict that somebody took out of one, alone or in a dict.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from flatout.errors import ConfigError
from flatout.safefiles import DAMAGED, SUSPECT, Budget, PlainReader, Refusal, quoted
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup, head_config_of
from flatout.yolo.weights.legacy_names import HEAD_CONFIG, ModuleStandIn
from flatout.yolo.weights.weights import Kind, State, Weights, checked_state, checked_weights

# The state_dict of a pickled network, by walking its placeholders as nn.Module would walk its children.

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


# The head configuration inside a pickled 1B4H network, as our own.
#
# The reference saves an object of its class `HeadConfig` with the network. Here it is a placeholder with attributes;
# what they are called differs between versions, so they are recognised by what they hold: the YAML's content, or lists
# of classes per head that share out all classes, or maps from classes to heads and places.
#
# Dimension key:  H heads

MAX_MODULES = 5_000
MAX_ATTRIBUTES = 64


def head_config_inside(network: ModuleStandIn, reader: PlainReader) -> HeadConfig | None:
    """The head configuration of a pickled network; None if it has none. A Refusal if it makes no sense."""
    for module in _modules(network):
        for value in module.attributes.values():
            if isinstance(value, ModuleStandIn) and value.type_name == HEAD_CONFIG:
                return _understood({str(name): each for name, each in value.attributes.items()}, reader)
    return None


def _modules(network: ModuleStandIn) -> Iterator[ModuleStandIn]:
    """The network and the modules in it; one that contains itself ends at MAX_MODULES."""
    waiting = [network]
    for _ in range(MAX_MODULES):
        if not waiting:
            return
        module = waiting.pop()
        yield module
        children = module.attributes.get("_modules")
        if isinstance(children, dict):
            room = MAX_MODULES - len(waiting)
            waiting += [child for child in children.values() if isinstance(child, ModuleStandIn)][:room]


def _understood(attributes: Mapping[str, object], reader: PlainReader) -> HeadConfig:
    plain = dict(_plain_ones(attributes, reader))
    if len(plain) > MAX_ATTRIBUTES:
        raise Refusal(f"its head configuration has {len(plain)} attributes. {SUSPECT}")
    full_head = plain.get("full_head") is True
    try:
        for value in plain.values():
            if isinstance(value, dict) and "head_assignments" in value:
                return head_config_of(value, where="its head configuration", full_head=full_head or None)
        classes_H = _classes_by_head(plain)
        if classes_H is not None:
            weight_H = _numbers_by_head(plain, "weight", len(classes_H))
            groups = tuple(HeadGroup(tuple(each), weight) for each, weight in zip(classes_H, weight_H, strict=True))
            nc = sum(map(len, classes_H))
            return HeadConfig(nc, groups, str(plain.get("grouping", "standard")), full_head)
    except ConfigError as error:
        raise Refusal(f"{error} Give a model config with a sound `head_config` by --cfg.") from None
    raise Refusal("its head configuration is not one we understand. Give a model config with a `head_config` by --cfg.")


def _plain_ones(attributes: Mapping[str, object], reader: PlainReader) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        try:
            yield name, reader.plain(value, name)
        except Refusal:
            continue  # such as the path of the file, which nobody needs


def _classes_by_head(plain: Mapping[str, Any]) -> list[list[int]] | None:
    """Lists of classes per head that share out 0 to nc - 1."""
    for value in plain.values():
        lists = _in_order(value)
        if lists is not None and all(isinstance(each, list | tuple) and each for each in lists):
            together = [class_id for each in lists for class_id in each]
            is_whole = all(type(class_id) is int for class_id in together)
            if is_whole and sorted(together) == list(range(len(together))):
                return [list(each) for each in lists]
    return _from_maps(plain)


def _from_maps(plain: Mapping[str, Any]) -> list[list[int]] | None:
    """From two maps of all classes: one to heads, one to places within them."""
    maps = [_in_order(value) for value in plain.values()]
    numbers = [each for each in maps if each and all(type(number) is int for number in each)]
    for head_C in numbers:
        for local_C in numbers:
            if len(local_C) != len(head_C) or min(head_C) < 0 or max(head_C) >= len(head_C):
                continue
            pairs = sorted(zip(head_C, local_C, range(len(head_C)), strict=True))
            lists: list[list[int]] = [[] for _ in range(max(head_C) + 1)]
            if all(_appended(lists[head], local, class_id) for head, local, class_id in pairs) and all(lists):
                return lists
    return None


def _appended(classes: list[int], local: int, class_id: int) -> bool:
    if local != len(classes):
        return False
    classes.append(class_id)
    return True


def _in_order(value: object) -> Sequence[Any] | None:
    """The items of a list, or of a dict whose keys are 0, 1, ... or head_0, head_1, ..."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict) and value:
        for keys in (range(len(value)), [f"head_{head}" for head in range(len(value))]):
            if set(value) == set(keys):
                return [value[key] for key in keys]
    return None


def _numbers_by_head(plain: Mapping[str, Any], word: str, num_heads: int) -> list[float]:
    for name, value in plain.items():
        numbers = _in_order(value)
        fits = word in name and numbers is not None and len(numbers) == num_heads
        if fits and numbers is not None and all(isinstance(each, int | float) for each in numbers):
            return [float(each) for each in numbers]
    return [1.0] * num_heads


_TOP_ENTRIES = ("epoch", "best_fitness", "training_results", "updates", "optimizer", "wandb_id")
_STATE_ENTRIES = ("state_dict", "model_state_dict")
"""Under which other programs save one; what they save beside it is theirs."""
_NETWORK_ATTRIBUTES = {"yaml": "config", "names": "names", "nc": "nc", "hyp": "hyp"}


def weights_from_legacy(objects: object) -> Weights:
    """Weights from the objects of a file; a Refusal says what it holds instead."""
    if isinstance(objects, ModuleStandIn):
        return _from_dict({"model": objects}, kind="model")
    if isinstance(objects, dict) and (objects.get("model") is not None or objects.get("ema") is not None):
        return _from_dict(objects, _kind_of(objects))
    if isinstance(objects, dict) and objects and all(isinstance(value, Tensor) for value in objects.values()):
        return _from_dict({"model": objects}, kind="state_dict")
    if isinstance(objects, dict):
        for state in map(objects.get, _STATE_ENTRIES):
            if isinstance(state, dict):
                return _from_dict({"model": state}, kind="state_dict")
    raise Refusal(f"holds no network but {_described(objects)}. Give a file with weights.")


def _from_dict(top: dict[object, object], kind: Kind) -> Weights:
    reader = PlainReader()
    model, ema = (_state_in(top.get(entry), entry, reader) for entry in ("model", "ema"))
    fields = {name: reader.plain(top.get(name), name) for name in _TOP_ENTRIES}
    fields |= _attributes(top.get("ema") if model is None else top["model"], reader)
    if model is None:
        assert ema is not None, "one of the two is there"
        return checked_weights(ema, None, fields, "ema", "legacy")
    return checked_weights(model, ema, fields, kind, "legacy")


def _state_in(value: object, entry: str, reader: PlainReader) -> State | None:
    if isinstance(value, ModuleStandIn):
        value = state_of(network_inside(value))
    return None if value is None else checked_state(reader.plain(value, entry), entry)


def _attributes(model: object, reader: PlainReader) -> dict[str, object]:
    if not isinstance(model, ModuleStandIn):
        return {}
    network = network_inside(model)
    fields = {field: reader.plain(network.attributes.get(name), field) for name, field in _NETWORK_ATTRIBUTES.items()}
    heads, config = head_config_inside(network, reader), fields["config"]
    if heads is not None and isinstance(config, dict):
        fields["config"] = config | {"head_config": heads.plain()}
    return fields


def _kind_of(top: dict[object, object]) -> Kind:
    epoch = top.get("epoch")
    if top.get("optimizer") is not None or (type(epoch) is int and epoch >= 0):
        return "full"
    # The conversion for inference leaves these out; a training that ended keeps them, emptied.
    return "stripped" if top.keys() & {"ema", "updates", "best_fitness", "wandb_id"} else "deploy"


def _described(objects: object) -> str:
    if isinstance(objects, dict):
        shown = ", ".join(quoted(str(key), 30) for key in list(objects)[:5])
        return f"a dict of {shown}" if objects else "an empty dict"
    return f"a value of type {type(objects).__name__}"
