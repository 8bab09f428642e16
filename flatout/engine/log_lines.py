"""What the library logs, as lines on the terminal: a command decides that, never the library."""

import logging
import sys


def show_log(*, only_warnings: bool = False) -> None:
    """Print messages of flatout from now on: plain to stdout, warnings marked. Calling it twice changes nothing.

    Of several ranks the first speaks; the others show warnings only.
    """
    logger = logging.getLogger("flatout")
    if not any(isinstance(handler, _Lines) for handler in logger.handlers):
        logger.addHandler(_Lines())
    logger.setLevel(logging.WARNING if only_warnings else logging.INFO)


class _Lines(logging.Handler):
    """Writes to whatever stdout is at that moment, so that it may be redirected later."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
            mark = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
            print(f"{mark}{text}", file=sys.stdout, flush=True)
        except BrokenPipeError:
            raise  # nobody reads any more: the command ends, and says so by its exit code
        except Exception:
            self.handleError(record)
