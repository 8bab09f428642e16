"""What the library logs, as lines on the terminal: a command decides that, never the library."""

import logging
import sys


def show_log() -> None:
    """Print messages of flatout from now on: plain to stdout, warnings marked. Calling it twice changes nothing."""
    logger = logging.getLogger("flatout")
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_Plain())
        logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class _Plain(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {text}"
