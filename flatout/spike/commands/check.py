"""flatout spike check: check configuration, data, loader and network before training."""

from flatout.cli import parser_of, show_log, value
from flatout.spike.commands.arguments import CONFIG

DESCRIPTION = """\
Check a configuration before training: installed packages, the data tree, the loader plan and its memory, how spike
files are read and whether they match their frames, shapes and ranges of one sample, the speed of the loader, and the
network.
"""
EPILOG = """\
Replaces test_dataloader_config, test_realtime_loading, test_training_loader and check_status of the original guide.
Exit code: 0 if every check passes, 2 for an invalid YAML file, 3 otherwise.
"""
FLAGS = (
    *CONFIG,
    value("--gpus", "number of GPUs to plan the loader for (default: %(default)s)", type=int, default=1, metavar="N"),
)


def main(argv: list[str]) -> int:
    """Check; returns the exit code."""
    args = parser_of("flatout spike check", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load NumPy.
    from flatout.findings import is_bad
    from flatout.spike.check import as_text, examine
    from flatout.spike.config import load_config

    findings = []
    for finding in examine(load_config(args.config, args.set), gpus=args.gpus):
        print(as_text(finding), flush=True)
        findings.append(finding)
    return 3 if is_bad(findings) else 0
