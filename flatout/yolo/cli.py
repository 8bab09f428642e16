"""`flatout yolo`: run the command that was named."""

from flatout.cli import Command, dispatch_or_help

DESCRIPTION = "Object detection with YOLOv7's networks."
COMMANDS = {
    "train": Command("train a detector; has the flags of YOLOv7's train.py", "flatout.yolo.commands.train"),
    "test": Command("evaluate weights; has the flags of YOLOv7's test.py", "flatout.yolo.commands.test"),
    "detect": Command(
        "detect objects in images, videos and streams; has the flags of YOLOv7's detect.py",
        "flatout.yolo.commands.detect",
    ),
    "export": Command(
        "export a network to ONNX or TorchScript; has the flags of YOLOv7's export.py", "flatout.yolo.commands.export"
    ),
    "info": Command("show the layers, size and cost of a network, or a weights file", "flatout.yolo.commands.info"),
    "convert": Command("convert weights to safetensors, .pt or deploy form", "flatout.yolo.commands.convert"),
    "check": Command("check every file of a data set for what would spoil a training", "flatout.yolo.commands.check"),
    "audit": Command("find labels that are probably wrong, and fix them", "flatout.yolo.commands.audit"),
    "resize": Command("copy a data set with smaller images, such as COCO at 320 px", "flatout.yolo.commands.resize"),
    "replay": Command("show what the network saw in any step of a run", "flatout.yolo.commands.replay"),
    "stages": Command("train in several stages, for example to unfreeze gradually", "flatout.yolo.commands.stages"),
    "group": Command("assign classes to the heads of a multi-head network (1B4H)", "flatout.yolo.commands.group"),
    "demo-data": Command("generate a small data set to experiment with", "flatout.yolo.commands.demo_data"),
}


def main(argv: list[str]) -> int:
    """Run a command of `flatout yolo`; returns its exit code."""
    return dispatch_or_help(argv, COMMANDS, prog="flatout yolo", description=DESCRIPTION)
