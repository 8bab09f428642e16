"""Weights from elsewhere: `flatout weights get | list | push`. Nothing is downloaded unless this command is given.

Files:

    catalogue  Names of weights files: where each is downloaded from, and its SHA-256
    download   A file from a URL: continued after an interruption, checked, complete or not there at all
    hugging    Repositories of the Hugging Face Hub, through their own package
"""

from collections.abc import Sequence
from pathlib import Path

from flatout.cli import parser_of, show_log, switch, value
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

FLAGS = (
    value("action", "what to do", choices=("get", "list", "push")),
    value("what", "name, URL or hf://OWNER/REPO/FILE; for push, a file", nargs="?", metavar="WEIGHTS"),
    value("to", "for push: hf://OWNER/REPO", nargs="?", metavar="WHERE"),
    value("--sha256", "hash that the file must have; without one it is only printed", metavar="HEX"),
    value("--catalogue", "YAML file with names (default: weights.yaml here)", type=Path, metavar="FILE"),
    value("--out", "where to write the file (default: the cache)", type=Path, metavar="FILE"),
    switch("--force", "download it again although it is there"),
)


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    about = "Download weights by name or URL, list them, or upload them to the Hugging Face Hub."
    args = parser_of("flatout weights", about, _EXAMPLES, FLAGS, shortened=True).parse_args(argv)
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
