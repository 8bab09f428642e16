"""`flatout yolo`: run the command that was named."""

from flatout.cli import Command, dispatch_or_help

DESCRIPTION = "Object detection with YOLOv7's networks."
HELP = {
    "train": "train a detector; has the flags of YOLOv7's train.py",
    "test": "evaluate weights; has the flags of YOLOv7's test.py",
    "detect": "detect objects in images, videos and streams; has the flags of YOLOv7's detect.py",
    "export": "export a network to ONNX or TorchScript; has the flags of YOLOv7's export.py",
    "info": "show the layers, size and cost of a network, or a weights file",
    "convert": "convert weights to safetensors, .pt or deploy form",
    "convert-data": "write a data set in another label format",
    "check": "check every file of a data set for what would spoil a training",
    "audit": "find labels that are probably wrong, and fix them",
    "resize": "copy a data set with smaller images, such as COCO at 320 px",
    "replay": "show what the network saw in any step of a run",
    "stages": "train in several stages, for example to unfreeze gradually",
    "group": "assign classes to the heads of a multi-head network (1B4H)",
    "demo-data": "generate a small data set to experiment with",
}
COMMANDS = {name: Command(text, f"flatout.yolo.commands.{name.replace('-', '_')}") for name, text in HELP.items()}


def main(argv: list[str]) -> int:
    """Run a command of `flatout yolo`; returns its exit code."""
    return dispatch_or_help(argv, COMMANDS, prog="flatout yolo", description=DESCRIPTION)
