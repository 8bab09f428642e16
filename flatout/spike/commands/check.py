"""flatout spike check: configuration, data, one sample, loader, network."""

import argparse

from flatout.cli import show_log
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
    from flatout.findings import is_bad
    from flatout.spike.check import as_text, examine
    from flatout.spike.config import load_config

    findings = []
    for finding in examine(load_config(args.config, args.set), gpus=args.gpus):
        print(as_text(finding), flush=True)
        findings.append(finding)
    return 3 if is_bad(findings) else 0


def _parser() -> argparse.ArgumentParser:
    made = parser("check", DESCRIPTION, EPILOG)
    add_config(made)
    made.add_argument("--gpus", type=int, default=1, help="plan loaders for so many (default: %(default)s)")
    return made
