"""`flatout yolo info`: the layers, size and cost of a network, and the content of a weights file."""

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flatout.errors import ConfigError, counted
from flatout.yolo.model.configs import is_config_name

if TYPE_CHECKING:
    from flatout.yolo.model.info import Description, NetworkFacts, WeightsContents

DESCRIPTION = """\
Show the layers of a network with their parameters, its size and cost, its strides and its anchors. For a weights file
(.pt or .safetensors, of flatout or of YOLOv7), also show what it contains. No code in the file is ever run, so
untrusted files are safe.
"""
EPILOG = """\
examples:
  flatout yolo info yolov7-tiny                     a config that comes with flatout
  flatout yolo info deploy/yolov7-w6                a config for inference
  flatout yolo info my.yaml --json                  your own config, for a script
  flatout yolo info runs/train/exp/weights/best.pt  a weights file
  flatout yolo info state_dict.pt --cfg yolov7      weights that do not contain their model config

GFLOPS are for one image of 640 x 640 px. Exit codes: 0 done, 2 wrong config, 4 unreadable weights.
"""


def main(argv: list[str]) -> int:
    """Describe a model config or a weights file; returns the exit code."""
    args = _parser().parse_args(argv)
    is_config = is_config_name(args.source)
    if is_config and args.cfg is not None:
        raise ConfigError(
            f"--cfg is only for weights that do not contain their config, and {args.source} is a config. Leave it out."
        )
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.model.info import describe_config, describe_weights

    description = describe_config(args.source) if is_config else describe_weights(args.source, cfg=args.cfg)
    print(as_json(description) if args.json else as_text(description))
    return 0


def as_json(description: "Description") -> str:
    """The description as JSON, without the text table, whose rows are included; nan and inf become null."""
    plain = asdict(description)
    if description.network:
        del plain["network"]["table"]
        for key in ("size", "fused_size"):
            plain["network"][key] = getattr(description.network, key)._asdict()
    return json.dumps(_finite(plain), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """The value with nan and inf, which the fitness or the anchors of a file may be, replaced by None."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(description: "Description") -> str:
    """The description as text: the table of layers, then a line per fact."""
    lines = network_lines(description.network) if description.network else []
    if description.contents:
        lines += ["", *contents_lines(description.source, description.contents)]
    if description.problem:
        lines.append(_line("network", description.problem))
    return "\n".join(lines).strip("\n")


def network_lines(network: "NetworkFacts") -> list[str]:
    levels = zip(network.strides, network.anchors_px, strict=True)
    classes = counted(network.num_classes, "class")
    fused = network.fused_size.line().removeprefix("Model Summary: ")
    return [
        network.table,
        "",
        network.size.line(),
        _line("fused", fused),
        _line("head", f"{network.head}, {classes}, images with {network.channels} channels"),
        *(_line(f"stride {stride:g}", f"anchors {_pairs(anchors)} px") for stride, anchors in levels),
        *(_line(f"head {number}", _group(head)) for number, head in enumerate(network.heads or ())),
    ]


def _group(head: dict[str, Any]) -> str:
    classes = head["classes"]
    shown = ", ".join(map(str, classes[:12])) + (", ..." if len(classes) > 12 else "")
    return f"{head['name']}: {counted(len(classes), 'class')} ({shown}), weight {head['weight']:g}"


def contents_lines(source: str, contents: "WeightsContents") -> list[str]:
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in contents.dtypes.items())
    yes_no = {True: "yes", False: "no"}
    updates = "" if contents.ema_updates is None else f", {contents.ema_updates} updates"
    return [
        _line("file", f"{source}: {contents.num_bytes:,} bytes, {contents.kind}, format {contents.format}"),
        _line("tensors", f"{contents.num_tensors} ({dtypes}), {contents.num_values:,} values"),
        _line("classes", _classes(contents)),
        _line("epoch", _epoch(contents.epoch)),
        _line("fitness", "not stored" if contents.best_fitness is None else f"best {contents.best_fitness:.5g}"),
        _line("EMA", f"{yes_no[contents.has_ema]}{updates}"),
        _line("optimizer", yes_no[contents.has_optimizer]),
        _line("config", yes_no[contents.has_config]),
        _line("hyp", yes_no[contents.has_hyperparameters]),
        _line("results", yes_no[contents.has_training_results]),
    ]


def _line(name: str, text: str) -> str:
    return f"{name:<10} {text}"


def _pairs(anchors: list[float]) -> str:
    return " ".join(f"{width:g},{height:g}" for width, height in zip(anchors[::2], anchors[1::2], strict=True))


def _classes(contents: "WeightsContents") -> str:
    if contents.num_classes is None:
        return "not stored"
    # A name in a file may contain anything, including control codes for the terminal.
    shown = [name[:40] if name.isprintable() else repr(name[:40]) for name in (contents.names or [])[:10]]
    more = ", ..." if len(contents.names or []) > len(shown) else ""
    return f"{contents.num_classes}{': ' if shown else ''}{', '.join(shown)}{more}"


def _epoch(epoch: int | None) -> str:
    if epoch is None:
        return "not stored"
    return f"{epoch} (from 0)" if epoch >= 0 else f"{epoch}: the training has ended"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo info",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "source", metavar="CFG|WEIGHTS", help="name or path of a model config, or path of a weights file"
    )
    parser.add_argument("--cfg", help="model config, for weights that do not contain one")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser
