"""`flatout yolo info`: the layers, size and cost of a network, and the content of a weights file."""

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from flatout.cli import parser_of, switch, value
from flatout.errors import ConfigError
from flatout.yolo.model.configs import is_config_name

if TYPE_CHECKING:
    from flatout.yolo.model.info import Description

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
FLAGS = (
    value("source", "name or path of a model config, or path of a weights file", metavar="CFG|WEIGHTS"),
    value("--cfg", "model config, for weights that do not contain one"),
    switch("--json", "print one JSON document instead of text"),
)


def main(argv: list[str]) -> int:
    """Describe a model config or a weights file; returns the exit code."""
    args = parser_of("flatout yolo info", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    is_config = is_config_name(args.source)
    if is_config and args.cfg is not None:
        raise ConfigError(
            f"--cfg is only for weights that do not contain their config, and {args.source} is a config. Leave it out."
        )
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.model.info import as_text, describe_config, describe_weights

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
