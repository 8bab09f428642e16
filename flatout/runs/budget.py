"""Time and cost of a training, over all processes that worked on it, and the budget that stops it.

    --price 2.10 --budget 5.00     money, in the currency of the price
    --budget 2h30m                 time

The time spent is kept in the run folder (spent.json), not in the checkpoint: going back to an earlier checkpoint does
not refund it. Time between two processes of a run is not counted.
"""

import json
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flatout.engine import Callback, End, RunStart, Saved
from flatout.errors import ConfigError

FILE_NAME = "spent.json"
_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")


def budget_s(text: str, price: float | None) -> float | None:
    """The most time that a budget allows: `5.00` is money and needs a price per hour; `2h30m`, `90m`, `1d` are times.

    None if it is empty; ConfigError for any other text.
    """
    if not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?|\.\d+", text):
        if not price:
            raise ConfigError(
                f"--budget {text} is an amount of money and needs a --price above 0, the cost of an hour. For a time, "
                "write for example 2h30m."
            )
        return 3600 * float(text) / price
    found = _DURATION.fullmatch(text)
    if not found or not any(found.groups()):
        raise ConfigError(
            f"--budget {text}: use an amount of money such as 5.00 (with --price), or a time such as 2h30m, 90m or 1d."
        )
    return sum(float(n) * unit for n, unit in zip(found.groups(), _UNITS_S.values(), strict=True) if n)


class Spending(Callback):
    """Counts time and cost since it was created; `start` adds those of earlier processes of the run."""

    def __init__(
        self, price: float | None = None, budget: str = "", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`price`: of an hour, in any currency."""
        if price is not None and price < 0:
            raise ConfigError(f"--price {price} must be 0 or more.")
        self.price, self._budget, self._budget_s, self._clock = price, budget, budget_s(budget, price), clock
        self._began, self._before_s = clock(), 0.0
        self._file: Path | None = None

    @property
    def folder(self) -> Path | None:
        """The folder of the run or job whose time is counted; None until `open`."""
        return None if self._file is None else self._file.parent

    @property
    def has_budget(self) -> bool:
        return self._budget_s is not None

    @property
    def seconds(self) -> float:
        """Seconds so far, of all processes of the run."""
        return self._before_s + self._clock() - self._began

    def cost(self, seconds: float | None = None) -> float | None:
        """The cost of these seconds, by default of those so far; None without a price."""
        return None if self.price is None else self.price * (self.seconds if seconds is None else seconds) / 3600

    def start(self, run: RunStart) -> None:
        self.open(run.folder, continues=run.continues)

    def open(self, folder: Path, *, continues: bool) -> None:
        """Keep spent.json in this folder. Of several calls only the first counts: that is the folder of the command."""
        if self._file is not None:
            return
        self._file = folder / FILE_NAME
        if continues:
            with suppress(OSError, ValueError, KeyError, TypeError):
                self._before_s = float(json.loads(self._file.read_text())["seconds"])
        self._write()

    def checkpoint(self, saved: Saved) -> None:
        self._write()

    def end(self, end: End) -> None:
        self._write()

    def over(self) -> str | None:
        """The reason to stop the training now; None while budget is left."""
        if self._budget_s is None or self.seconds < self._budget_s:
            return None
        return (
            f"The budget of {self._budget} is used up ({self.line()}). Everything is saved: run the same command "
            "with a larger --budget to continue."
        )

    def figures(self, left_s: float) -> dict[str, str]:
        """Cost so far and in all, given the remaining seconds, for the progress line; empty without a price."""
        if self.price is None:
            return {}
        return {"cost": f"{self.cost():.2f} of about {self.cost(self.seconds + left_s):.2f}"}

    def line(self) -> str:
        """Time and cost as text: '1:02:03, cost 2.17 at 2.10 an hour'."""
        minutes, seconds = divmod(round(self.seconds), 60)
        took = f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
        return took if self.price is None else f"{took}, cost {self.cost():.2f} at {self.price:.2f} an hour"

    def _write(self) -> None:
        """Write spent.json. A full disk is ignored; the record is then a little out of date."""
        if self._file is not None:
            with suppress(OSError):
                part = self._file.with_name(f".{FILE_NAME}.part")
                part.write_text(json.dumps({"seconds": round(self.seconds, 3), "cost": self.cost()}))
                part.replace(self._file)
