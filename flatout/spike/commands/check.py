"""flatout spike check: configuration, data, one sample, loader, network."""

import argparse

from flatout.engine.log_lines import show_log
from flatout.spike.commands.arguments import add_config, parser

DESCRIPTION = """\
Examine a configuration before training: packages, data tree, loader plan and memory, how spike files are read and
whether they look like their frames, one sample with shapes and ranges, the speed of the loader, the network.
"""
EPILOG = """\
Does what the guide's test_dataloader_config, test_realtime_loading, test_training_loader and check_status do.
Exit code: 0 if every line says PASS, 2 for a YAML that cannot be read, 3 otherwise.
"""


def main(argv: list[str]) -> int:
    """Check; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Now, because help and mistakes are answered without NumPy.
    from flatout.spike.config import load_config
    from flatout.spike.examine import examine

    good = True
    for finding in examine(load_config(args.config, args.set), gpus=args.gpus):
        print(finding, flush=True)
        good = good and finding.good
    return 0 if good else 3


def _parser() -> argparse.ArgumentParser:
    made = parser("check", DESCRIPTION, EPILOG)
    add_config(made)
    made.add_argument("--gpus", type=int, default=1, help="plan loaders for so many (default: %(default)s)")
    return made
