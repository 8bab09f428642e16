"""Training on other machines: `flatout bootstrap` prints an on-start script, `flatout launch` a manifest.

Files:

    script     The on-start script of a rented machine: a few lines with settings, and a body that is the same for all
    launch     The command `flatout launch`
    manifests  Manifests with which schedulers and clouds train with flatout
"""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from flatout.cli import JOBS, Flag, parser_of, value

_EXAMPLES = """\
examples:
  flatout bootstrap --package git+https://HOST/OWNER/flatout@COMMIT --mirror s3://my-bucket/bolts \\
      --fetch 'aws s3 sync s3://my-bucket/data data' --at-end 'shutdown -h now' \\
      -- yolo train --data data/bolts.yaml --cfg yolov7-tiny --img 320 --batch 64 --fast
  flatout bootstrap --package /data/flatout-0.1.0-py3-none-any.whl --gpus all \\
      -- yolo train --data /data/coco.yaml --cfg yolov7 --batch 256 > on-start.sh

The script is POSIX sh below 4,000 characters, for the on-start field of a rented machine. It keeps the torch of the
machine's image, ends with the exit code of the training (0 finished, 75 interrupted: run it again), and does nothing
once the training is finished. It contains no keys: set them as environment variables of the machine. More:
docs/rented-gpu.md
"""

SCRIPT_FLAGS = (
    value(
        "--mirror",
        "copy checkpoints to s3://bucket/folder; another machine continues from there",
        default="",
        metavar="URL",
    ),
    value("--fetch", "commands that fetch the data, run once after the installation", default="", metavar="SHELL"),
    value(
        "--at-end",
        "commands to run at the end, such as stopping the machine; $FLATOUT_EXIT is the exit code",
        default="",
        metavar="SHELL",
    ),
    value("--work", "folder for all files (default: /workspace/flatout, else ~/flatout)", default="", metavar="FOLDER"),
    value(
        "--package",
        "what pip installs, required: git+https://..., a wheel or its URL, 'flatout[EXTRA] @ URL'; the bare name, "
        "which is not ours on the package index, is refused",
        default="",
        metavar="SPEC",
    ),
    value("--gpus", "GPUs to train on together, or all; 0: the CPU (default: 1)", default="1", metavar="N"),
)
"""The flags of an on-start script, which are the fields of BootstrapConfig."""


def main(argv: Sequence[str]) -> int:
    """Print the script; returns the exit code."""
    about = "Print a script with which a rented machine trains, and continues after a preemption."
    options, command = read_flags(argv, "flatout bootstrap", "[FLAG ...]", about, _EXAMPLES, SCRIPT_FLAGS)
    from flatout.bootstrap.script import BootstrapConfig, script_of

    script = script_of(BootstrapConfig(command=command, **options))
    check_flags(command)
    print(script, end="")
    return 0


def read_flags(
    argv: Sequence[str], prog: str, usage: str, about: str, examples: str, flags: Sequence[Flag]
) -> tuple[dict[str, Any], list[str]]:
    """The values of the flags before `--`, and the command of flatout after it."""
    at = argv.index("--") if "--" in argv else len(argv)
    usage = f"{prog} {usage} -- COMMAND OF FLATOUT"
    parser = parser_of(prog, about, examples, flags, usage=usage, shortened=True)
    return vars(parser.parse_args(argv[:at])), list(argv[at + 1 :])


def check_flags(command: Sequence[str]) -> None:
    """Refuse mistyped flags here, before a rented machine is started for nothing."""
    job, *words = command
    if job in JOBS and words[:1] == ["train"]:
        import_module(JOBS[job]).COMMAND.parser(f"flatout {job} train").parse_typed(words[1:])
