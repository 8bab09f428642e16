"""flatout spike: finds the command and hands over to it."""

import argparse

from flatout.door import Command, answer, listing

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
    if argv and not argv[0].startswith("-"):
        return answer(argv, COMMANDS, door="flatout spike")
    parser = argparse.ArgumentParser(
        prog="flatout spike",
        usage="flatout spike [-h] COMMAND [ARGUMENT ...]",
        description="Spike-camera guided video deblurring.",
        epilog=f"{listing(COMMANDS)}\n\n`flatout spike COMMAND --help` explains one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.parse_args(argv)
    parser.print_help()
    return 0
