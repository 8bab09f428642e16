"""YOLOv7's pickled checkpoints as Weights, read without running anything in them.

    file --read_objects with legacy_allowlist--> plain values, tensors, PickledModule --weights_from_legacy--> Weights

Forms of a file: the dict of a training (full, or stripped when it ended), the dict of a converted network, the bare
network (`init.pt`), and a state_dict extracted from one, alone or in a dict.

The allowlist has the names that these pickles contain. Modules of the network become placeholders that keep their
attributes and have no behaviour.

Dimension key:  H heads   C classes
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, product
from operator import itemgetter
from typing import Any

from torch import Tensor

from flatout.errors import ConfigError
from flatout.safefiles import (
    DAMAGED,
    SUSPECT,
    Allowlist,
    Built,
    Make,
    Name,
    PlainReader,
    Refusal,
    Storages,
    WorkLimit,
    numpy_names,
    plain_names,
    quoted,
)
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup, head_config_of
from flatout.yolo.weights.weights import State, Weights, WeightsKind, checked_state, checked_weights

# Forms of a file

_TOP_ENTRIES = ("epoch", "best_fitness", "training_results", "updates", "optimizer", "wandb_id")
_STATE_ENTRIES = ("state_dict", "model_state_dict")
"""Keys under which other programs save a state_dict; their other entries are ignored."""
_NETWORK_ATTRIBUTES = {"yaml": "config", "names": "names", "nc": "nc", "hyp": "hyp"}


def weights_from_legacy(objects: object) -> Weights:
    """Weights from the objects of a file; Refusal says what it contains instead."""
    if isinstance(objects, PickledModule):
        return _from_dict({"model": objects}, kind="model")
    if isinstance(objects, dict) and (objects.get("model") is not None or objects.get("ema") is not None):
        return _from_dict(objects, _kind_of(objects))
    if isinstance(objects, dict) and objects and all(isinstance(value, Tensor) for value in objects.values()):
        return _from_dict({"model": objects}, kind="state_dict")
    if isinstance(objects, dict):
        for state in map(objects.get, _STATE_ENTRIES):
            if isinstance(state, dict):
                return _from_dict({"model": state}, kind="state_dict")
    raise Refusal(f"contains no network but {_describe(objects)}. Use a file with weights.")


def _from_dict(top: dict[object, object], kind: WeightsKind) -> Weights:
    reader = PlainReader()
    model, ema = (_state_in(top.get(entry), entry, reader) for entry in ("model", "ema"))
    fields = {name: reader.plain(top.get(name), name) for name in _TOP_ENTRIES}
    fields |= _attributes(top.get("ema") if model is None else top["model"], reader)
    if model is None:
        assert ema is not None, "the caller has checked that one of the two is present"
        return checked_weights(ema, None, fields, "ema", "legacy")
    return checked_weights(model, ema, fields, kind, "legacy")


def _state_in(value: object, entry: str, reader: PlainReader) -> State | None:
    if isinstance(value, PickledModule):
        value = state_of(network_inside(value))
    return None if value is None else checked_state(reader.plain(value, entry), entry)


def _attributes(model: object, reader: PlainReader) -> dict[str, object]:
    if not isinstance(model, PickledModule):
        return {}
    network = network_inside(model)
    fields = {field: reader.plain(network.attributes.get(name), field) for name, field in _NETWORK_ATTRIBUTES.items()}
    heads, config = head_config_inside(network, reader), fields["config"]
    if heads is not None and isinstance(config, dict):
        fields["config"] = config | {"head_config": heads.plain()}
    return fields


def _kind_of(top: dict[object, object]) -> WeightsKind:
    epoch = top.get("epoch")
    if top.get("optimizer") is not None or (type(epoch) is int and epoch >= 0):
        return "full"
    # A conversion for inference removes these entries; a finished training keeps them, set to None.
    return "stripped" if top.keys() & {"ema", "updates", "best_fitness", "wandb_id"} else "deploy"


def _describe(objects: object) -> str:
    if isinstance(objects, dict):
        shown = ", ".join(quoted(str(key), 30) for key in list(objects)[:5])
        return f"a dict of {shown}" if objects else "an empty dict"
    return f"a value of type {type(objects).__name__}"


# Numbers of parameters in an optimizer state
#
# The state numbers parameters consecutively over three groups: 0 batch-norm weights and implicit vectors (no decay),
# 1 all other weights (decay), 2 biases. The names follow from the state_dict alone, because its order is the order in
# which YOLOv7 iterates over the modules; only for the implicit vectors of the detection layer the multiplicative ones
# come first.


def parameter_groups(keys: Iterable[str]) -> tuple[list[str], list[str], list[str]]:
    """Parameter names of the three groups, each in the optimizer's order, from the keys of a state_dict in order."""
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


# The allowlist of names

# Any name matches: nothing of these packages is looked up or imported, so forks with their own blocks load too.
_MODULE_PACKAGES = re.compile(r"models\.(common|experimental|yolo)|torch\.nn\.modules\.\w+|torch\.nn\.parallel\.\w+")
_CLASS_NAME = re.compile(r"[A-Za-z]\w*")
_MAX_NAME = 100
HEAD_CONFIG = "utils.head_config.HeadConfig"
"""Class of the head configuration in pickled 1B4H networks; `head_config_inside` reads its attributes."""


class PickledModule(Built):
    """A placeholder for a pickled nn.Module: its attribute dict, without its class."""

    __slots__ = ("attributes", "type_name")

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name
        """For example models.common.Conv."""
        self.attributes: dict[object, object] = {}
        """As pickled. Read only: it may be shared, cyclic or huge."""

    def build(self, state: object) -> None:
        """Take the pickled attributes; Refusal if they are not a dict, or come a second time."""
        if type(state) is not dict or self.attributes:
            raise Refusal(f"its {self.type_name} has no attributes, or has them twice. {DAMAGED}")
        self.attributes = state

    def plain(self) -> object:
        raise Refusal(f"a {self.type_name} is where plain data should be. {DAMAGED}")


def legacy_allowlist(storages: Storages) -> Allowlist:
    """All names in YOLOv7 checkpoints, including those in our own files."""
    names = plain_names(storages) | numpy_names() | _torch_names()
    return Allowlist(names, family=_module_name)


# Cached, because a network refers to the same few classes a thousand times.
@lru_cache(maxsize=256)
def _module_name(module: str, name: str) -> Name | None:
    type_name = f"{module}.{name}"
    if len(type_name) > _MAX_NAME:
        return None
    if not (_MODULE_PACKAGES.fullmatch(module) and _CLASS_NAME.fullmatch(name)) and type_name != HEAD_CONFIG:
        return None
    return Name(type_name, lambda arguments: PickledModule(type_name))


def _torch_names() -> dict[str, Make | None]:
    return {
        # Attributes of wrappers for several GPUs, and the path of a head configuration; nothing here reads them.
        "torch.device": lambda arguments: None,
        "pathlib.PosixPath": lambda arguments: None,
        "pathlib.WindowsPath": lambda arguments: None,
    }


# The state_dict of a pickled network, from its placeholders, in the order of nn.Module

MAX_MODULES_AND_TENSORS = 200_000
MAX_DEPTH = 32


def network_inside(module: PickledModule) -> PickledModule:
    """The network itself, without wrappers for several GPUs."""
    for _ in range(MAX_DEPTH):
        inner = _children(module).get("module")
        if not isinstance(inner, PickledModule) or "yaml" in module.attributes:
            return module
        module = inner
    raise Refusal(f"its network has more than {MAX_DEPTH} wrappers. {DAMAGED}")


def state_of(module: PickledModule) -> dict[str, Tensor]:
    """Key -> tensor in state_dict order: parameters and persistent buffers of a module, then its children."""
    budget = WorkLimit(MAX_MODULES_AND_TENSORS, "modules and tensors")
    state: dict[str, Tensor] = {}
    for key, tensor in _walk(module, "", budget, depth=0):
        if key in state:
            raise Refusal(f"its network has two tensors named {quoted(key)}. {DAMAGED}")
        state[key] = tensor
    return state


def _walk(module: PickledModule, prefix: str, budget: WorkLimit, depth: int) -> Iterator[tuple[str, Tensor]]:
    if depth > MAX_DEPTH:
        raise Refusal(f"its network is nested deeper than {MAX_DEPTH} levels or contains itself. {SUSPECT}")
    transient = module.attributes.get("_non_persistent_buffers_set", ())
    for group in ("_parameters", "_buffers"):
        for name, value in _entries(module, group, budget):
            # An absent bias is stored as None.
            if value is None or (group == "_buffers" and isinstance(transient, set) and name in transient):
                continue
            if not isinstance(value, Tensor):
                raise Refusal(f"its {quoted(prefix + name)} is a {type(value).__name__}, not a tensor. {DAMAGED}")
            yield prefix + name, value.detach()
    for name, child in _entries(module, "_modules", budget):
        if isinstance(child, PickledModule):
            yield from _walk(child, f"{prefix}{name}.", budget, depth + 1)
        elif child is not None:
            raise Refusal(f"its {quoted(prefix + name)} is a {type(child).__name__}, not a module. {DAMAGED}")


def _children(module: PickledModule) -> dict[object, object]:
    children = module.attributes.get("_modules")
    return children if isinstance(children, dict) else {}


def _entries(module: PickledModule, group: str, budget: WorkLimit) -> Iterator[tuple[str, object]]:
    entries = module.attributes.get(group, {})
    if not isinstance(entries, dict):
        raise Refusal(f"its {module.type_name} has {group} that are not a dict. {DAMAGED}")
    for name, value in entries.items():
        budget.spend(1)
        # Names are joined level by level, so a long one would be copied at every level.
        if type(name) is not str or len(name) > 100:
            raise Refusal(f"its {module.type_name} has {group} with invalid names. {DAMAGED}")
        yield name, value


# The head configuration of a pickled 1B4H network
#
# The original program saves an object of its class `HeadConfig` with the network. Here it is a placeholder with
# attributes. Their names differ between versions, so they are recognised by their content: the content of the YAML, or
# lists of classes per head that together contain every class, or maps from classes to heads and to positions in them.

MAX_MODULES = 5_000
MAX_ATTRIBUTES = 64


def head_config_inside(network: PickledModule, reader: PlainReader) -> HeadConfig | None:
    """The head configuration of a pickled network, or None if it has none; Refusal if it is invalid."""
    for module in _modules(network):
        for value in module.attributes.values():
            if isinstance(value, PickledModule) and value.type_name == HEAD_CONFIG:
                return _parse_head_config({str(name): each for name, each in value.attributes.items()}, reader)
    return None


def _modules(network: PickledModule) -> Iterator[PickledModule]:
    """The network and all modules inside it; at most MAX_MODULES, which ends a network that contains itself."""
    waiting = [network]
    for _ in range(MAX_MODULES):
        if not waiting:
            return
        module = waiting.pop()
        yield module
        room = MAX_MODULES - len(waiting)
        waiting += [child for child in _children(module).values() if isinstance(child, PickledModule)][:room]


def _parse_head_config(attributes: Mapping[str, object], reader: PlainReader) -> HeadConfig:
    plain = dict(_plain_attributes(attributes, reader))
    if len(plain) > MAX_ATTRIBUTES:
        raise Refusal(f"its head configuration has {len(plain)} attributes. {SUSPECT}")
    full_head = plain.get("full_head") is True
    try:
        for value in plain.values():
            if isinstance(value, dict) and "head_assignments" in value:
                return head_config_of(value, where="its head configuration", full_head=full_head or None)
        classes_H = _classes_by_head(plain)
        if classes_H is not None:
            weight_H = _weight_by_head(plain, len(classes_H))
            groups = tuple(HeadGroup(tuple(each), weight) for each, weight in zip(classes_H, weight_H, strict=True))
            nc = sum(map(len, classes_H))
            return HeadConfig(nc, groups, str(plain.get("grouping", "standard")), full_head)
    except ConfigError as error:
        raise Refusal(f"{error} Use --cfg with a model config that has a valid `head_config`.") from None
    raise Refusal(
        "its head configuration has an unknown format. Use --cfg with a model config that has a `head_config`."
    )


def _plain_attributes(attributes: Mapping[str, object], reader: PlainReader) -> Iterator[tuple[str, Any]]:
    for name, value in attributes.items():
        try:
            yield name, reader.plain(value, name)
        except Refusal:
            continue  # such as the path of the file, which is not needed


def _classes_by_head(plain: Mapping[str, Any]) -> list[list[int]] | None:
    """Lists of classes per head that together contain 0 to nc - 1, each once."""
    for value in plain.values():
        lists = _in_order(value)
        if lists is not None and all(isinstance(each, list | tuple) and each for each in lists):
            together = [class_id for each in lists for class_id in each]
            is_whole = all(type(class_id) is int for class_id in together)
            if is_whole and sorted(together) == list(range(len(together))):
                return [list(each) for each in lists]
    return _classes_from_maps(plain)


def _classes_from_maps(plain: Mapping[str, Any]) -> list[list[int]] | None:
    """Lists of classes per head from two maps of all classes: to heads, and to positions in them."""
    maps = [_in_order(value) for value in plain.values()]
    numbers = [each for each in maps if each and all(type(number) is int for number in each)]
    for head_C, local_C in product(numbers, repeat=2):
        if len(head_C) == len(local_C):
            places = sorted(zip(head_C, local_C, range(len(head_C)), strict=True))
            by_head = [list(group) for _, group in groupby(places, key=itemgetter(0))]
            numbered = ((head, local) for head, group in enumerate(by_head) for local in range(len(group)))
            if all(place[:2] == pair for place, pair in zip(places, numbered, strict=True)):
                return [[class_id for *_, class_id in group] for group in by_head]
    return None


def _in_order(value: object) -> Sequence[Any] | None:
    """The items of a list, or of a dict whose keys are 0, 1, ... or head_0, head_1, ..."""
    if isinstance(value, list | tuple):
        return value
    if isinstance(value, dict) and value:
        for keys in (range(len(value)), [f"head_{head}" for head in range(len(value))]):
            if set(value) == set(keys):
                return [value[key] for key in keys]
    return None


def _weight_by_head(plain: Mapping[str, Any], num_heads: int) -> list[float]:
    for name, value in plain.items():
        numbers = _in_order(value) if "weight" in name else None
        if numbers and len(numbers) == num_heads and all(isinstance(each, int | float) for each in numbers):
            return [float(each) for each in numbers]
    return [1.0] * num_heads
