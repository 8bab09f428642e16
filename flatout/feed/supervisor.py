"""The supervisor: publishes tasks, and recovers from workers that die, hang or fail.

Runs in the owner's thread while it waits for a batch; workers only depend on it when something goes wrong. A task whose
worker died is published again, and since a sample is a pure function of its position in the stream, the batch comes
out the same. An item that keeps killing workers is quarantined.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

from flatout.clock import machine
from flatout.errors import ChildLostError, DataError
from flatout.feed.forkserver import WorkerEnded
from flatout.feed.plan import Step, micro_batches
from flatout.feed.processes import RemoteError, WorkerBackend, describe_exit
from flatout.feed.ring import DEADLY, UNKNOWN, UNREADABLE, Claim, Ring, Task
from flatout.feed.source import ItemSource, Source, num_items_of
from flatout.feed.worker import Failure, Report, cause_of

logger = logging.getLogger(__name__)

CANCEL_POLL_S = 0.002
STRIKES = 3
"""Number of worker deaths after which an item is quarantined."""
FILES_NAMED = 10
"""Maximum number of files listed in an error message."""


class SampleError(DataError):
    """A sample could not be read; the worker's traceback is the `__cause__`."""

    def __init__(self, text: str, *, index: int, position: int, where: str) -> None:
        super().__init__(text)
        self.index = index
        self.position = position
        self.where = where


class Supervisor:
    """Publishes steps into slots and waits until they are complete."""

    def __init__(
        self, ring: Ring, backend: WorkerBackend, source: Source, *, watchdog_s: float, bad_share: float
    ) -> None:
        self._ring = ring
        self._backend = backend
        self._source = source
        self._items = source if isinstance(source, ItemSource) else None
        self._watchdog_s = watchdog_s
        self._tick_s = min(1.0, watchdog_s / 4) if watchdog_s else 1.0
        # The smaller of the two: an item may be part of many samples, and a sample may be made of many items.
        self._num_replaceable = min(len(source), num_items_of(source))
        self._max_bad = max(1, int(bad_share * self._num_replaceable)) if bad_share else 0
        self._open: dict[int, Task] = {}  # ticket -> task of a slot in flight
        self._complete: set[int] = set()  # complete slots whose reports have been processed
        self._failures: dict[int, list[Failure]] = defaultdict(list)  # per slot
        self._spills: dict[int, list[Task]] = defaultdict(list)  # per slot
        self._scratch_bytes = ring.spec.scratch_bytes
        self._strikes: Counter[int] = Counter()  # per item
        self._struck: dict[int, set[int]] = defaultdict(set)  # per slot, items that workers died on
        self._consecutive_deaths = 0
        self._last_finished = 0, 0  # completed slots, and done tasks of slots in flight, at the last death
        self._num_completed = 0
        self._watched_at = time.monotonic()
        self._last_claims: dict[int, Claim | None] = {}  # worker -> its claim at the last check
        self._warned: set[tuple[int, int]] = set()
        self._killed: set[int] = set()  # tickets
        self._oom_kills = machine.oom_kills()
        self.bad: dict[int, str] = {}
        """Items that had to be replaced -> cause."""

    def publish(self, slot: int, step: Step, lane: int = 0) -> None:
        """Have the workers of a lane fill `slot` with the samples of `step`; the slot must not be in use.

        A lane is a queue of tasks: one for all workers, or one for each (`RingSpec.num_lanes`).
        """
        if self._ring.slots[slot].head["scratch_bytes"] < self._scratch_bytes:
            self._ring.enlarge_scratch(slot, self._scratch_bytes)
        ranges = micro_batches(len(step.indices), self._ring.spec.micro_batch)
        self._ring.slots[slot].open_for(step, len(ranges))
        self._complete.discard(slot)
        self._open = {ticket: task for ticket, task in self._open.items() if task.slot != slot}
        self._publish([Task(slot, begin, end) for begin, end in ranges], lane)

    def is_ready(self, slot: int) -> bool:
        """Whether a published slot is complete and without failures. Does not wait."""
        return self.count_ready([slot]) == 1

    def count_ready(self, slots: Iterable[int]) -> int:
        """How many of these published slots are complete and without failures. Does not wait."""
        self._pump(timeout_s=0)
        return sum(self._is_complete(slot) and slot not in self._failures for slot in slots)

    def wait_until_ready(self, slot: int) -> None:
        """Block until `slot` is complete. Raises SampleError for the first row that could not be read."""
        while not self._is_complete(slot):
            self._pump(self._tick_s)
        if failures := self._failures.pop(slot, None):
            self._raise(slot, min(failures))

    def settle(self, slot: int) -> None:
        """Drop the spills of a slot whose rows have been gathered, and remember how much scratch it needed."""
        spills = self._spills.pop(slot, [])
        if not spills:
            return
        needed = int(self._ring.slots[slot].head["cursor"]) + sum(task.spill_bytes for task in spills)
        for task in spills:
            self._ring.arena.discard(task.spill_offset)
        if needed > self._scratch_bytes:
            if self._scratch_bytes == self._ring.spec.scratch_bytes:
                logger.warning(
                    "A batch has %.1f MB of ragged rows, more than the %.1f MB reserved for them: slots grow to fit. "
                    "A larger Rows(expected=...) avoids reading the samples twice.",
                    needed / 1e6,
                    self._scratch_bytes / 1e6,
                )
            self._scratch_bytes = needed + needed // 4

    def cancel(self) -> None:
        """Cancel everything that is published; blocks until the tasks in progress have ended."""
        withdrawn = self._ring.withdraw_unclaimed()
        self._open = {ticket: task for ticket, task in self._open.items() if ticket not in withdrawn}
        # Workers send no report for a task that does not complete its slot, so this polls.
        while not all(map(self._ring.is_done, self._open.values())):
            self._pump(CANCEL_POLL_S)
        self._open.clear()
        self._failures.clear()
        for slot in list(self._spills):
            self.settle(slot)

    def exclude(self, causes: Mapping[int, str], *, deadly: bool) -> None:
        """Replace these items from now on and never read them again; raises DataError if there are too many."""
        self._note_bad(causes)
        for item in causes:
            self._ring.mark(item, DEADLY if deadly else UNREADABLE)

    def _is_complete(self, slot: int) -> bool:
        if slot in self._complete:
            return True
        if not self._ring.slots[slot].is_complete:
            return False
        self._pump(timeout_s=0)  # problems with its rows were reported before it became complete
        self._complete.add(slot)
        self._num_completed += 1
        for item in self._struck.pop(slot, ()):
            del self._strikes[item]  # it was read in the end, so the item did not cause the deaths
        return True

    def _publish(self, tasks: list[Task], lane: int) -> None:
        self._open |= zip(self._ring.publish(tasks, lane), tasks, strict=True)
        self._backend.announce(len(tasks), lane)

    def _pump(self, timeout_s: float) -> None:
        """Process reports and ended workers; once per tick, check for workers that hang."""
        reports, ended = self._backend.wait_for_reports(timeout_s)
        for report in reports:
            self._handle_report(report)
        for end in ended:
            self._recover(end)
        if time.monotonic() - self._watched_at >= self._tick_s:
            self._watched_at = time.monotonic()
            self._backend.announce_again(self._ring.num_unclaimed())
            self._watch()

    def _handle_report(self, report: Report) -> None:
        self._note_bad(dict(report.replaced))
        task = self._open.get(report.ticket)
        if task is None:
            return  # its slot has been taken since
        if report.overflow_bytes:
            del self._open[report.ticket]
            offset = self._ring.arena.grow(report.overflow_bytes)
            spill = task._replace(spill_offset=offset, spill_bytes=report.overflow_bytes)
            self._spills[task.slot].append(spill)
            self._publish([spill], self._ring.lane_of(report.ticket))
        elif report.failure:
            self._failures[task.slot].append(report.failure)

    def _recover(self, end: WorkerEnded) -> None:
        """Publish the task of a dead worker again, and start a new worker in its place."""
        claim = self._ring.claim_of(end.worker)
        self._ring.release(end.worker)
        lost = self._unfinished(claim)
        logger.warning(
            "Worker %d (pid %d) died: %s%s. %s",
            end.worker,
            end.pid,
            describe_exit(end.status),
            f" while reading {self._describe_claim(claim, lost)}" if claim and lost else "",
            self._advice(),
        )
        self._consecutive_deaths = 1 if self._have_finished_something() else self._consecutive_deaths + 1
        if self._consecutive_deaths > 10 + 3 * self._ring.spec.num_workers:
            raise ChildLostError(
                f"{self._consecutive_deaths} workers in a row died without finishing a task "
                f"(the last one: {describe_exit(end.status)}). See the warnings above; use workers=0 to see the cause."
            )
        if claim and lost:
            del self._open[claim.ticket]
            if claim.item != UNKNOWN:
                self._strike(claim.item, lost.slot)
            # Samples are read one by one from now on: if it happens again, the sample is known.
            again = lost._replace(singly=True)
            if lost in self._spills[lost.slot]:
                self._spills[lost.slot][self._spills[lost.slot].index(lost)] = again
            self._publish([again], self._ring.lane_of(claim.ticket))
        else:
            self._backend.announce_again(self._ring.num_unclaimed())  # it may have read a token before it died
        self._backend.restart(end.worker)

    def _have_finished_something(self) -> bool:
        """Whether any task was finished since the last call."""
        before = self._last_finished
        self._last_finished = self._num_completed, sum(int(slot.done.sum()) for slot in self._ring.slots)
        return self._last_finished != before

    def _unfinished(self, claim: Claim | None) -> Task | None:
        """The task of a claim, unless it is done."""
        task = self._open.get(claim.ticket) if claim else None
        return None if task is None or self._ring.is_done(task) else task

    def _strike(self, item: int, slot: int) -> None:
        self._strikes[item] += 1
        self._struck[slot].add(item)
        if self._strikes[item] == STRIKES:
            self._consecutive_deaths = 0  # their cause has been found
            self.exclude({item: f"{STRIKES} workers died while reading it"}, deadly=True)

    def _note_bad(self, causes: Mapping[int, str]) -> None:
        new = {item: cause for item, cause in causes.items() if item not in self.bad}
        self.bad |= new
        if new and len(self.bad) > self._max_bad:
            listed = [f"{self.where(item)} ({cause})" for item, cause in list(self.bad.items())[-FILES_NAMED:]]
            rest = f"; and {len(self.bad) - len(listed)} more" if len(self.bad) > len(listed) else ""
            raise DataError(
                f"{len(self.bad)} of {self._num_replaceable} {'files' if self._items else 'samples'} could not be "
                f"read, more than the {self._max_bad} allowed: {'; '.join(listed)}{rest}. Check the data set."
            )
        for item, cause in new.items():
            name = self._describe_item(item)
            logger.warning("%s is replaced by a substitute: %s", name[0].upper() + name[1:], cause)

    def _watch(self) -> None:
        """Warn about workers that spend long on one item, and kill those that hang."""
        if not self._watchdog_s:
            return
        for worker in range(self._ring.spec.num_workers):
            claim = self._ring.claim_of(worker)
            before, self._last_claims[worker] = self._last_claims.get(worker), claim
            task = self._unfinished(claim)
            # Must be unchanged since the last check: a worker that only waited to send its report has moved on by now.
            if claim is None or task is None or claim != before:
                continue
            age_s = (time.monotonic_ns() - claim.since_ns) / 1e9
            if age_s > self._watchdog_s:
                self._kill_hanging(worker, claim, task, age_s)
            elif age_s > self._watchdog_s / 4 and (claim.ticket, claim.item) not in self._warned:
                self._warned.add((claim.ticket, claim.item))
                logger.warning(
                    "Worker %d has been reading %s for %.0f s; the others continue. It will be killed after %g s.",
                    worker,
                    self._describe_claim(claim, task),
                    age_s,
                    self._watchdog_s,
                )

    def _kill_hanging(self, worker: int, claim: Claim, task: Task, age_s: float) -> None:
        text = f"Worker {worker} hangs: it has been reading {self._describe_claim(claim, task)} for {age_s:.0f} s"
        if not self._backend.can_be_killed:
            raise ChildLostError(f"{text}. A thread cannot be killed; with backend='process' the worker is replaced.")
        if claim.ticket not in self._killed:  # a failing disk can keep a killed process alive for a while
            self._killed.add(claim.ticket)
            logger.warning("%s. It is killed and replaced.", text)
            self._backend.kill(worker)

    def _describe_claim(self, claim: Claim, task: Task) -> str:
        """The item or samples of a claim, with their files."""
        if claim.item != UNKNOWN:
            return self._describe_item(claim.item)
        indices = self._ring.slots[task.slot].indices[task.begin : task.end].tolist()
        return f"one of {len(indices)} samples starting with {indices[0]} ({self._where_sample(indices[0])})"

    def _describe_item(self, item: int) -> str:
        return f"file {self.where(item)}" if self._items else f"sample {item} ({self.where(item)})"

    def where(self, item: int) -> str:
        """The source's name for an item."""
        return self._where_sample(item) if self._items is None else _safe_where(self._items.where_item, item)

    def _where_sample(self, sample: int) -> str:
        return _safe_where(self._source.where, sample)

    def _advice(self) -> str:
        """What a worker's death means, and what to do about it."""
        oom_kills = machine.oom_kills()
        if oom_kills is not None and self._oom_kills is not None and oom_kills > self._oom_kills:
            self._oom_kills = oom_kills
            fewer = max(1, self._ring.spec.num_workers // 2)
            return (
                f"The system ran out of memory: use fewer workers (--workers {fewer}), a smaller batch, or fewer slots "
                "in FeedConfig."
            )
        return "It is replaced; the batches stay the same."

    def _raise(self, slot_number: int, failure: Failure) -> None:
        slot = self._ring.slots[slot_number]
        if failure.row < 0:
            raise DataError(f"A worker failed: {failure.cause}.") from RemoteError(failure.traceback)
        where = self._where_sample(failure.sample) if failure.item == UNKNOWN else self.where(failure.item)
        position = int(slot.positions[failure.row])
        raise SampleError(
            f"Sample {failure.sample} ({where}) could not be read, at position {position} of epoch "
            f"{int(slot.head['epoch'])}: {failure.cause}",
            index=failure.sample,
            position=position,
            where=where,
        ) from RemoteError(failure.traceback)


def _safe_where(where: Callable[[int], str], number: int) -> str:
    """The result of a source's `where`, or the error that it raised."""
    try:
        return where(number)
    except Exception as error:  # the user's code; it must not hide the message that needs the name
        return f"where() raised {cause_of(error)}"
