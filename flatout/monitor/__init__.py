"""Show curves, state, speed, remaining time and machine load of a run in a browser, without writing anything.

The page is served to this machine only, under an address that cannot be guessed. To see it elsewhere, use `ssh -L`.

Files:

    run_state  The state of a run, read from its folder at any time: while files are being written, and after a crash
    server     A small read-only HTTP server for one run: the page and its data
"""

import argparse
import secrets
import socket
from pathlib import Path

from flatout.errors import ConfigError

RECORDS = ("run.json", "log.jsonl", "results.csv")
"""Files by which a run folder is recognized."""


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    args = _parser().parse_args(argv)
    folder = find_run(args.run)
    from flatout.monitor.server import make_server

    token = secrets.token_urlsafe(16)
    try:
        opened = make_server(folder, token, port=args.port, price_per_hour=args.price_per_hour)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--port {args.port}: cannot listen there: {why}. Use another port, or leave out --port for a free one."
        ) from error
    with opened as server:
        port = server.server_address[1]
        print(f"{folder}: http://127.0.0.1:{port}/{token}/")
        print(
            f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}   and open the same address"
        )
        print("Press Ctrl-C to end the monitor; the training is not affected.")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def find_run(path: Path) -> Path:
    """The run folder itself, or the newest one below a folder."""
    if _is_run(path):
        return path
    runs = [record for record in path.glob("**/run.json") if record.is_file()] if path.is_dir() else []
    if not runs:
        raise ConfigError(
            f"{path}: no run found (a folder with {' or '.join(RECORDS)}). Give a run folder such as runs/train/exp."
        )
    return max(runs, key=lambda record: record.stat().st_mtime).parent


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RECORDS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout monitor",
        description=__doc__.partition("\n\nFiles:")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "run", type=Path, nargs="?", default=Path("runs"), help="run folder, or a folder with runs (default: runs)"
    )
    parser.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    parser.add_argument(
        "--price",
        "--price-per-hour",
        dest="price_per_hour",
        type=float,
        default=None,
        metavar="PER_HOUR",
        help="cost of an hour of this machine, to show that of the run",
    )
    return parser
