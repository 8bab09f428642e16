"""Weights from elsewhere: `flatout weights get | list | push`. Nothing is downloaded unless this command is given.

Files:

    catalogue  Names of weights files: where each is downloaded from, and its SHA-256
    download   A file from a URL: continued after an interruption, checked, complete or not there at all
    hugging    Repositories of the Hugging Face Hub, through their own package
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import ConfigError
from flatout.hub.catalogue import downloaded as downloaded
from flatout.hub.catalogue import shipped as shipped

_EXAMPLES = """\
examples:
  flatout weights list
  flatout weights get https://HOST/bolts.safetensors --sha256 5f8c1a...      then: --weights bolts
  flatout weights get bolts --catalogue team.yaml                           a name with its URL and SHA-256 in a file
  flatout weights get hf://OWNER/REPO/best.safetensors                      needs: pip install huggingface_hub
  flatout weights push best.safetensors hf://OWNER/REPO                     the same; HF_TOKEN must be set

Files are kept in ~/.cache/flatout/weights (or $FLATOUT_CACHE/weights), where `--weights NAME` finds them. The same
command continues an interrupted download. A catalogue is a YAML file of entries `NAME: {url: ..., sha256: ...}`.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    args = _parser().parse_args(argv)
    from flatout.cli import show_log
    from flatout.hub import catalogue

    if args.action == "list":
        print(catalogue.listing())
        return 0
    if args.what is None:
        raise ConfigError(f"flatout weights {args.action}: say which weights: a name, a URL or hf://OWNER/REPO/FILE.")
    if args.action == "push":
        from flatout.hub.hugging import push

        if args.to is None:
            raise ConfigError(
                "flatout weights push: say where to: flatout weights push best.safetensors hf://OWNER/REPO"
            )
        print(push(Path(args.what), args.to))
        return 0
    show_log()
    path = catalogue.get(args.what, sha256=args.sha256, file=args.catalogue, out=args.out, force=args.force)
    where = "comes with flatout" if path in catalogue.shipped().values() else "ready"
    print(f"{path}: {where}. Use it with --weights {path.stem if args.out is None else path}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flatout weights",
        description="Download weights by name or URL, list them, or upload them to the Hugging Face Hub.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("get", "list", "push"), help="what to do")
    parser.add_argument(
        "what", nargs="?", metavar="WEIGHTS", help="name, URL or hf://OWNER/REPO/FILE; for push, a file"
    )
    parser.add_argument("to", nargs="?", metavar="WHERE", help="for push: hf://OWNER/REPO")
    parser.add_argument("--sha256", metavar="HEX", help="hash that the file must have; without one it is only printed")
    parser.add_argument(
        "--catalogue", type=Path, metavar="FILE", help="YAML file with names (default: weights.yaml here)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write the file (default: the cache)")
    parser.add_argument("--force", action="store_true", help="download it again although it is there")
    return parser
