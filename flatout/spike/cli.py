"""flatout spike: finds the command and hands over to it."""

from flatout.cli import Command, answer_or_explain

DESCRIPTION = "Spike-camera guided video deblurring."
COMMANDS = {
    "prepare": Command("put blur, sharp and spike folders side by side", "flatout.spike.commands.prepare"),
    "check": Command("configuration, one sample, loader speed and system, examined", "flatout.spike.commands.check"),
    "cache": Command(
        "write voxels as files: uint8 counts, 50 times smaller than float", "flatout.spike.commands.cache"
    ),
    "train": Command("train a deblurring network from a YAML", "flatout.spike.commands.train"),
    "test": Command("score weights on a split: PSNR and SSIM as papers do", "flatout.spike.commands.test"),
    "predict": Command("deblur a folder of frames", "flatout.spike.commands.predict"),
    "demo": Command("simulate, train and show before and after, in three minutes", "flatout.spike.commands.demo"),
    "demo-data": Command("simulate a small data set to try things on", "flatout.spike.commands.demo_data"),
}


def main(argv: list[str]) -> int:
    """Run one command of the deblurring job; returns its exit code."""
    return answer_or_explain(argv, COMMANDS, door="flatout spike", description=DESCRIPTION)
