"""flatout spike: dispatches to the commands."""

from flatout.cli import Command, dispatch_or_help

DESCRIPTION = "Video deblurring guided by a spike camera."
COMMANDS = {
    "prepare": Command("arrange the files of a data set as training expects them", "flatout.spike.commands.prepare"),
    "check": Command("check configuration, data, loader and network before training", "flatout.spike.commands.check"),
    "cache": Command(
        "write voxels as files: uint8 counts, 50 times smaller than float", "flatout.spike.commands.cache"
    ),
    "simulate": Command("make a training set from your own video", "flatout.spike.commands.simulate"),
    "view": Command("show a spike stream as a sheet of images or as a video", "flatout.spike.commands.view"),
    "reconstruct": Command("images from spikes alone, without a network", "flatout.spike.commands.reconstruct"),
    "train": Command("train a deblurring network as a YAML file describes", "flatout.spike.commands.train"),
    "test": Command("score weights on a split: PSNR and SSIM as in papers", "flatout.spike.commands.test"),
    "predict": Command("deblur a folder of frames", "flatout.spike.commands.predict"),
    "export": Command("write a network as an ONNX file for whole frames", "flatout.spike.commands.export"),
    "demo": Command("simulate data, train, and show frames before and after", "flatout.spike.commands.demo"),
    "demo-data": Command("simulate a small data set to try things on", "flatout.spike.commands.demo_data"),
}


def main(argv: list[str]) -> int:
    """Run one command of the deblurring job; returns its exit code."""
    return dispatch_or_help(argv, COMMANDS, prog="flatout spike", description=DESCRIPTION)
