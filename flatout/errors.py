"""What went wrong, and the exit code a command ends with because of it.

Every message is written for a tired person with a log file: what, where, what to do next.
The exit codes are documented in docs/exit-codes.md; scripts may rely on them.
"""

import textwrap


def one_line(error: BaseException, most_letters: int = 10_000) -> str:
    """Kind and text of an error of any library in one line, cut between words if it is too long."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", most_letters, placeholder=" ...")


def counted(number: int, noun: str) -> str:
    """A number with its noun, for messages: '1 picture', '2 classes'."""
    return f"{number:,} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


class FlatoutError(Exception):
    """Base of every error a user can cause or mend; its text is the whole story."""

    exit_code = 70


class ConfigError(FlatoutError, ValueError):
    """A flag, a YAML key or an argument that cannot be obeyed."""

    exit_code = 2


class MissingFileError(ConfigError, FileNotFoundError):
    """A file that a flag or an argument names, and that is not there."""


class DataError(FlatoutError, ValueError):
    """Samples that cannot be read, or a source that does not keep its word."""

    exit_code = 3


class CheckpointError(FlatoutError, ValueError):
    """A checkpoint or weights that cannot be used: damaged, foreign, hostile, or made for another network."""

    exit_code = 4


class ResourceError(FlatoutError, RuntimeError):
    """The machine lacks something: memory, shared memory, descriptors, disk, a GPU."""

    exit_code = 5


class DivergedError(FlatoutError, ArithmeticError):
    """Training went where there is no way back: numbers that are not finite, again after a rollback."""

    exit_code = 6


class ChildLostError(FlatoutError, RuntimeError):
    """A child process died and could not be replaced."""

    exit_code = 7


class ParityError(FlatoutError, ArithmeticError):
    """An exported file does not compute what its network computes; it is not written."""

    exit_code = 8


class Interrupted(FlatoutError):
    """Training was asked to end, and everything is saved: the same command continues. Not a failure."""

    exit_code = 75

    @classmethod
    def by(cls, signal_name: str) -> "Interrupted":
        return cls(f"{signal_name}: everything is saved. Run the same command again to continue.")
