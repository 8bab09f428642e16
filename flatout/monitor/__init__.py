"""`flatout monitor RUN`: curves, state, speed, time left and the machine's load, in a browser. Reads, never writes.

The page is served to this machine only, under an address that cannot be guessed; `ssh -L` brings it to yours.

Files:

    run_state  What a run folder says about its run, at any moment: while files are being written, and after a crash
    server     A small read-only server for one run: the page, and what it asks for
"""

import argparse
import secrets
import socket
from pathlib import Path

from flatout.errors import ConfigError

RECORDS = ("run.json", "log.jsonl", "results.csv")
"""Files of a run that the page is made of."""


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    args = _parser().parse_args(argv)
    folder = find_run(args.run)
    from flatout.monitor.server import make_server

    token = secrets.token_urlsafe(16)
    try:
        opened = make_server(folder, token, port=args.port, price_per_hour=args.price_per_hour)
    except (OSError, OverflowError) as error:
        why = f"cannot be listened on: {getattr(error, 'strerror', None) or error}"
        raise ConfigError(f"--port {args.port} {why}. Use another, or none for any that is free.") from error
    with opened as server:
        port = server.server_address[1]
        print(f"{folder}: http://127.0.0.1:{port}/{token}/")
        print(
            f"From another machine: ssh -L {port}:127.0.0.1:{port} {socket.gethostname()}   and open the same address"
        )
        print("Ctrl-C ends it; the training does not notice.")
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def find_run(path: Path) -> Path:
    """A run folder, or the newest one below a folder of runs."""
    if _is_run(path):
        return path
    runs = [record for record in path.glob("**/run.json") if record.is_file()] if path.is_dir() else []
    if not runs:
        raise ConfigError(f"{path}: no run is there (a folder with {' or '.join(RECORDS)}). Name one: runs/train/exp")
    return max(runs, key=lambda record: record.stat().st_mtime).parent


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in RECORDS)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout monitor",
        description=__doc__.partition("\n\nFiles:")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs"), help="run folder, or where to look for one")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument(
        "--price-per-hour", type=float, default=None, help="of this machine, to show what the run costs"
    )
    return parser
