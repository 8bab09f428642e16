"""flatout defect: finds the command and hands over to it."""

from flatout.cli import Command, answer_or_explain

DESCRIPTION = "Defects between dies: what is in target and in neither reference."
COMMANDS = {
    "train": Command("train a network on defect-free images", "flatout.defect.commands.train"),
    "test": Command("heat maps of test images, and how good they are", "flatout.defect.commands.test"),
    "predict": Command("heat maps and detections of any images", "flatout.defect.commands.predict"),
    "export": Command("a network for whole images as an ONNX file", "flatout.defect.commands.export"),
    "check": Command("what would spoil a training, in every file of a data set", "flatout.defect.commands.check"),
    "demo": Command("see it at work on strips that it draws itself", "flatout.defect.commands.demo"),
    "demo-data": Command("draw a small data set to try things on", "flatout.defect.commands.demo_data"),
}


def main(argv: list[str]) -> int:
    """Run one command of the defect job; returns its exit code."""
    return answer_or_explain(argv, COMMANDS, door="flatout defect", description=DESCRIPTION)
