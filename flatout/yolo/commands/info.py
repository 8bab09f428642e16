"""flatout yolo info: the layers, size and cost of a network, and what a file of weights holds."""

import argparse
import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flatout.errors import ConfigError, counted
from flatout.yolo.model.configs import names_config

if TYPE_CHECKING:
    from flatout.yolo.model.info import Contents, Description, NetworkFacts

DESCRIPTION = """\
Show the layers of a network with their parameters, its size and cost, strides and anchors. For a file of weights
(.pt or .safetensors, of flatout or of YOLOv7) also show what it holds. Nothing in the file is run, whoever wrote it.
"""
EPILOG = """\
examples:
  flatout yolo info yolov7-tiny              a config that comes with flatout
  flatout yolo info deploy/yolov7-w6         its form for inference
  flatout yolo info my.yaml --json           a config of your own, for a script
  flatout yolo info runs/train/exp/weights/best.pt
  flatout yolo info state_dict.pt --cfg yolov7    weights that do not say how their network is built

GFLOPS are for one picture of 640 x 640. Exit code: 0, 2 for a wrong config, 4 for weights that cannot be read.
"""


def main(argv: list[str]) -> int:
    """Describe a config or a file of weights; returns the exit code."""
    args = _parser().parse_args(argv)
    is_config = names_config(args.source)
    if is_config and args.cfg is not None:
        raise ConfigError(f"--cfg is for weights that do not hold their config, and {args.source} is a config.")
    # Now, because help and mistakes are answered without torch.
    from flatout.yolo.model.info import describe_config, describe_weights

    description = describe_config(args.source) if is_config else describe_weights(args.source, cfg=args.cfg)
    print(as_json(description) if args.json else as_text(description))
    return 0


def as_json(description: "Description") -> str:
    """One JSON document; the table of layers is left out, as its rows are there. Numbers that are none become null."""
    plain = asdict(description)
    if description.network:
        del plain["network"]["table"]
        for key in ("size", "fused_size"):
            plain["network"][key] = getattr(description.network, key)._asdict()
    return json.dumps(_finite(plain), indent=2, allow_nan=False)


def _finite(value: Any) -> Any:
    """JSON knows neither NaN nor infinity; the fitness or the anchors of a file may be either."""
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(description: "Description") -> str:
    """The table of layers, then one line per fact."""
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
        _line("head", f"{network.head}, {classes}, pictures of {network.channels} channels"),
        *(_line(f"stride {stride:g}", f"anchors {_pairs(anchors)} px") for stride, anchors in levels),
        *(_line(f"head {number}", _group(head)) for number, head in enumerate(network.heads or ())),
    ]


def _group(head: dict[str, Any]) -> str:
    classes = head["classes"]
    shown = ", ".join(map(str, classes[:12])) + (", ..." if len(classes) > 12 else "")
    return f"{head['name']}: {counted(len(classes), 'class')} ({shown}), weight {head['weight']:g}"


def contents_lines(source: str, contents: "Contents") -> list[str]:
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


def _classes(contents: "Contents") -> str:
    if contents.num_classes is None:
        return "not stored"
    # A file may hold anything as a name; none of it may steer a terminal.
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
    parser.add_argument("source", metavar="CFG|WEIGHTS", help="name or path of a model config, or path of weights")
    parser.add_argument("--cfg", help="config of weights that do not hold one")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    return parser
