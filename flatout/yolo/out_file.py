"""May a file of weights be written under this name? Asked before anything heavy is loaded or computed."""

import os
from pathlib import Path

from flatout.errors import ConfigError

ENDINGS = (".safetensors", ".pt")
"""Of a file's name; they say its format."""
MAX_NAME_BYTES = 200
"""Of any file system we know 255, of which the hidden name it is written under needs some."""


def check_out(out: Path, *, force: bool) -> None:
    """ConfigError if the name says no format, or if the file exists and must not be overwritten."""
    if out.suffix not in ENDINGS:
        raise ConfigError(f"{out}: the name must end in {' or '.join(ENDINGS)}, which says the format.")
    if len(os.fsencode(out.name)) > MAX_NAME_BYTES:
        raise ConfigError(f"{str(out)[:200]}...: the name is too long for a file. Choose a shorter one.")
    if os.path.isdir(out):
        raise ConfigError(f"{out}: is a folder. Choose the name of a file.")
    if os.path.exists(out) and not force:
        raise ConfigError(f"{out}: exists already. Choose another name, or overwrite it with --force.")
    if not os.path.isdir(out.parent):
        raise ConfigError(f"{out}: its folder does not exist. Make it first, or choose another one.")
