"""Model configs that are wrong or malicious: name -> YAML text, and words that the error message must contain."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

ROWS = (
    "[-1, 1, Conv, [8, 3, 2]]",  # 0, stride 2
    "[-1, 1, Conv, [16, 3, 2]]",  # 1, stride 4
    "[-1, 1, MP, []]",  # 2, stride 8
    "[-1, 1, Conv, [16, 3, 1]]",  # 3
    "[-1, 1, Conv, [16, 3, 2]]",  # 4, stride 16
    "[-1, 1, nn.Upsample, [None, 2, nearest]]",  # 5, stride 8
    "[[-1, 3], 1, Concat, [1]]",  # 6
    "[-1, 1, Conv, [16, 1, 1]]",  # 7
    "[[7, 4], 1, Detect, [nc, anchors]]",  # 8
)
NUM_BACKBONE_ROWS = 5
LAST = len(ROWS) - 1
TOP = {"nc": "3", "anchors": "[[10,13, 16,30], [33,23, 30,61]]"}


class Hostile(NamedTuple):
    """A config, and words that its error message must contain."""

    text: str
    words: tuple[str, ...]


def config(rows: Mapping[int, str] | None = None, /, **top: str | None) -> str:
    """A small valid config as YAML text, with some rows replaced, and top-level keys replaced, added or (None) left
    out."""
    lines = [f"- {(rows or {}).get(index, row)}" for index, row in enumerate(ROWS)]
    keys = TOP | {"backbone": _below(lines[:NUM_BACKBONE_ROWS]), "head": _below(lines[NUM_BACKBONE_ROWS:])} | top
    return "\n".join(f"{key}: {value}" for key, value in keys.items() if value is not None)


def _below(lines: Sequence[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)


def rows_only(rows: Sequence[str], **top: str) -> str:
    """A config of these rows before the detection layer, which reads the last of them."""
    return config(backbone=_below([f"- {row}" for row in rows]), head="\n  - [[-1], 1, Detect, [nc, anchors]]", **top)


def in_row(index: int, row: str, *words: str) -> Hostile:
    return Hostile(config({index: row}), (f"row {index} ", *words))


def argument(value: str, *words: str) -> Hostile:
    """A config with a value in the place of Conv's activation."""
    return in_row(3, f"[-1, 1, Conv, [16, 3, 1, None, 1, {value}]]", *words)


def key(name: str, value: str | None, *words: str) -> Hostile:
    return Hostile(config(**{name: value}), words)


NEVER_RUN = "Arguments are never run as code."
BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "\n".join(
    f"{name}: &{name} [{', '.join([f'*{previous}'] * 10)}]"
    for previous, name in zip("abcdefgh", "bcdefghi", strict=True)
)

HOSTILE: dict[str, Hostile] = {
    # Graph
    "reads itself": in_row(3, "[3, 1, Conv, [16, 3, 1]]", "from=3 is row 3; it must name an earlier row, 0 to 2."),
    "reads a later row": in_row(3, "[7, 1, Conv, [16, 3, 1]]", "from=7 is row 7; it must name an earlier row"),
    "cycle of two": Hostile(
        config({2: "[3, 1, MP, []]", 3: "[2, 1, Conv, [16, 3, 1]]"}), ("row 2 ", "from=3 is row 3")
    ),
    "from beyond the end": in_row(6, "[[-1, 99], 1, Concat, [1]]", "from=99 is row 99", "0 to 5."),
    "from before the start": in_row(1, "[-3, 1, Conv, [16, 3, 2]]", "from=-3 is row -2"),
    "first row reads a row": in_row(0, "[0, 1, Conv, [8, 3, 2]]", "the first row can only read the image, -1."),
    "from huge": in_row(1, f"[-{'9' * 60}, 1, Conv, [16, 3, 2]]", "must name an earlier row"),
    "from text": in_row(1, "[previous, 1, Conv, [16, 3, 2]]", "from='previous' must be a single row number."),
    "from a fraction": in_row(1, "[-1.0, 1, Conv, [16, 3, 2]]", "from=-1.0 must be a single row number."),
    "from a boolean": in_row(1, "[true, 1, Conv, [16, 3, 2]]", "from=True must be a single row number."),
    "from null": in_row(1, "[null, 1, Conv, [16, 3, 2]]", "from=None must be a single row number."),
    "from a list for one": in_row(1, "[[-1], 1, Conv, [16, 3, 2]]", "from=[-1] must be a single row number."),
    "from empty": in_row(6, "[[], 1, Concat, [1]]", "from=[] must be a list of rows."),
    "from one for Shortcut": in_row(6, "[[-1], 1, Shortcut, [1]]", "must be a list of two rows."),
    "from nested": in_row(6, "[[[-1, 3]], 1, Concat, [1]]", "must be a list of rows."),
    # Repeats and size
    "million repeats": in_row(3, "[-1, 1000000, Conv, [16, 3, 1]]", "number=1000000 must be a whole number from 1 to"),
    "repeats by depth": Hostile(
        config({3: "[-1, 1900, Conv, [16, 3, 1]]"}, depth_multiple="64"), ("row 3 ", "121600 repeats are too many")
    ),
    "repeats in many rows": Hostile(
        rows_only(["[-1, 900, SP, [3]]"] * 3), ("row 2 ", "a network has at most 2000 layers in all.")
    ),
    "layers inside many rows": Hostile(
        rows_only(["[-1, 1, SPPCSPC, [8]]"] * 300), ("row 285 ", "the network would have more than 2,000 layers.")
    ),
    "repeats of three layers each": in_row(3, "[-1, 700, RepConv, [16]]", "more than 2,000 layers."),
    "no repeats": in_row(3, "[-1, 0, Conv, [16, 3, 1]]", "number=0 must be a whole number"),
    "repeats text": in_row(3, "[-1, n, Conv, [16, 3, 1]]", "number='n' must be a whole number"),
    "repeats change the width": in_row(1, "[-1, 3, Conv, [16, 3, 1]]", "8 -> 16", "write them as separate rows."),
    "repeats of a Concat": in_row(6, "[[-1, 3], 2, Concat, [1]]", "2 repeats need"),
    "huge channels": in_row(3, "[-1, 1, Conv, [1000000000, 3, 1]]", "c2=1000000000 is not allowed; it must be 1 to"),
    "too many parameters": Hostile(
        rows_only(["[-1, 1, Conv, [65536, 1]]", "[-1, 1, Conv, [65536, 7]]"]),
        ("row 1 ", "the network would have more than 4,000,000,000 parameters."),
    ),
    "growing upsamples": Hostile(
        rows_only(["[-1, 1, nn.Upsample, [None, 16, nearest]]"] * 40), ("row 1 ", "65536 x 65536 for a 256 px image")
    ),
    "growing concats": Hostile(
        rows_only(["[-1, 1, Conv, [8, 1]]", *["[[-1, -1], 1, Concat, [1]]"] * 60]), ("row 14 ", "maps of 256 x 256")
    ),
    "growing ReOrgs": Hostile(rows_only(["[-1, 1, ReOrg, []]"] * 30), ("row 7 ", "gives 196608 maps")),
    "ReOrg of odd maps": Hostile(
        rows_only(["[-1, 1, Conv, [8, 4, 1, 1]]", "[-1, 1, ReOrg, []]"]),
        ("row 1 ", "255 x 255 cannot be halved evenly."),
    ),
    "upsample by zero": in_row(5, "[-1, 1, nn.Upsample, [None, 0, nearest]]", "scale_factor=0 is not allowed"),
    # Modules
    "unknown module": in_row(1, "[-1, 1, Cnov, [16, 3, 2]]", "unknown module 'Cnov'; did you mean 'Conv'?"),
    "module of others": in_row(1, "[-1, 1, C3TR, [16]]", "unknown module 'C3TR'; choose from Conv, RepConv"),
    "module is code": in_row(1, "[-1, 1, '__import__(\"os\").system', [touch ran]]", "unknown module"),
    "module is a path": in_row(1, "[-1, 1, os.system, [touch ran]]", "unknown module 'os.system'"),
    "module is a number": in_row(1, "[-1, 1, 7, []]", "module 7 must be a name."),
    "module is a list": in_row(1, "[-1, 1, [Conv], [16]]", "module ['Conv'] must be a name."),
    "module endless": in_row(1, f"[-1, 1, {'x' * 200_000}, []]", "unknown module"),
    # Arguments
    "import": argument('\'__import__("os").system("touch ran")\'', NEVER_RUN),
    "dunder": argument("nn.__class__", "'nn.__class__' is not a valid argument", NEVER_RUN),
    "subclasses": argument('"().__class__.__base__.__subclasses__()"', NEVER_RUN),
    "lambda": argument('\'lambda: open("ran", "w")\'', NEVER_RUN),
    "f-string": argument("'f\"{open(1)}\"'", NEVER_RUN),
    "exec": argument("\"exec('import os')\"", NEVER_RUN),
    "call in an activation": argument("'nn.LeakyReLU(open(\"ran\"))'", NEVER_RUN),
    "expression in an activation": argument("nn.LeakyReLU(0.1+1)", "at most 1 plain number(s), not '0.1+1'."),
    "module that is no activation": argument("nn.Sequential()", "nn.Sequential is not a supported activation"),
    "misspelt activation": argument("nn.LeakyRelu(0.1)", "did you mean nn.LeakyReLU()?"),
    "activation not called": argument("nn.SiLU", "did you mean 'nn.SiLU()'?"),
    "infinite slope": argument("nn.LeakyReLU(1e999)", "at most 1 plain number(s)"),
    "endless number": argument(f"nn.LeakyReLU({'1' * 200_000}x)", "at most 1 plain number(s)"),
    "endless text": argument("y" * 200_000, NEVER_RUN),
    "lines in an activation": argument('"nn.ELU(1,\\n\\n2)"', "at most 1 plain number(s)"),
    "expression": in_row(3, "[-1, 1, Conv, [8 * 2, 3, 1]]", "'8 * 2' is not a valid argument", NEVER_RUN),
    "misspelt name": in_row(LAST, "[[7, 4], 1, Detect, [nc, ancors]]", "did you mean 'anchors'?", NEVER_RUN),
    "argument a mapping": in_row(
        3, "[-1, 1, Conv, [{c2: 16}, 3, 1]]", "{'c2': 16} is not a number, name, list or None."
    ),
    "argument not a number": in_row(3, "[-1, 1, Conv, [.nan, 3, 1]]", "nan is not a finite number."),
    "argument infinite": in_row(3, "[-1, 1, Conv, [.inf, 3, 1]]", "inf is not a finite number."),
    "channels a fraction": in_row(3, "[-1, 1, Conv, [16.5, 3, 1]]", "c2=16.5 is not allowed"),
    "channels true": in_row(3, "[-1, 1, Conv, [true, 3, 1]]", "c2=True is not allowed"),
    "channels null": in_row(3, "[-1, 1, Conv, [null, 3, 1]]", "c2=None is not allowed"),
    "channels negative": in_row(3, "[-1, 1, Conv, [-16, 3, 1]]", "c2=-16 is not allowed"),
    "kernel zero": in_row(
        3, "[-1, 1, Conv, [16, 0, 1]]", "k=0 is not allowed; it must be 1 to 127, or a pair of them."
    ),
    "kernel of three": in_row(3, "[-1, 1, Conv, [16, [3, 3, 3], 1]]", "k=(3, 3, 3) is not allowed"),
    "stride zero": in_row(3, "[-1, 1, Conv, [16, 3, 0]]", "s=0 is not allowed"),
    "padding negative": in_row(3, "[-1, 1, Conv, [16, 3, 1, -1]]", "p=-1 is not allowed; it must be None, 0 to 127"),
    "kernel too large": in_row(
        4, "[-1, 1, Conv, [16, 99, 2, 0]]", "a window of 99 does not fit into a map of 32 x 32."
    ),
    "pool too large": in_row(2, "[-1, 1, MP, [100]]", "a window of 100 does not fit"),
    "groups": in_row(3, "[-1, 1, Conv, [16, 3, 1, None, 3]]", "16 input and 16 output channels", "into 3 groups."),
    "no arguments": in_row(3, "[-1, 1, Conv, []]", "argument c2 is missing."),
    "no arguments of SPPCSPC": in_row(3, "[-1, 1, SPPCSPC, []]", "argument c2 is missing."),
    "too many arguments": in_row(2, "[-1, 1, MP, [2, 2, 2]]", "3 arguments, but the module takes at most 1."),
    "RepConv of another size": in_row(3, "[-1, 1, RepConv, [16, 5, 1]]", "kernel 3 with padding 1 only."),
    "DownC of odd width": Hostile(
        config({3: "[-1, 1, DownC, [7]]", 4: "[-1, 1, MP, []]"}, nc="2", anchors="[[1,2], [3,4]]"),
        ("row 3 ", "c2=7 must be even"),
    ),
    "concat of other sizes": in_row(
        6, "[[-1, 4], 1, Concat, [1]]", "maps of 32 x 32 and 16 x 16 cannot be concatenated."
    ),
    "concat along rows": in_row(6, "[[-1, 3], 1, Concat, [2]]", "d=2 is not allowed; it must be 1."),
    "shortcut of other widths": in_row(6, "[[-1, 0], 1, Shortcut, [1]]", "cannot be added."),
    "upsample bicubic": in_row(5, "[-1, 1, nn.Upsample, [None, 2, bicubic]]", "'bicubic' is not a valid argument"),
    # Rows
    "row a number": in_row(3, "17", "a row is [from, number, module, args]."),
    "row too short": in_row(3, "[-1, 1, Conv]", "a row is [from, number, module, args]."),
    "row too long": in_row(3, "[-1, 1, Conv, [16], x]", "a row is [from, number, module, args]."),
    "row a mapping": in_row(3, "{from: -1, number: 1, module: Conv, args: [16]}", "a row is [from"),
    "args a number": in_row(3, "[-1, 1, Conv, 16]", "args=16 must be a list."),
    "args text": in_row(3, "[-1, 1, Conv, '16, 3, 1']", "args='16, 3, 1' must be a list."),
    # Detection layer
    "no detection layer": in_row(LAST, "[-1, 1, Conv, [16, 1, 1]]", "the last row must be a detection layer"),
    "detection in the middle": in_row(7, "[[6, 4], 1, Detect, [nc, anchors]]", "Detect must be the last row."),
    "too few levels": in_row(LAST, "[[7], 1, Detect, [nc, anchors]]", "1 inputs for 2 levels of anchors"),
    "a thousand levels": Hostile(
        config({LAST: f"[{[7] * 1000}, 1, IDetect, [nc, anchors]]"}, anchors=str([[10, 13]] * 1000)),
        (f"row {LAST} ", "1000 inputs; a detection layer reads at most 64."),
    ),
    "too many levels": in_row(LAST, "[[7, 4, 3], 1, Detect, [nc, anchors]]", "3 inputs for 2 levels of anchors"),
    "no auxiliary inputs": in_row(LAST, "[[7, 4], 1, IAuxDetect, [nc, anchors]]", "IAuxDetect needs 2 per level."),
    "auxiliary of another size": in_row(
        LAST, "[[7, 4, 4, 7], 1, IAuxDetect, [nc, anchors]]", "input 2 has a map of 16 x 16, but its lead level"
    ),
    "detection on flat maps": in_row(4, "[-1, 1, Conv, [16, 3, [2, 1]]]", "row 4 ")._replace(
        words=("row 6 ", "cannot be concatenated.")
    ),
    "level not square": in_row(7, "[-1, 1, Conv, [16, 3, [2, 1]]]")._replace(
        words=(f"row {LAST} ", "input 0 has a map of 16 x 32 for an image of 256 x 256")
    ),
    "detection twice": in_row(
        LAST, "[[7, 4], 2, Detect, [nc, anchors]]", "number=2 must be 1: a detection layer cannot be repeated."
    ),
    "detection once, as a boolean": in_row(
        LAST, "[[7, 4], true, Detect, [nc, anchors]]", "number=True must be 1: a detection layer cannot be repeated."
    ),
    "detection without anchors": in_row(LAST, "[[7, 4], 1, Detect, [nc]]", "args=['nc'] must be [nc, anchors]."),
    "detection of other classes": in_row(LAST, "[[7, 4], 1, Detect, [80, anchors]]", "80 classes, but nc is 3"),
    "detection with anchors swapped": in_row(LAST, "[[7, 4], 1, Detect, [anchors, nc]]", "must be a whole number"),
    # Keys
    **{
        f"without {name}": key(
            name, None, f"key '{name}' is missing; a model config needs nc, anchors, backbone, head."
        )
        for name in ("nc", "anchors", "backbone", "head")
    },
    "misspelt key": Hostile(config(width_multipel="0.5"), ("unknown key 'width_multipel'; did you mean 'width_mult",)),
    "key of others": Hostile(config(activation="nn.ReLU()"), ("unknown key 'activation'; choose from nc, anchors",)),
    "nc zero": key("nc", "0", "nc=0 must be a whole number from 1 to"),
    "nc negative": key("nc", "-3", "nc=-3 must be a whole number"),
    "nc a billion": key("nc", "1000000000", "nc=1000000000 must be a whole number from 1 to 20000."),
    "nc Norway": key("nc", "no", "nc='no' must be a whole number"),
    "nc a fraction": key("nc", "3.0", "nc=3.0 must be a whole number"),
    "nc true": key("nc", "true", "nc=True must be a whole number"),
    "nc a list": key("nc", "[3]", "nc=[3] must be a whole number"),
    "ch text": key("ch", "rgb", "ch='rgb' must be a whole number"),
    "width zero": key("width_multiple", "0", "width_multiple=0 must be a number above 0 and at most 64."),
    "width not a number": key("width_multiple", ".nan", "width_multiple=nan must be a number"),
    "width infinite": key("width_multiple", ".inf", "width_multiple=inf must be a number"),
    "width very long": key("width_multiple", f"'{'x' * 9999}'", "width_multiple='xxx", " must be a number"),
    "width text": key("width_multiple", "half", "width_multiple='half' must be a number"),
    "depth huge": key("depth_multiple", "9" * 60, "must be a number above 0 and at most 64."),
    "backbone text": key("backbone", "Conv", "backbone must be a list of rows"),
    "backbone a mapping": key("backbone", "{0: [-1, 1, Conv, [8]]}", "backbone must be a list of rows"),
    "head null": key("head", "null", "head must be a list of rows"),
    "no rows": Hostile(config(backbone="[]", head="[]"), ("0 rows; a network has 2 to",)),
    "anchors odd": key("anchors", "[[10, 13, 16], [33, 23, 30]]", "must be one list [w0, h0, w1, h1, ...] per level"),
    "anchors ragged": key("anchors", "[[10, 13], [33, 23, 30, 61]]", "all equally long"),
    "anchors text": key("anchors", "[[ten, 13], [33, 23]]", "anchors contain 'ten'; widths and heights must be pixels"),
    "anchors negative": key("anchors", "[[-10, 13], [33, 23]]", "anchors contain -10"),
    "anchors not a number": key("anchors", "[[.nan, 13], [33, 23]]", "anchors contain nan"),
    "anchors infinite": key("anchors", "[[1e300, 13], [33, 23]]", "anchors contain 1e+300"),
    "anchors nested": key("anchors", "[[[10, 13]], [[33, 23]]]", "must be one list"),
    "anchors empty": key("anchors", "[]", "must be one list"),
    "anchors null": key("anchors", "null", "anchors=None must be one list"),
    "anchors true": key("anchors", "true", "anchors=True must be one list"),
    "anchors zero": key("anchors", "0", "the number of anchors per level (1 to 64)."),
    "anchors a million": key("anchors", "1000000", "the number of anchors per level (1 to 64)."),
    # YAML itself
    "empty": Hostile("", ("a model config is a mapping with nc, anchors, backbone and head, not None.",)),
    "text": Hostile("just text", ("not 'just text'.",)),
    "a list": Hostile(f"[{', '.join(ROWS[:2])}]", ("a model config is a mapping",)),
    "key twice": Hostile(config() + "\nnc: 4", ("key 'nc' appears twice.",)),
    "python tag": key("nc", "!!python/object/apply:os.system ['touch ran']", "tag '!!python/object/apply:os.system'"),
    "alias bomb": Hostile(f"{BOMB}\n{config()}", ("more than 50,000 values, aliases included.",)),
    "alias to itself": key("head", "&h [*h]", "nested deeper than 64 levels."),
    "deep nesting": in_row(3, f"[-1, 1, Conv, {'[' * 500}{']' * 500}]")._replace(
        words=("nested deeper than 64 levels.",)
    ),
    "deep argument": in_row(3, f"[-1, 1, Conv, [{'[' * 40}1{']' * 40}]]", "c2=((("),
    "merge key": Hostile("base: &b {nc: 3}\n<<: *b\n" + config(nc=None), ("merge keys ('<<') are refused.",)),
    "tab": Hostile("nc: 3\nhead:\n\t- x", (":3: a tab cannot indent",)),
    "key with lines": Hostile(config() + '\n"a\\nb": 1', ("unknown key 'a\\nb'",)),
    "key a number": Hostile(config() + "\n7: 1", ("unknown key 7",)),
    "wide row": in_row(3, f"[-1, 1, Conv, [{', '.join(['1'] * 5000)}]]", "5000 arguments"),
    "wide value": in_row(3, f"[-1, 1, Conv, [[{', '.join(['1'] * 5000)}]]]", "c2=(1, 1"),
}
