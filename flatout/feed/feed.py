"""Batches for training: in plan order, with any number of workers, resumable at any step.

source --read--> worker --write--> ring slot --yield--> batch
"""

import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.errors import ConfigError
from flatout.feed.batch import Batch
from flatout.feed.config import FeedConfig
from flatout.feed.plan import EpochPlans, Plan
from flatout.feed.runtime import FeedRuntime, Lease, Meter
from flatout.feed.source import ItemSource, Source, check_source

if TYPE_CHECKING:
    from flatout.feed.device import DeviceBatches


logger = logging.getLogger(__name__)

STATE_KEYS = {"epoch", "next_step", "plan", "order", "weights", "quarantine"}


class Feed:
    """Resumable stream of host batches, in plan order.

    A batch is a view of its slot: it is overwritten after the next `next()`. Copy it to keep it.
    Iterating gives the rest of the current epoch; iterating again, the next epoch:

        with Feed(source, Plan(num_samples=len(source), batch_size=64), FeedConfig(workers=8)) as feed:
            for epoch in range(10):
                for batch in feed:
                    train(batch["images"])

    Not for use from several threads at once. `close()` may be called twice.
    """

    def __init__(
        self,
        source: Source,
        plan: Plan,
        config: FeedConfig | None = None,
        *,
        unreadable: Mapping[int, str] | None = None,
    ) -> None:
        """`unreadable`: items that were found to be so before, and why; they are replaced from the start."""
        check_source(source)
        if plan.num_samples != len(source):
            raise ConfigError(f"The plan is for {plan.num_samples} samples, the source has {len(source)}.")
        self.source = source
        self.plan = plan
        self.config = config or FeedConfig()
        self._num_workers = self.config.num_workers
        self._epoch, self._next_step = 0, 0
        self._epochs = EpochPlans(plan)
        self._unreadable = dict(unreadable or {})
        self._quarantine: dict[int, str] = {}
        self._bad: dict[int, str] = {}
        self._num_replaced = 0
        self._logged: set[int] = set()
        self._works: FeedRuntime | None = None
        self._pass: weakref.ref[Pass] | None = None  # weak, so that a feed that is dropped ends at once

    def __enter__(self) -> "Feed":
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __len__(self) -> int:
        """Steps of the current epoch."""
        return self._epochs[self._epoch].num_steps

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(self._epoch, start=self._next_step)

    def start(self) -> None:
        """Bring up slots and workers; blocks until they are there. Iterating does it if need be."""
        if self._works is not None and self._works.stream.is_broken:
            self.close()
        fresh = self._works is None
        if self._works is None:
            self._works = FeedRuntime(self.source, self.plan, self.config, self._num_workers)
        try:
            if fresh:
                self._works.foreman.give_up(self._unreadable, deadly=False)
                self._works.foreman.give_up(self._quarantine, deadly=True)
            self._works.crew.call_up()
        except BaseException:
            self.close()
            raise
        if fresh:
            self._works.meter.restart()  # nobody waits for batches while workers start

    def close(self) -> None:
        """End the workers and give the memory back."""
        if self._works is not None:
            self._remember_bad()
            self._num_replaced += self._works.stream.num_replaced
            self._works.close()
            self._works = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch from step `start` on. Ends any other pass over this feed."""
        return _borrow(self.open(epoch, start))

    def open(self, epoch: int, start: int = 0) -> "Pass":
        """As `epoch`, for those who must hold several batches at a time, such as the copy to a device."""
        num_steps = self._epochs[epoch].num_steps
        if epoch < 0 or not 0 <= start <= num_steps:
            raise ConfigError(f"epoch={epoch}, start={start} is outside the plan: an epoch has {num_steps} steps.")
        self.start()
        self._seek(epoch, start)
        self._epoch, self._next_step = epoch, start
        run = Pass(self, self._started, epoch, range(start, num_steps))
        self._pass = weakref.ref(run)
        return run

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands: after the batch that was handed out last. Plain containers only."""
        return self.state_at(self._epoch, self._next_step)

    def state_at(self, epoch: int, next_step: int) -> dict[str, Any]:
        """The state of a trainer that has trained on every step before `next_step` of `epoch`."""
        self._remember_bad()
        return {
            "epoch": epoch,
            "next_step": next_step,
            "plan": self.plan.fingerprint(),
            "order": self._epochs[epoch].digest(),
            "weights": None if self.plan.weights is None else np.asarray(self.plan.weights, np.float64).tolist(),
            "quarantine": {str(item): cause for item, cause in sorted(self._quarantine.items())},
            "num_items": self._num_items,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict()` stood; refuses, with the differences, if the stream would differ."""
        if not isinstance(state, dict) or STATE_KEYS - state.keys():
            raise ConfigError("This is not the state of a feed: give what its state_dict() returned.")
        mine, saved = self.plan.fingerprint(), state["plan"]
        if changed := [
            f"{name} was {saved.get(name)}, is {mine[name]}" for name in mine if saved.get(name) != mine[name]
        ]:
            raise ConfigError(f"This feed cannot continue the saved stream: {'; '.join(changed)}.")
        plan = self.plan.with_weights(_as_weights(state["weights"]))
        if plan.epoch(state["epoch"]).digest() != state["order"]:
            raise ConfigError("This feed cannot continue the saved stream: the order of its epoch has changed.")
        self.close()
        self.plan, self._epochs = plan, EpochPlans(plan)
        self._epoch, self._next_step = state["epoch"], state["next_step"]
        # Numbered otherwise, they are other things; what kills workers is found out again.
        is_same = state.get("num_items", self.plan.num_samples) == self._num_items
        self._quarantine = {int(item): cause for item, cause in state["quarantine"].items()} if is_same else {}

    def set_weights(self, weights: np.ndarray | None) -> None:
        """Sampling weights from the next epoch on; to be called between epochs."""
        if self._next_step:
            raise ConfigError(
                f"Weights can change between epochs only; epoch {self._epoch} is at step {self._next_step}."
            )
        self.plan = self.plan.with_weights(_as_weights(weights))
        self._epochs = EpochPlans(self.plan)
        if self._works is not None:
            self._works.stream.follow(iter(()))

    def to_device(self, device: "str | Any") -> "DeviceBatches":
        """The same stream as torch tensors on `device`, copied one batch ahead on a side stream."""
        from flatout.feed.device import DeviceBatches

        return DeviceBatches(self, device)

    @property
    def meter(self) -> Meter:
        """Live numbers of a started feed: `print(feed.meter.read().line())`."""
        return self._started.meter

    @property
    def bad_samples(self) -> dict[int, str]:
        """Samples that had to be replaced so far, and why; of an `ItemSource`, its items."""
        self._remember_bad()
        return self._bad | self._quarantine

    @property
    def num_replaced(self) -> int:
        """How often a substitute was shown since the start."""
        return self._num_replaced + self._started.stream.num_replaced

    def log_replaced(self) -> None:
        """One warning that lists the files that could not be read, less those that were listed before.

        For the end of a run: each file was named when it was found, perhaps days before.
        """
        bad = {item: cause for item, cause in self.bad_samples.items() if item not in self._logged}
        if not bad:
            return
        self._logged |= bad.keys()
        where = self.source.where_item if isinstance(self.source, ItemSource) else self.source.where
        logger.warning(
            "%d %s could not be read, and others were shown instead. Repair or remove: %s.",
            len(bad),
            "file" if len(bad) == 1 else "files",
            "; ".join(f"{where(item)} ({cause})" for item, cause in bad.items()),
        )

    @property
    def num_workers(self) -> int:
        return self._num_workers

    @property
    def worker_pids(self) -> dict[int, int]:
        """Worker -> process id."""
        return self._started.crew.pids()

    @property
    def memory_bytes(self) -> int:
        """Shared memory the slots take."""
        return self._started.ring.arena.reserved_bytes

    @property
    def _started(self) -> "FeedRuntime":
        if self._works is None:
            raise ConfigError("The feed is not started: iterate it, use it in a `with` block, or call start().")
        return self._works

    def _is_open(self, run: "Pass") -> bool:
        return self._pass is not None and self._pass() is run and self._works is run.works

    def _seek(self, epoch: int, start: int) -> None:
        """Make (epoch, start) the next step delivered; what was read ahead stays if it is just that."""
        stream = self._started.stream
        if stream.next_step is not None and (stream.next_step.epoch, stream.next_step.step) == (epoch, start):
            stream.reclaim()
        else:
            # On into the next epochs if workers stay.
            last_epoch = (self.config.epochs or np.inf) - 1 if self.config.persistent_workers else epoch
            stream.follow(self._epochs.steps(epoch, start, last_epoch))

    @property
    def _num_items(self) -> int:
        return self.source.num_items if isinstance(self.source, ItemSource) else len(self.source)

    def _remember_bad(self) -> None:
        if self._works is not None:
            bad = self._works.foreman.bad
            self._bad |= bad
            self._quarantine = {item: bad[item] for item in self._works.ring.deadly_items()}


class Pass:
    """The rest of one epoch: take batches in order, give their slots back in any order."""

    def __init__(self, feed: Feed, works: FeedRuntime, epoch: int, steps: range) -> None:
        self._feed = feed
        self._epoch = epoch
        self._steps = steps
        self.works = works

    def is_ready(self) -> bool:
        """Whether `take` would return at once."""
        return not self._steps or self.works.stream.is_ready()

    def take(self) -> Lease | None:
        """The next batch, None after the last; blocks until it is complete."""
        if not self._steps:
            return None
        if not self._feed._is_open(self):
            raise ConfigError("This pass has ended: the feed was closed, or iterated anew.")
        lease = self.works.stream.take()
        # Before the batch is handed out: a checkpoint taken while it trains must not replay it.
        self._feed._epoch, self._feed._next_step = self.position_after(lease.batch.step)
        self._steps = self._steps[1:]
        if not self._steps and not self._feed.config.persistent_workers:
            # Now, not when `None` is asked for: who counts steps never does.
            self.works.crew.send_home()
        return lease

    def give_back(self, lease: Lease) -> None:
        """The batch is no longer needed; its slot is filled anew."""
        if self._feed._is_open(self):
            self.works.stream.give_back(lease)

    def position_after(self, step: int) -> tuple[int, int]:
        """Epoch and step that follow `step` of this pass."""
        return (self._epoch, step + 1) if step + 1 < self._steps.stop else (self._epoch + 1, 0)


def _as_weights(weights: np.ndarray | list[float] | None) -> np.ndarray | None:
    return None if weights is None else np.asarray(weights, np.float64)


def _borrow(run: Pass) -> Iterator[Batch]:
    """Each batch until the next one is asked for; after a `break`, until the feed is iterated anew."""
    while (lease := run.take()) is not None:
        yield lease.batch
        run.give_back(lease)
