"""flatout yolo convert: weights to safetensors, to a file of ours, to deploy form."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from flatout.yolo.find_file import check_out

if TYPE_CHECKING:
    from flatout.yolo.convert import Conversion

DESCRIPTION = """\
Write weights in another form. The ending of OUT says which: .safetensors for sharing (tensors, model config and class
names), .pt for a file of flatout, which holds plain data that torch.load reads with weights_only=True. The source is a
file of YOLOv7 or of flatout; nothing in it is run, whoever wrote it.
"""
EPILOG = """\
examples:
  flatout yolo convert yolov7.pt yolov7.safetensors                   the moving average where there is one
  flatout yolo convert last.pt last.flatout.pt                        everything: optimizer, epoch, moving average ...
  flatout yolo convert best.pt best.deploy.safetensors --deploy --half    for inference, at half the size
  flatout yolo convert state_dict.pt new.pt --cfg yolov7              weights that do not say how their network is built

--deploy folds the implicit vectors into the detection layer and leaves auxiliary layers out. The boxes of both forms
are compared before anything is written. Exit code: 0, 2 wrong arguments, 4 weights that cannot be used, 5 no room.
"""


def main(argv: list[str]) -> int:
    """Convert weights; returns the exit code."""
    args = _parser().parse_args(argv)
    check_out(args.out, force=args.force)
    # Now, because help and mistakes are answered without torch.
    from flatout.yolo.convert import convert_weights

    done = convert_weights(
        args.source,
        args.out,
        deploy=args.deploy,
        half=args.half,
        ema=args.ema,
        cfg=args.cfg,
        force=args.force,
    )
    print(as_text(done, args.source))
    return 0


def as_text(done: "Conversion", source: str) -> str:
    """One line of comparison, if there was one, and one that says what was written."""
    lines = []
    if done.agreement:
        exact, stored = done.agreement
        agree = f"to {exact:.1e} px" if exact else "exactly"
        lines.append(f"training and deploy boxes agree {agree} ({stored:.1e} px as stored in {done.dtype})")
    taken = "everything" if done.taken == "everything" else f"the {done.taken}"
    lines.append(
        f"{done.out}: {taken} of {source}, {done.num_tensors} tensors in {done.dtype}, {done.num_bytes:,} bytes"
    )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout yolo convert",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="WEIGHTS", help="file of weights to read")
    parser.add_argument("out", metavar="OUT", type=Path, help="file to write, ending in .safetensors or .pt")
    parser.add_argument("--deploy", action="store_true", help="convert a training network to its deploy form")
    parser.add_argument("--half", action="store_true", help="store in half precision")
    parser.add_argument(
        "--ema",
        action=argparse.BooleanOptionalAction,
        help="take only the moving average, or only the network itself",
    )
    parser.add_argument("--cfg", help="config of weights that do not hold one")
    parser.add_argument("--force", action="store_true", help="overwrite OUT if it exists")
    return parser
