"""The modules of a model YAML: their arguments, output shapes and parameter counts, and checks of the top-level keys.

Pure arithmetic, no torch: a config is parsed, and refused if it is wrong, before anything is built. layers.py has the
torch modules of the same names.
"""

import copy
import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from flatout.errors import did_you_mean

# Arguments of a model row: numbers, lists of them, None, and a few names. Nothing is evaluated as code.
#
# YAML text               value
# None, nearest           None, "nearest"
# nc, anchors             the values in the config, after overrides
# nn.LeakyReLU(0.1)       Activation("LeakyReLU", (0.1,)), for the activations listed here


class Activation(NamedTuple):
    """An activation by its torch.nn name, with its numeric arguments."""

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
"""Name -> the largest number of arguments."""

_CALL = re.compile(r"(?:torch\.)?nn\.(\w+)\(([^()]*)\)")
# Each digit has one way to match, so that a long invalid number is refused in linear time.
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


def read_literal(value: object, names: Mapping[str, object]) -> Value:
    """The value of an argument; `names` holds the values of nc and anchors. ValueError says what is wrong."""
    if isinstance(value, list | tuple):
        return tuple(read_literal(each, names) for each in value)
    if isinstance(value, str):
        return _read_text(value.strip(), names)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a finite number")
    if value is None or isinstance(value, int | float):
        return value
    raise ValueError(f"{value!r:.80} is not a number, name, list or None")


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
    advice = did_you_mean(text, known, f"choose from {', '.join(known)}.")
    raise ValueError(f"{text[:80]!r} is not a valid argument; {advice} Arguments are never run as code")


def _read_activation(name: str, arguments: str) -> Activation:
    if name not in ACTIVATIONS:
        close = difflib.get_close_matches(name, ACTIVATIONS, n=1)
        advice = f"did you mean nn.{close[0]}()?" if close else f"choose from {', '.join(ACTIVATIONS)}."
        raise ValueError(f"nn.{name[:80]} is not a supported activation; {advice}")
    texts = [text.strip() for text in arguments.split(",")] if arguments.strip() else []
    numbers = [float(text) for text in texts if _NUMBER.fullmatch(text)]
    if len(texts) > ACTIVATIONS[name] or len(numbers) < len(texts) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"nn.{name} takes at most {ACTIVATIONS[name]} plain number(s), not {arguments[:80]!r}")
    return Activation(name, tuple(numbers))


# Modules

Args = Mapping[str, Any]
"""Arguments of a row by name, complete with defaults."""


class Shape(NamedTuple):
    """Channels, height and width of a feature map."""

    channels: int
    height: int
    width: int


class Parameter(NamedTuple):
    """An argument: its name, which values are allowed, and its default (REQUIRED if there is none)."""

    name: str
    is_allowed: Callable[[object], bool]
    allowed_values: str
    """The rule of `is_allowed` in words, for messages."""
    default: object


class ModuleSpec(NamedTuple):
    """A module: its parameters, number of inputs, output shape and number of weights."""

    parameters: tuple[Parameter, ...]
    shape: Callable[[Sequence[Shape], Args], Shape]
    num_weights: Callable[[Sequence[Shape], Args], int] = lambda ins, args: 0
    inputs: str = "one"
    """`one`, `two` or `many`."""
    scaled: bool = False
    """Whether the first argument is a number of output channels, which the width multiple scales."""
    takes_repeats: bool = False
    """Whether the repeat count is passed as an argument instead of repeating the module."""
    layers: int = 1
    """The largest number of pairs of convolution and batch norm that it can consist of."""


REQUIRED = object()
MAX_KERNEL = 127
MAX_CHANNELS = 1 << 16
MULTIHEADS = ("MultiHeadDetect", "MultiHeadDetectAttention")
"""Detection layers with several heads, each for some of the classes."""
HEADS = {"Detect": False, "IDetect": True, "IAuxDetect": True, **dict.fromkeys(MULTIHEADS, False)}
"""Detection layer -> whether it has implicit vectors."""


def _is_size(value: object, low: int) -> bool:
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value,)
    return all(is_whole(each, low, MAX_KERNEL) for each in pair)


def _channels(name: str = "c2") -> Parameter:
    return Parameter(name, lambda value: is_whole(value, 1, MAX_CHANNELS), f"1 to {MAX_CHANNELS}", REQUIRED)


def _size(name: str, default: object, low: int = 1) -> Parameter:
    return Parameter(name, lambda value: _is_size(value, low), f"{low} to {MAX_KERNEL}, or a pair of them", default)


def _count(name: str, default: object) -> Parameter:
    return Parameter(name, lambda value: is_whole(value, 1, MAX_KERNEL), f"1 to {MAX_KERNEL}", default)


def _either(name: str, allowed: tuple[object, ...], default: object) -> Parameter:
    texts = " or ".join(map(str, allowed))
    return Parameter(name, lambda value: any(value is each or value == each for each in allowed), texts, default)


_PADDING = Parameter(
    "p", lambda value: value is None or _is_size(value, 0), f"None, 0 to {MAX_KERNEL}, or a pair of them", None
)
_GROUPS = Parameter("g", lambda value: is_whole(value, 1, MAX_CHANNELS), "1 or more", 1)
_ACT = Parameter(
    "act",
    lambda value: isinstance(value, bool | Activation | None),
    "True, False or an activation such as nn.SiLU()",
    True,
)


def pair(size: Any) -> tuple[int, int]:
    """Height and width of a kernel, stride or padding given as one number or two."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def padding_of(args: Args) -> tuple[int, int]:
    """The padding argument, or half the kernel if it is None."""
    if args["p"] is not None:
        return pair(args["p"])
    height, width = pair(args["k"])
    return height // 2, width // 2


def _window_size(shape: Shape, kernel: Any, stride: Any, padding: tuple[int, int]) -> tuple[int, int]:
    """Height and width of the output of a sliding window over the padded map."""
    size = [
        (length + 2 * pad - window) // step + 1
        for length, window, step, pad in zip(shape[1:], pair(kernel), pair(stride), padding, strict=True)
    ]
    if min(size) < 1:
        raise ValueError(f"a window of {kernel} does not fit into a map of {shape.height} x {shape.width}")
    return size[0], size[1]


def _conv_weights(c1: int, c2: int, kernel: Any = 1, groups: int = 1) -> int:
    """Number of weights of a convolution without bias, and of its batch norm's weight and bias."""
    if c1 % groups or c2 % groups:
        raise ValueError(f"{c1} input and {c2} output channels cannot be divided into {groups} groups")
    return c1 // groups * c2 * math.prod(pair(kernel)) + 2 * c2


def _conv_shape(ins: Sequence[Shape], args: Args) -> Shape:
    return Shape(args["c2"], *_window_size(ins[0], args["k"], args["s"], padding_of(args)))


def _conv_count(ins: Sequence[Shape], args: Args) -> int:
    return _conv_weights(ins[0].channels, args["c2"], args["k"], args["g"])


def _rep_shape(ins: Sequence[Shape], args: Args) -> Shape:
    if args["k"] != 3 or padding_of(args) != (1, 1):
        raise ValueError("RepConv is defined for kernel 3 with padding 1 only")
    return _conv_shape(ins, args)


def _rep_count(ins: Sequence[Shape], args: Args) -> int:
    c1, c2, groups = ins[0].channels, args["c2"], args["g"]
    identity = 2 * c1 if c1 == c2 and pair(args["s"]) == (1, 1) else 0
    return _conv_weights(c1, c2, 3, groups) + _conv_weights(c1, c2, 1, groups) + identity


def _down_shape(ins: Sequence[Shape], args: Args) -> Shape:
    # Two branches, cv2 (kernel 3, stride k) and cv3 (pool k, stride k), are concatenated.
    conv = _window_size(ins[0], 3, args["k"], (1, 1))
    pool = _window_size(ins[0], args["k"], args["k"], (0, 0))
    if conv != pool:
        raise ValueError(f"its branches give maps of {conv} and {pool}, which cannot be concatenated")
    if args["c2"] % 2:
        raise ValueError(f"c2={args['c2']} must be even, as two branches share it")
    return Shape(args["c2"], *conv)


def _down_count(ins: Sequence[Shape], args: Args) -> int:
    c1, half = ins[0].channels, args["c2"] // 2
    return _conv_weights(c1, c1) + _conv_weights(c1, half, 3) + _conv_weights(c1, half)


def hidden_of(args: Args) -> int:
    """Hidden channels of SPPCSPC."""
    return int(2 * args["c2"] * args["e"])


def _sppcspc_count(ins: Sequence[Shape], args: Args) -> int:
    c1, c2, h = ins[0].channels, args["c2"], hidden_of(args)
    if h < 1:
        raise ValueError(f"e={args['e']} leaves no hidden channels")
    convs = [(c1, h, 1), (c1, h, 1), (h, h, 3), (h, h, 1), (4 * h, h, 1), (h, h, 3), (2 * h, c2, 1)]
    return sum(_conv_weights(*conv) for conv in convs)


def _concat_shape(ins: Sequence[Shape], args: Args) -> Shape:
    sizes = dict.fromkeys(f"{shape.height} x {shape.width}" for shape in ins)
    if len(sizes) > 1:
        raise ValueError(f"maps of {' and '.join(sizes)} cannot be concatenated")
    return Shape(sum(shape.channels for shape in ins), *ins[0][1:])


def _shortcut_shape(ins: Sequence[Shape], args: Args) -> Shape:
    if ins[0] != ins[1]:
        raise ValueError(f"shapes {tuple(ins[0])} and {tuple(ins[1])} cannot be added")
    return ins[0]


def _reorg_shape(ins: Sequence[Shape], args: Args) -> Shape:
    if ins[0].height % 2 or ins[0].width % 2:
        raise ValueError(f"a map of {ins[0].height} x {ins[0].width} cannot be halved evenly")
    return Shape(4 * ins[0].channels, ins[0].height // 2, ins[0].width // 2)


def _pool_shape(shape: Shape, kernel: int, stride: int, padding: int) -> Shape:
    return Shape(shape.channels, *_window_size(shape, kernel, stride, (padding, padding)))


def _upsample_shape(ins: Sequence[Shape], args: Args) -> Shape:
    return Shape(ins[0].channels, *(length * args["scale_factor"] for length in ins[0][1:]))


MODULE_SPECS = {
    "Conv": ModuleSpec(
        (_channels(), _size("k", 1), _size("s", 1), _PADDING, _GROUPS, _ACT), _conv_shape, _conv_count, scaled=True
    ),
    "RepConv": ModuleSpec(
        (_channels(), _size("k", 3), _size("s", 1), _PADDING, _GROUPS, _ACT),
        _rep_shape,
        _rep_count,
        scaled=True,
        layers=3,
    ),
    "SPPCSPC": ModuleSpec(
        (
            _channels(),
            _count("n", REQUIRED),
            _either("shortcut", (False, True), False),
            _GROUPS,
            Parameter("e", lambda value: isinstance(value, int | float) and 0 < value <= 8, "above 0, up to 8", 0.5),
            _either("k", ((5, 9, 13),), (5, 9, 13)),
        ),
        lambda ins, args: Shape(args["c2"], *ins[0][1:]),
        _sppcspc_count,
        scaled=True,
        takes_repeats=True,
        layers=7,
    ),
    "DownC": ModuleSpec(
        (_channels(), _count("n", REQUIRED), _count("k", 2)),
        _down_shape,
        _down_count,
        scaled=True,
        takes_repeats=True,
        layers=3,
    ),
    "MP": ModuleSpec((_count("k", 2),), lambda ins, args: _pool_shape(ins[0], args["k"], args["k"], 0)),
    "SP": ModuleSpec(
        (_count("k", 3), _count("s", 1)), lambda ins, args: _pool_shape(ins[0], args["k"], args["s"], args["k"] // 2)
    ),
    "ReOrg": ModuleSpec((), _reorg_shape),
    "Concat": ModuleSpec((_either("d", (1,), 1),), _concat_shape, inputs="many"),
    "Shortcut": ModuleSpec((_either("d", (0, 1), 0),), _shortcut_shape, inputs="two"),
    "nn.Upsample": ModuleSpec(
        (
            _either("size", (None,), None),
            Parameter("scale_factor", lambda value: is_whole(value, 1, 16), "1 to 16", REQUIRED),
            _either("mode", ("nearest",), "nearest"),
        ),
        _upsample_shape,
    ),
}
"""Every module that is allowed in a row before the detection layer."""


def bind(spec: ModuleSpec, values: Sequence[object]) -> dict[str, Any]:
    """Arguments by name from positional values, with defaults filled in; ValueError names the one that is wrong."""
    if len(values) > len(spec.parameters):
        raise ValueError(f"{len(values)} arguments, but the module takes at most {len(spec.parameters)}")
    args = {}
    for position, parameter in enumerate(spec.parameters):
        value = values[position] if position < len(values) else parameter.default
        if value is REQUIRED:
            raise ValueError(f"argument {parameter.name} is missing")
        if not parameter.is_allowed(value):
            raise ValueError(f"{parameter.name}={value!r:.60} is not allowed; it must be {parameter.allowed_values}")
        args[parameter.name] = value
    return args


# Top-level keys

KEYS = ("nc", "anchors", "backbone", "head", "depth_multiple", "width_multiple", "ch", "head_config")
"""Keys of a model config; the first four are required."""

MAX_ANCHORS = 64
MAX_CLASSES = 20_000


def effective_config(config: object, nc: int | None, anchors: float | None) -> dict[str, Any]:
    """A copy of the config with overrides applied and every top-level value checked."""
    if not isinstance(config, Mapping):
        raise ValueError(f"a model config is a mapping with nc, anchors, backbone and head, not {config!r:.60}")
    if unknown := [key for key in config if key not in KEYS]:
        raise ValueError(f"unknown key {unknown[0]!r:.60}{suggestion(str(unknown[0]), KEYS)}")
    if missing := [key for key in KEYS[:4] if key not in config]:
        raise ValueError(f"key {missing[0]!r} is missing; a model config needs {', '.join(KEYS[:4])}")
    kept = copy.deepcopy(dict(config))
    if nc is not None:
        kept["nc"] = nc
    if anchors is not None:
        if not is_number(anchors):
            raise ValueError(f"anchors={anchors!r:.60} must be the number of anchors per level")
        kept["anchors"] = round(anchors)
    kept.setdefault("ch", 3)
    for key in ("depth_multiple", "width_multiple"):
        kept.setdefault(key, 1.0)
        if not is_number(kept[key]) or not 0 < kept[key] <= 64:
            raise ValueError(f"{key}={kept[key]!r:.60} must be a number above 0 and at most 64")
    for key, high in (("nc", MAX_CLASSES), ("ch", MAX_CHANNELS)):
        if not is_whole(kept[key], 1, high):
            raise ValueError(f"{key}={kept[key]!r:.60} must be a whole number from 1 to {high}")
    for key in ("backbone", "head"):
        if not isinstance(kept[key], list | tuple):
            raise ValueError(f"{key} must be a list of rows [from, number, module, args], not {kept[key]!r:.60}")
    check_anchors(kept["anchors"])
    return kept


def check_anchors(anchors: object) -> None:
    if is_whole(anchors, 1, MAX_ANCHORS):
        return
    levels = anchors if isinstance(anchors, list | tuple) else []
    lengths = {len(level) if isinstance(level, list | tuple) else 0 for level in levels}
    length = lengths.pop() if len(lengths) == 1 else 0
    if not 2 <= length <= 2 * MAX_ANCHORS or length % 2:
        raise ValueError(
            f"anchors={anchors!r:.80} must be one list [w0, h0, w1, h1, ...] per level, all equally long, "
            f"or the number of anchors per level (1 to {MAX_ANCHORS})"
        )
    if bad := [size for level in levels for size in level if not is_number(size) or not 0 <= size < 1e6]:
        raise ValueError(f"anchors contain {bad[0]!r:.40}; widths and heights must be pixels, at least 0 and below 1e6")


def suggestion(word: str, known: Sequence[str]) -> str:
    return "; " + did_you_mean(word, known, f"choose from {', '.join(known)}")


def is_whole(value: object, low: float, high: float) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def is_number(value: object) -> bool:
    return is_whole(value, -math.inf, math.inf) or (isinstance(value, float) and math.isfinite(value))
