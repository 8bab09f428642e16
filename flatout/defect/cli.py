"""flatout defect: dispatches to the commands."""

from flatout.cli import Command, dispatch_or_help

DESCRIPTION = "Find defects between dies: what is in target and in neither of two references."
COMMANDS = {
    "train": Command("train a network on defect-free images", "flatout.defect.commands.train"),
    "test": Command("compute heat maps of test images and score them", "flatout.defect.commands.test"),
    "predict": Command("compute heat maps and detections of any images", "flatout.defect.commands.predict"),
    "calibrate": Command("choose the threshold by the number of false blobs", "flatout.defect.commands.calibrate"),
    "align": Command("align a reference to an image and show the shifts found", "flatout.defect.commands.align"),
    "export": Command("export a network for whole images as an ONNX file", "flatout.defect.commands.export"),
    "check": Command("check every file of a data set before training", "flatout.defect.commands.check"),
    "demo": Command("generate strips, train on them and show the results", "flatout.defect.commands.demo"),
    "demo-data": Command("generate a small data set to try things on", "flatout.defect.commands.demo_data"),
}


def main(argv: list[str]) -> int:
    """Run one command of the defect job; returns its exit code."""
    return dispatch_or_help(argv, COMMANDS, prog="flatout defect", description=DESCRIPTION)
