"""What an argument in a model row may say: numbers, lists of them, None, and a few names. Nothing is evaluated.

YAML text               value
None, nearest           None, "nearest"
nc, anchors             what the config says, after overrides
nn.LeakyReLU(0.1)       Activation("LeakyReLU", (0.1,)), for the activations listed here
"""

import difflib
import math
import re
from collections.abc import Mapping
from typing import NamedTuple, TypeAlias


class Activation(NamedTuple):
    """An activation by its torch.nn name, with the numbers it is made with."""

    name: str
    numbers: tuple[float, ...] = ()


Value: TypeAlias = "int | float | bool | str | Activation | tuple[Value, ...] | None"

ACTIVATIONS = {
    "SiLU": 0,
    "LeakyReLU": 1,
    "ReLU": 0,
    "ReLU6": 0,
    "Hardswish": 0,
    "Identity": 0,
    "Mish": 0,
    "GELU": 0,
    "ELU": 1,
}
"""Name -> how many numbers it may take."""

_CALL = re.compile(r"(?:torch\.)?nn\.(\w+)\(([^()]*)\)")
# Each digit has one way to match: a long number that is none is refused in linear time.
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def read_literal(value: object, names: Mapping[str, object]) -> Value:
    """The value an argument stands for; `names` are nc and anchors. ValueError says what is wrong with it."""
    if isinstance(value, list | tuple):
        return tuple(read_literal(each, names) for each in value)
    if isinstance(value, str):
        return _read_text(value.strip(), names)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if value is None or isinstance(value, int | float):
        return value
    raise ValueError(f"{value!r:.80} is no number, name, list or None")


def _read_text(text: str, names: Mapping[str, object]) -> Value:
    if text in names:
        return read_literal(names[text], {})
    if text == "None":
        return None
    if text == "nearest":
        return text
    if call := _CALL.fullmatch(text):
        return _read_activation(call[1], call[2])
    known = [*names, "None", "nearest", *(f"nn.{name}()" for name in ACTIVATIONS)]
    close = difflib.get_close_matches(text, known, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}."
    raise ValueError(f"{text[:80]!r} means nothing here; {advice} Arguments are never run as code")


def _read_activation(name: str, arguments: str) -> Activation:
    if name not in ACTIVATIONS:
        close = difflib.get_close_matches(name, ACTIVATIONS, n=1)
        advice = f"did you mean nn.{close[0]}()?" if close else f"known are {', '.join(ACTIVATIONS)}."
        raise ValueError(f"nn.{name[:80]} is no activation flatout knows; {advice}")
    texts = [text.strip() for text in arguments.split(",")] if arguments.strip() else []
    numbers = [float(text) for text in texts if _NUMBER.fullmatch(text)]
    if len(texts) > ACTIVATIONS[name] or len(numbers) < len(texts) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"nn.{name} takes at most {ACTIVATIONS[name]} plain number(s), not {arguments[:80]!r}")
    return Activation(name, tuple(numbers))
