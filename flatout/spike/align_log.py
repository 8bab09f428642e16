"""When each exposure began and ended: CSV lines `frame_idx,t0,t1,event_count,seq`, where somebody has written them."""

import csv
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from flatout.errors import DataError

logger = logging.getLogger(__name__)


class Exposure(NamedTuple):
    """Times of a frame; both 0 if no log tells."""

    t0: float = 0.0
    t1: float = 0.0


def read_align_logs(paths: Iterable[str]) -> dict[tuple[str, int], Exposure]:
    """Exposures by (sequence, frame number); a log that is missing is left aside with a word."""
    found: dict[tuple[str, int], Exposure] = {}
    for path in map(Path, paths):
        if not path.is_file():
            logger.warning("ALIGN_LOG_PATHS: %s does not exist; exposure times stay 0.", path)
            continue
        with path.open(newline="") as file:
            for number, row in enumerate(csv.DictReader(file), 2):
                try:
                    found[row["seq"], int(row["frame_idx"])] = Exposure(float(row["t0"]), float(row["t1"]))
                except (KeyError, TypeError, ValueError):
                    raise DataError(
                        f"{path}:{number}: not a line of an align log. Its columns are frame_idx,t0,t1,event_count,seq."
                    ) from None
    return found
