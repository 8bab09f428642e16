"""`flatout yolo convert`: convert weights to safetensors, to the format of flatout, or to deploy form."""

from argparse import BooleanOptionalAction
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli import Flag, parser_of, switch, value
from flatout.yolo.find_file import check_output_name

if TYPE_CHECKING:
    from flatout.yolo.convert import Conversion

DESCRIPTION = """\
Convert weights to another format, which the ending of OUT selects: .safetensors for sharing (tensors, model config and
class names), or .pt, the format of flatout, which contains only plain data and which torch.load reads with
weights_only=True. The source is a file of YOLOv7 or of flatout. No code in it is ever run, so untrusted files are safe.
"""
EPILOG = """\
examples:
  flatout yolo convert yolov7.pt yolov7.safetensors                   the moving average, if there is one
  flatout yolo convert last.pt last.flatout.pt                        everything: optimizer, epoch, moving average ...
  flatout yolo convert best.pt best.deploy.safetensors --deploy --half    for inference, at half the size
  flatout yolo convert state_dict.pt new.pt --cfg yolov7              weights that do not contain their model config

--deploy folds the implicit vectors into the detection layer and leaves out auxiliary layers. The boxes of both forms
are compared before anything is written.
Exit codes: 0 done, 2 wrong arguments, 4 unusable weights, 5 not enough disk space.
"""
FLAGS = (
    value("source", "weights file to read", metavar="WEIGHTS"),
    value("out", "file to write; the name ends in .safetensors or .pt", metavar="OUT", type=Path),
    switch("--deploy", "convert a training network to its deploy form"),
    switch("--half", "store the weights in half precision"),
    Flag(
        "--ema",
        "--ema: write only the moving average; --no-ema: only the network itself",
        {"action": BooleanOptionalAction},
    ),
    value("--cfg", "model config, for weights that do not contain one"),
    switch("--force", "overwrite OUT if it exists"),
)


def main(argv: list[str]) -> int:
    """Convert weights; returns the exit code."""
    args = parser_of("flatout yolo convert", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    check_output_name(args.out, force=args.force)
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.yolo.convert import convert_weights

    print(as_text(convert_weights(**vars(args)), args.source))
    return 0


def as_text(done: "Conversion", source: str) -> str:
    """A line about the comparison, if there was one, and a line about what was written."""
    lines = []
    if done.agreement:
        exact, stored = done.agreement
        agree = f"to {exact:.1e} px" if exact else "exactly"
        lines.append(f"boxes of the training and deploy form agree {agree} ({stored:.1e} px as stored in {done.dtype})")
    taken = "everything" if done.taken == "everything" else f"the {done.taken}"
    lines.append(
        f"{done.out}: {taken} of {source}, {done.num_tensors} tensors in {done.dtype}, {done.num_bytes:,} bytes"
    )
    return "\n".join(lines)
