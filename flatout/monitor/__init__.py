"""`flatout monitor RUN`: curves, state, speed, time left and the machine's load, in a browser. Reads, never writes.

The page is served to this machine only, under an address that cannot be guessed; `ssh -L` brings it to yours.
"""

import argparse
import secrets
import socket
from pathlib import Path

from flatout.errors import ConfigError


def main(argv: list[str]) -> int:
    """Serve until Ctrl-C; returns the exit code."""
    args = _parser().parse_args(argv)
    folder = find_run(args.run)
    from flatout.monitor.server import make_server

    token = secrets.token_urlsafe(16)
    with make_server(folder, token, port=args.port, price_per_hour=args.price_per_hour) as server:
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
    runs = [record.parent for record in path.glob("**/run.json")] if path.is_dir() else []
    if not runs:
        raise ConfigError(f"{path}: no run is there (a folder with run.json or results.txt). Name one: runs/train/exp")
    return max(runs, key=lambda run: (run / "run.json").stat().st_mtime)


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("run.json", "results.txt", "log.jsonl"))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout monitor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="?", default=Path("runs"), help="run folder, or where to look for one")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument(
        "--price-per-hour", type=float, default=None, help="of this machine, to show what the run costs"
    )
    return parser
