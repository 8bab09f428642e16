"""The command lines of train.py and test.py: words in, options out.

YOLOv7's flags and its fork's keep every abbreviation that argparse gave them. Flags that are new match only when they
are written in full; otherwise `--de`, `--wo`, `--p`, `--f` and `--bu`, which people type, would turn ambiguous.
"""

import argparse
from collections.abc import Mapping, Sequence

from flatout.errors import ConfigError
from flatout.yolo.compat import detect_flags, export_flags, test_flags, train_flags
from flatout.yolo.compat.flag import FlagParser
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.options import DetectOptions


def train_parser(prog: str = "flatout yolo train") -> argparse.ArgumentParser:
    """Reads the flags of train.py and train_aux.py, which are the same command."""
    parser = FlagParser(prog, train_flags.DESCRIPTION, train_flags.EPILOG)
    defaults = TrainOptions()
    parser.add_flags("flags of YOLOv7", train_flags.YOLOV7, defaults, shortened=True)
    parser.add_flags("flags of its fork Yolov7fast", train_flags.FORK, defaults, shortened=True)
    parser.add_flags("new, for speed", train_flags.SPEED, defaults, shortened=False)
    parser.add_flags("new, for the recipe", train_flags.RECIPE, defaults, shortened=False)
    parser.add_flags("new, for files", train_flags.FILES, defaults, shortened=False)
    return parser


def test_parser(prog: str = "flatout yolo test") -> argparse.ArgumentParser:  # noqa: PT028 - no test
    """Reads the flags of test.py."""
    parser = FlagParser(prog, test_flags.DESCRIPTION, test_flags.EPILOG)
    defaults = TestOptions()
    parser.add_flags("flags of YOLOv7", test_flags.YOLOV7, defaults, shortened=True)
    parser.add_flags("flag of its fork Yolov7fast", test_flags.FORK, defaults, shortened=True)
    parser.add_flags("new", test_flags.OURS, defaults, shortened=False)
    return parser


def detect_parser(prog: str = "flatout yolo detect") -> argparse.ArgumentParser:
    """Reads the flags of detect.py."""
    parser = FlagParser(prog, detect_flags.DESCRIPTION, detect_flags.EPILOG)
    defaults = DetectOptions()
    parser.add_flags("flags of YOLOv7", detect_flags.YOLOV7, defaults, shortened=True)
    parser.add_flags("new", detect_flags.OURS, defaults, shortened=False)
    return parser


def export_parser(prog: str = "flatout yolo export") -> argparse.ArgumentParser:
    """Reads the flags of export.py."""
    parser = FlagParser(prog, export_flags.DESCRIPTION, export_flags.EPILOG)
    defaults = ExportOptions()
    parser.add_flags("flags of YOLOv7", export_flags.YOLOV7, defaults, shortened=True)
    parser.add_flags("new", export_flags.OURS, defaults, shortened=False)
    return parser


def train_options(args: argparse.Namespace, environ: Mapping[str, str]) -> TrainOptions:
    """What parsed flags and the environment ask for; ConfigError names every mistake."""
    values = vars(args) | {
        "img_size": train_and_test_size(args.img_size),
        "stop_after": _whole_number(environ, "FLATOUT_STOP_AFTER"),
        "use_compile": _is_on(environ, "USE_COMPILE"),
        "diagnose_compile": _is_on(environ, "DIAGNOSE_COMPILE"),
    }
    rank = _whole_number(environ, "LOCAL_RANK")
    if args.local_rank < 0 and rank is not None:
        values["local_rank"] = rank
    from flatout.config import build_config  # now, because help does not need pydantic

    return build_config(values, TrainOptions)


def test_options(args: argparse.Namespace) -> TestOptions:
    """What parsed flags ask for; ConfigError names every mistake."""
    weights = [args.weights] if isinstance(args.weights, str) else args.weights
    from flatout.config import build_config

    return build_config(vars(args) | {"weights": weights}, TestOptions)


def detect_options(args: argparse.Namespace) -> DetectOptions:
    """What parsed flags ask for; ConfigError names every mistake."""
    weights = [args.weights] if isinstance(args.weights, str) else args.weights
    from flatout.config import build_config

    return build_config(vars(args) | {"weights": weights}, DetectOptions)


def export_options(args: argparse.Namespace) -> ExportOptions:
    """What parsed flags ask for; ConfigError names every mistake."""
    if len(args.img_size) > 2:
        raise ConfigError(f"--img-size {' '.join(map(str, args.img_size))}: give one size, or a height and a width.")
    from flatout.config import build_config

    return build_config(vars(args) | {"img_size": [args.img_size[0], args.img_size[-1]]}, ExportOptions)


def train_and_test_size(sizes: Sequence[int]) -> list[int]:
    """The first two of `--img-size`; one number stands for both."""
    if len(sizes) > 2:
        raise ConfigError(
            f"--img-size {' '.join(map(str, sizes))}: give one size, or one for training and one for tests."
        )
    return [sizes[0], sizes[-1]]


def _whole_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    if text and not text.removeprefix("-").isdecimal():
        raise ConfigError(f"{name}={text}: write a whole number, or unset it.")
    return int(text) if text else None


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") == "1"
