"""flatout yolo: finds the command and hands over to it."""

from flatout.cli import Command, answer_or_explain

DESCRIPTION = "Detection with YOLOv7's networks."
COMMANDS = {
    "train": Command("train a detector: YOLOv7's train.py, with its flags", "flatout.yolo.commands.train"),
    "test": Command("evaluate weights: YOLOv7's test.py, with its flags", "flatout.yolo.commands.test"),
    "detect": Command("find objects in pictures, videos, streams: YOLOv7's detect.py", "flatout.yolo.commands.detect"),
    "export": Command("a network as ONNX or TorchScript: YOLOv7's export.py", "flatout.yolo.commands.export"),
    "info": Command("layers, size and cost of a network; what a file of weights holds", "flatout.yolo.commands.info"),
    "convert": Command("weights to safetensors, to a file of ours, to deploy form", "flatout.yolo.commands.convert"),
    "check": Command("what would spoil a training, in every file of a data set", "flatout.yolo.commands.check"),
    "resize": Command("a copy of a data set with smaller pictures: coco320 from COCO", "flatout.yolo.commands.resize"),
    "stages": Command("several trainings as one job: gradual unfreezing", "flatout.yolo.commands.stages"),
    "group": Command("share classes out to several heads (1B4H)", "flatout.yolo.commands.group"),
    "demo-data": Command("draw a small data set to try things on", "flatout.yolo.commands.demo_data"),
}


def main(argv: list[str]) -> int:
    """Run one command of the detection job; returns its exit code."""
    return answer_or_explain(argv, COMMANDS, door="flatout yolo", description=DESCRIPTION)
