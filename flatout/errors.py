"""The errors of flatout, each with the exit code of a command that ends with it.

Every message says what is wrong, where, and what to do next. The exit codes are documented in docs/exit-codes.md;
scripts may rely on them.
"""

import difflib
import textwrap
from collections.abc import Iterable

INTERNAL_ERROR_CODE = 70
"""Exit code of a command that fails because of a bug."""
CTRL_C_CODE = 130
"""Exit code of a command that Ctrl-C ends at once, as shells report it."""


def one_line(error: BaseException, max_characters: int = 10_000) -> str:
    """Type and message of any exception in one line, cut between words if it is too long."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", max_characters, placeholder=" ...")


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages: '1 image', '2 classes', '3 fixes'."""
    plural = "es" if noun.endswith(("s", "x")) else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def did_you_mean(word: str, known: Iterable[str], otherwise: str) -> str:
    """Advice for a word that is not known: the most similar one, or `otherwise` if none is similar."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {close[0]!r}?" if close else otherwise


class FlatoutError(Exception):
    """Base of all errors that a user can cause or fix; the text is the complete message."""

    exit_code = INTERNAL_ERROR_CODE


class ConfigError(FlatoutError, ValueError):
    """A flag, YAML key or argument that is wrong or cannot be used."""

    exit_code = 2


class MissingFileError(ConfigError, FileNotFoundError):
    """A file that a flag or argument names does not exist."""


class DataError(FlatoutError, ValueError):
    """Samples that cannot be read, or a source that violates its interface."""

    exit_code = 3


class CheckpointError(FlatoutError, ValueError):
    """A checkpoint or weights that cannot be used: damaged, foreign, hostile, or made for another network."""

    exit_code = 4


class ResourceError(FlatoutError, RuntimeError):
    """The machine lacks something: memory, shared memory, file descriptors, disk space, a GPU."""

    exit_code = 5


class DivergedError(FlatoutError, ArithmeticError):
    """Training diverged: loss, gradients or weights were not finite, also after going back to a checkpoint."""

    exit_code = 6


class ChildLostError(FlatoutError, RuntimeError):
    """A child process died and could not be replaced, or another rank failed or was lost."""

    exit_code = 7


class ParityError(FlatoutError, ArithmeticError):
    """An exported file does not compute the same as its network; it is not written."""

    exit_code = 8


class SlowerError(FlatoutError):
    """A profile is slower than another one by more than is allowed."""

    exit_code = 9


class Interrupted(FlatoutError):
    """Training was interrupted after saving everything: the same command continues. Not a failure."""

    exit_code = 75

    @classmethod
    def by(cls, signal_name: str) -> "Interrupted":
        """The error for a signal, such as "SIGTERM"."""
        return cls(f"{signal_name}: everything is saved. Run the same command again to continue.")
