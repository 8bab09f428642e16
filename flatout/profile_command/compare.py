"""Two saved profiles side by side: what changed, and whether the second is slower than allowed.

Times are per image, scaled to the batch of the first profile, so that profiles with different batch sizes compare.
"""

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from flatout.clock import kind_of, label_of, place_label
from flatout.errors import SlowerError
from flatout.profiler import Ledger, Measurement, diagnose, load_measurement, make_ledger, number

MIN_CHANGE = 0.02
"""Fraction of the step; stages that changed by less are not listed as changes."""
MAX_CHANGES = 3


@dataclass(frozen=True)
class StageChange:
    """Time of one stage in both profiles, in milliseconds per step of the first."""

    place: str
    stage: str
    before_ms: float
    after_ms: float

    @property
    def added_ms(self) -> float:
        return self.after_ms - self.before_ms


@dataclass(frozen=True)
class Comparison:
    """Two profiles and their differences."""

    before: Measurement
    after: Measurement

    @property
    def _ledgers(self) -> tuple[Ledger, Ledger]:
        return make_ledger(self.before), make_ledger(self.after)

    @property
    def slower(self) -> float:
        """How much longer the second takes for the same images, relative to the first; below 0: it is faster."""
        before, after = self._ledgers
        return before.images_per_s / after.images_per_s - 1

    @property
    def changes(self) -> list[StageChange]:
        """All stages of both, in the order of the first ledger, then those that only the second has."""
        before, after = self._ledgers
        scale = before.images / after.images
        keys = dict.fromkeys((row.place, row.stage) for ledger in (before, after) for row in ledger.rows)
        places = list(dict.fromkeys(place for place, _ in keys))
        ordered = sorted(keys, key=lambda key: places.index(key[0]))
        return [StageChange(*key, before.ms(*key), scale * after.ms(*key)) for key in ordered]

    def text(self, names: tuple[str, str]) -> str:
        """The table, and a sentence about what changed."""
        return "\n".join([*self._head(names), *self._table(), "", *self._sentences()])

    def _head(self, names: tuple[str, str]) -> list[str]:
        return [
            f"{letter}: {name}: {ledger.num_steps} steps of {ledger.images:g} images, {ledger.step_ms:.1f} ms per step "
            f"(p10 {ledger.p10_ms:.1f}, p90 {ledger.p90_ms:.1f}), {number(ledger.images_per_s)} img/s"
            for letter, name, ledger in zip("AB", names, self._ledgers, strict=True)
        ]

    def _table(self) -> list[str]:
        before, _ = self._ledgers
        title = f"ms per {before.images:g} images"
        lines = ["", f"{title:<43}{'A':>10}{'B':>10}{'B - A':>10}"]
        for place, changes in groupby(self.changes, key=lambda change: change.place):
            lines.append(place_label(place))
            lines += [
                f"  {label_of(each.stage)[:40]:<41}{each.before_ms:10,.2f}{each.after_ms:10,.2f}{each.added_ms:+10,.2f}"
                for each in changes
            ]
        step_ms, added_ms = before.step_ms, before.step_ms * self.slower
        return [*lines, f"{'step':<43}{step_ms:10,.2f}{step_ms + added_ms:10,.2f}{added_ms:+10,.2f}"]

    def _sentences(self) -> list[str]:
        before, _ = self._ledgers
        way = "slower" if self.slower > 0 else "faster"
        size = abs(self.slower if self.slower > 0 else 1 / (1 + self.slower) - 1)
        # Idle time is what the others leave: more of it is no reason.
        busy = [each for each in self.changes if kind_of(each.stage) != "idle"]
        largest = sorted(busy, key=lambda each: -abs(each.added_ms))[:MAX_CHANGES]
        parts = [
            f"{label_of(each.stage)} ({place_label(each.place)}) {each.added_ms:+.1f} ms"
            for each in largest
            if abs(each.added_ms) > MIN_CHANGE * before.step_ms
        ]
        causes = [diagnose(measurement).cause for measurement in (self.before, self.after)]
        was = f"{causes[0]}, as before" if causes[0] == causes[1] else f"{causes[1]}; before: {causes[0]}"
        return [
            f"B is {size:.1%} {way}." + (f" What changed: {', '.join(parts)}." if parts else " No stage changed much."),
            f"Verdict: {was}.",
        ]


def compare(first: Path, second: Path, *, allowed: float | None = None) -> int:
    """Print the comparison of two saved profiles; SlowerError if the second is slower than allowed."""
    comparison = Comparison(load_measurement(_find(first)), load_measurement(_find(second)))
    print(comparison.text((str(first), str(second))))
    if allowed is not None and comparison.slower > allowed:
        raise SlowerError(
            f"{second} is {comparison.slower:.1%} slower than {first}; --fail-if-slower allows {allowed:.1%}. Look at "
            "the stages that changed, or profile again on an idle machine."
        )
    return 0


def _find(path: Path) -> Path:
    """The profile.json of a folder, or the file itself."""
    return path / "profile.json" if path.is_dir() else path
