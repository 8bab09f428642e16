"""May a file of weights be written under this name? Asked before anything heavy is loaded or computed."""

from pathlib import Path

from flatout.errors import ConfigError

ENDINGS = (".safetensors", ".pt")
"""Of a file's name; they say its format."""


def check_out(out: Path, *, force: bool) -> None:
    """ConfigError if the name says no format, or if the file exists and must not be overwritten."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out}: the name must end in {' or '.join(ENDINGS)}, which says the format.")
    if out.exists() and not force:
        raise ConfigError(f"{out}: exists already. Choose another name, or overwrite it with --force.")
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: its folder does not exist. Make it first, or choose another one.")
