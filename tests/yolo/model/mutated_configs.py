"""Valid model configs with random changes: values in their tree, or words in their text."""

import copy
import random
import re
from typing import Any

from flatout.yolo.model.module_specs import HEADS, MODULE_SPECS

VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 3, 7, 8, 64, 10**9, -(10**30), 1.0, 0.5, -2.5, 1e300, float("nan"), float("inf")),
    *("", "None", "nc", "anchors", "nearest", "nn.SiLU()", "nn.ELU(2)", "nn.__class__", "__import__('os')", "\n", "ü"),
    *(
        [],
        [1],
        [3, 3],
        [-1, -2],
        [[]],
        [None],
        {},
        {"nc": 1},
        [-1, 1, "Conv", [64, 1, 1]],
        [[-1, -2], 1, "Concat", [1]],
    ),
)
WORDS = (
    "nc",
    "None",
    "-1",
    "0",
    "[",
    "]",
    "{",
    "}",
    ":",
    "-",
    ",",
    "&a",
    "*a",
    "!!int",
    "<<",
    "'",
    "\t",
    "#",
    "1e9",
    "~",
)

Item = tuple[Any, Any]
"""A list or dict, and the index or key of one of its items."""


def mutated_tree(config: dict[Any, Any], rng: random.Random) -> dict[Any, Any]:
    """A copy of a parsed config with one to three changes."""
    config = copy.deepcopy(config)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        # Most values are numbers, and a config with a nearby number is most likely to remain valid.
        rng.choice((_nudge, _nudge, _nudge, _replace, _rename, _swap, _drop, _repeat, _misspell))(config, rng)
    return config


def mutated_text(text: str, rng: random.Random) -> str:
    """YAML text with one to three of its words changed."""
    words = re.findall(r"[\w.+-]+|\s+|.", text)
    for _ in range(rng.choice((1, 1, 2, 3))):
        index, other = rng.randrange(len(words)), rng.randrange(len(words))
        match rng.randrange(5):
            case 0:
                words[index], words[other] = words[other], words[index]
            case 1:
                words[index] = words[other]
            case 2:
                words[index] = rng.choice(WORDS)
            case 3:
                words[index] = ""
            case 4:
                words[index] += words[other]
    return "".join(words)


def _items(container: Any) -> list[Item]:
    """Every item of a tree, at any depth."""
    keys = list(container) if isinstance(container, dict) else range(len(container))
    below = [_items(container[key]) for key in keys if isinstance(container[key], dict | list)]
    return [*((container, key) for key in keys), *(item for items in below for item in items)]


def _pick(config: Any, rng: random.Random, *types: type) -> Item | None:
    items = [(each, key) for each, key in _items(config) if not types or type(each[key]) in types]
    return rng.choice(items) if items else None


def _nudge(config: Any, rng: random.Random) -> None:
    if item := _pick(config, rng, int, float):
        container, key = item
        value = container[key]
        container[key] = rng.choice((value + 1, value - 1, value * 2, value // 2, -value, value + 8, 1, 2))


def _replace(config: Any, rng: random.Random) -> None:
    if item := _pick(config, rng):
        container, key = item
        container[key] = copy.deepcopy(rng.choice(VALUES))


def _rename(config: Any, rng: random.Random) -> None:
    if item := _pick(config, rng, str):
        container, key = item
        container[key] = rng.choice((*MODULE_SPECS, *HEADS))


def _swap(config: Any, rng: random.Random) -> None:
    if item := _pick(config, rng):
        container, key = item
        other = rng.choice(list(container) if isinstance(container, dict) else range(len(container)))
        container[key], container[other] = container[other], container[key]


def _drop(config: Any, rng: random.Random) -> None:
    if item := _pick(config, rng):
        container, key = item
        del container[key]


def _repeat(config: Any, rng: random.Random) -> None:
    if (item := _pick(config, rng)) and isinstance(item[0], list):
        container, key = item
        container.insert(key, copy.deepcopy(container[key]))


def _misspell(config: Any, rng: random.Random) -> None:
    if item := _pick(config, rng, str):
        container, key = item
        text = container[key]
        cut = rng.randrange(len(text) + 1)
        container[key] = text[:cut] + rng.choice("xR(.1_ ") + text[cut + rng.randrange(2) :]
