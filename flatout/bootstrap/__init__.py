"""flatout bootstrap: print the on-start script of a rented machine.

Files:

    script  The on-start script of a rented machine: a few lines that say what, and a body that is the same for all
"""

import argparse
from collections.abc import Sequence
from importlib import import_module

from flatout.cli import JOBS

_EXAMPLES = """\
examples:
  flatout bootstrap --package git+https://HOST/OWNER/flatout@COMMIT --mirror s3://my-bucket/bolts \\
      --fetch 'aws s3 sync s3://my-bucket/data data' --at-end 'shutdown -h now' \\
      -- yolo train --data data/bolts.yaml --cfg yolov7-tiny --img 320 --batch 64 --fast
  flatout bootstrap --package /data/flatout-0.1.0-py3-none-any.whl --gpus all \\
      -- yolo train --data /data/coco.yaml --cfg yolov7 --batch 256 > on-start.sh

The script is POSIX sh below 4,000 characters, made for the on-start field of a rented machine. It keeps a torch that
the image brings, ends with the training's exit code (0 done, 75 interrupted: run it again), and does nothing once the
training is over. It holds no keys: set them as environment variables of the machine. More: docs/rented-gpu.md
"""


def main(argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    at = argv.index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:at])
    from flatout.bootstrap.script import Job, script_of

    command = argv[at + 1 :]
    script = script_of(Job(command=command, **vars(options)))
    _check_flags(command)
    print(script, end="")
    return 0


def _check_flags(command: Sequence[str]) -> None:
    """A mistyped flag costs nothing here, and the start of a rented machine there."""
    job, *words = command
    if job in JOBS and words[:1] == ["train"]:
        import_module(JOBS[job]).COMMAND.parser(f"flatout {job} train").parse_typed(words[1:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout bootstrap",
        usage="flatout bootstrap [FLAG ...] -- COMMAND OF FLATOUT",
        description="Print a script that makes a rented machine train, and go on where it was after a preemption.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags = {
        "mirror": ("URL", "copy saved states to s3://bucket/folder; a fresh machine goes on from there"),
        "fetch": ("SHELL", "commands that bring the data, run once after the installation"),
        "at-end": ("SHELL", "commands for when all is over, such as stopping the machine; $FLATOUT_EXIT is the code"),
        "work": ("FOLDER", "where everything is kept (default: /workspace/flatout, else ~/flatout)"),
        "package": (
            "SPEC",
            "what pip installs, has no default: git+https://..., a wheel, its URL, a requirement",
        ),
    }
    for name, (metavar, help_text) in flags.items():
        parser.add_argument(f"--{name}", default="", metavar=metavar, help=help_text)
    parser.add_argument("--gpus", default="1", metavar="N", help="GPUs to train on together, or all (default: 1)")
    return parser
