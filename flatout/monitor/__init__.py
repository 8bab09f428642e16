"""Show curves, images, state, speed, remaining time and machine load of runs in a browser, without writing anything.

Several runs are compared in the same charts. A run that has not started yet is shown as soon as it does.
The page is served to this machine only, under an address that cannot be guessed. To see it elsewhere, use `ssh -L`.

Files:

    run_state  The state of a run, read from its folder at any time: while files are being written, and after a crash
    charts     Which columns of a run's log share a chart, under which names, and on which axis
    server     A small read-only HTTP server: the page, its data and the images of runs
"""

import argparse
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from flatout.cli import parser_of, value
from flatout.errors import ConfigError


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    args = _parser().parse_args(argv)
    for path in args.runs:
        try:
            os.scandir(path).close()
        except FileNotFoundError:
            continue  # shown as soon as it is there
        except OSError as error:
            is_file = isinstance(error, NotADirectoryError)
            why = "a file, not a run folder" if is_file else f"cannot be read: {error.strerror}"
            raise ConfigError(f"{path}: {why}. Give a folder such as runs/train/exp.") from error
    from flatout.monitor.run_state import find_runs
    from flatout.monitor.server import make_server

    token = secrets.token_urlsafe(16)
    try:
        opened = make_server(args.runs, token, port=args.port, price_per_hour=args.price_per_hour)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or str(error).removesuffix(".")
        raise ConfigError(
            f"--port {args.port}: cannot listen there: {why}. Use another port, or leave out --port for a free one."
        ) from error
    with opened as server:
        port = server.server_address[1]
        print(f"http://127.0.0.1:{port}/{token}/")
        print(_found(args.runs, find_runs(args.runs)))
        print(
            f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}   and open the same address"
        )
        print("Press Ctrl-C to end the monitor; the training is not affected.")
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
    return 0


def _found(paths: list[Path], runs: list[Path]) -> str:
    """What the page will show, in one line."""
    from flatout.monitor.run_state import without_run

    if not runs:
        return f"No run in {' or '.join(map(str, paths))} yet: the page waits, and shows it as soon as it starts."
    named = [path for path in paths if path in runs] or runs[:1]
    others = len(runs) - len(named)
    missing = without_run(paths, runs)
    return (
        f"Shown: {', '.join(map(str, named))}"
        + (f"; {others} more to choose from in the page" if others else "")
        + (f"; {' and '.join(map(str, missing))} as soon as it starts" if missing else "")
    )


def _parser() -> argparse.ArgumentParser:
    flags = (
        value(
            "runs",
            "run folders to compare, or a folder of runs, of which the newest is shown (default: runs)",
            type=Path,
            nargs="*",
            default=[Path("runs")],
            metavar="RUN",
        ),
        value("--port", "port to listen on (default: any free one)", type=int, default=0),
    )
    parser = parser_of("flatout monitor", __doc__.partition("\n\nFiles:")[0], "", flags, shortened=True)
    about = "cost of an hour of this machine, to show that of the run"
    parser.add_argument(
        "--price", "--price-per-hour", dest="price_per_hour", type=float, metavar="PER_HOUR", help=about
    )
    return parser
