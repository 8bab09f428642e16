"""The head configuration inside a pickled 1B4H network, as our own.

The reference saves an object of its class `HeadConfig` with the network. Here it is a placeholder with attributes; what
they are called differs between versions, so they are recognised by what they hold: the YAML's content, or lists of
classes per head that share out all classes, or maps from classes to heads and places.

Dimension key:  H heads
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatout.engine.checkpoint.plain import PlainReader
from flatout.engine.checkpoint.refusal import SUSPECT, Refusal
from flatout.errors import ConfigError
from flatout.yolo.compat.legacy_names import HEAD_CONFIG, ModuleStandIn
from flatout.yolo.model.head_config import HeadConfig, HeadGroup, head_config_of

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
