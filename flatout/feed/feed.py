"""The feed: a resumable stream of batches, in plan order, with any number of workers.

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
from flatout.feed.source import ItemSource, Source, check_source, num_items_of

if TYPE_CHECKING:
    from flatout.feed.device import DeviceBatches


logger = logging.getLogger(__name__)

STATE_KEYS = {"epoch", "next_step", "plan", "order", "weights", "quarantine"}


class Feed:
    """Resumable stream of host batches, in plan order.

    A batch is a view of its slot: it is overwritten after the next `next()`. Copy it to keep it.
    Iterating yields the rest of the current epoch; iterating again, the next epoch:

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
        """`unreadable`: items that are already known to be unreadable, and why; they are replaced from the start."""
        check_source(source)
        if plan.num_samples != len(source):
            raise ConfigError(
                f"The plan is for {plan.num_samples} samples, but the source has {len(source)}. Make it with "
                "Plan(num_samples=len(source), ...)."
            )
        self.source = source
        self.plan = plan
        self.config = config or FeedConfig()
        self.num_workers = self.config.num_workers
        self._epoch, self._next_step = 0, 0
        self._epochs = EpochPlans(plan)
        self._unreadable = dict(unreadable or {})
        self._quarantine: dict[int, str] = {}
        self._bad: dict[int, str] = {}
        self._num_replaced = 0
        self._logged: set[int] = set()
        self._runtime: FeedRuntime | None = None
        self._pass: weakref.ref[FeedPass] | None = None  # weak, so that dropping the feed closes it immediately

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
        """Create the slots and start the workers; blocks until they are ready. Iterating does this if necessary."""
        if self._runtime is not None and self._runtime.stream.is_broken:
            self.close()
        fresh = self._runtime is None
        runtime = self._runtime = self._runtime or FeedRuntime(self.source, self.plan, self.config, self.num_workers)
        try:
            if fresh:
                runtime.supervisor.exclude(self._unreadable, deadly=False)
                runtime.supervisor.exclude(self._quarantine, deadly=True)
            runtime.backend.start_workers()
        except BaseException:
            self.close()
            raise
        if fresh:
            runtime.meter.restart()  # the start of the workers does not count as waiting

    def close(self) -> None:
        """Stop the workers and free the memory; batches must not be used any more. May be called twice."""
        if self._runtime is not None:
            self._remember_bad()
            self._num_replaced += self._runtime.stream.num_replaced
            self._runtime.close()
            self._runtime = None

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from step `start` on. Ends any other pass over this feed.

        ConfigError if the epoch has fewer steps.
        """
        return _lend_batches(self.open(epoch, start))

    def open(self, epoch: int, start: int = 0) -> "FeedPass":
        """Like `epoch`, but for callers that hold several batches at a time, such as the copy to a device."""
        num_steps = self._epochs[epoch].num_steps
        if epoch < 0 or not 0 <= start <= num_steps:
            raise ConfigError(
                f"epoch={epoch}, start={start} is outside the plan: an epoch has {num_steps} steps. Use an epoch of 0 "
                f"or more, and a start of 0 to {num_steps}."
            )
        self.start()
        self._seek(epoch, start)
        self._epoch, self._next_step = epoch, start
        feed_pass = FeedPass(self, self._started, epoch, range(start, num_steps))
        self._pass = weakref.ref(feed_pass)
        return feed_pass

    def state_dict(self) -> dict[str, Any]:
        """Position of the stream, after the batch that was yielded last. Contains plain containers only."""
        return self.state_at(self._epoch, self._next_step)

    def state_at(self, epoch: int, next_step: int) -> dict[str, Any]:
        """The state after training on every step before `next_step` of `epoch`."""
        self._remember_bad()
        return {
            "epoch": epoch,
            "next_step": next_step,
            "plan": self.plan.fingerprint(),
            "order": self._epochs[epoch].digest(),
            "weights": None if self.plan.weights is None else np.asarray(self.plan.weights, np.float64).tolist(),
            "quarantine": {str(item): cause for item, cause in sorted(self._quarantine.items())},
            "num_items": num_items_of(self.source),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict()`; raises ConfigError with the differences if the stream would change.

        Stops the workers, which start again with the next pass.
        """
        if not isinstance(state, dict) or STATE_KEYS - state.keys():
            raise ConfigError("This is not the state of a feed: pass what its state_dict() returned.")
        mine, saved = self.plan.fingerprint(), state["plan"]
        if changed := [
            f"{name} was {saved.get(name)}, is {mine[name]}" for name in mine if saved.get(name) != mine[name]
        ]:
            raise ConfigError(
                f"This feed cannot continue the saved stream: {'; '.join(changed)}. Make the plan as it was, or start "
                "a new stream without load_state_dict()."
            )
        plan = self.plan.with_weights(_as_weights(state["weights"]))
        if plan.epoch(state["epoch"]).digest() != state["order"]:
            raise ConfigError(
                f"This feed cannot continue the saved stream: the order of epoch {state['epoch']} has changed. Pass "
                "the order that the plan had when it was saved, or start a new stream without load_state_dict()."
            )
        self.close()
        self.plan, self._epochs = plan, EpochPlans(plan)
        self._epoch, self._next_step = state["epoch"], state["next_step"]
        # If items are numbered differently, the saved numbers mean other items; deadly ones will be found again.
        is_same = state.get("num_items", self.plan.num_samples) == num_items_of(self.source)
        self._quarantine = {int(item): cause for item, cause in state["quarantine"].items()} if is_same else {}

    def set_weights(self, weights: np.ndarray | None) -> None:
        """Set the sampling weights from the next epoch on (None: every sample once); ConfigError within an epoch."""
        if self._next_step:
            raise ConfigError(
                f"Weights can only change between epochs, but epoch {self._epoch} is at step {self._next_step}. Call "
                "set_weights() after the last batch of an epoch."
            )
        self.plan = self.plan.with_weights(_as_weights(weights))
        self._epochs = EpochPlans(self.plan)
        if self._runtime is not None:
            self._runtime.stream.follow(iter(()))

    def exclude(self, unreadable: Mapping[int, str]) -> None:
        """Replace these items, which turned out to be unreadable, from the next pass on. Ends the current pass.

        DataError if there are too many of them.
        """
        self._unreadable |= unreadable
        if self._runtime is not None:
            # What was read ahead does not know of them.
            self._runtime.stream.follow(iter(()))
            self._runtime.supervisor.exclude(unreadable, deadly=False)

    def to_device(self, device: "str | Any") -> "DeviceBatches":
        """The same stream as torch tensors on `device`, copied one batch ahead on a separate CUDA stream."""
        from flatout.feed.device import DeviceBatches

        return DeviceBatches(self, device)

    @property
    def meter(self) -> Meter:
        """Throughput meter of a started feed: `print(feed.meter.read().line())`."""
        return self._started.meter

    @property
    def bad_samples(self) -> dict[int, str]:
        """Samples (for an `ItemSource`, items) that had to be replaced so far -> cause."""
        self._remember_bad()
        return self._bad | self._quarantine

    @property
    def num_replaced(self) -> int:
        """Number of substitutes shown since the feed was created."""
        return self._num_replaced + self._started.stream.num_replaced

    def log_replaced(self) -> None:
        """Log one warning that lists the unreadable files, except those listed by an earlier call.

        Meant for the end of a run: the warning about each file may have been logged days before.
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
    def worker_pids(self) -> dict[int, int]:
        """Worker -> process id."""
        return self._started.backend.pids()

    @property
    def memory_bytes(self) -> int:
        """Shared memory that the slots occupy."""
        return self._started.ring.arena.reserved_bytes

    @property
    def _started(self) -> "FeedRuntime":
        if self._runtime is None:
            raise ConfigError("The feed is not started: iterate over it, use it in a `with` block, or call start().")
        return self._runtime

    def _is_open(self, feed_pass: "FeedPass") -> bool:
        return self._pass is not None and self._pass() is feed_pass and self._runtime is feed_pass.runtime

    def _seek(self, epoch: int, start: int) -> None:
        """Make (epoch, start) the next step; keeps what was read ahead if that is already the case."""
        stream = self._started.stream
        if stream.next_step is not None and (stream.next_step.epoch, stream.next_step.step) == (epoch, start):
            stream.reclaim()
        else:
            # Persistent workers read ahead into the next epochs.
            last_epoch = (self.config.epochs or np.inf) - 1 if self.config.persistent_workers else epoch
            stream.follow(self._epochs.steps(epoch, start, last_epoch))

    def _remember_bad(self) -> None:
        if self._runtime is not None:
            bad = self._runtime.supervisor.bad
            self._bad |= bad
            self._quarantine = {item: bad[item] for item in self._runtime.ring.deadly_items()}


class FeedPass:
    """The rest of one epoch: take batches in order, return their slots in any order."""

    def __init__(self, feed: Feed, runtime: FeedRuntime, epoch: int, steps: range) -> None:
        self._feed = feed
        self._epoch = epoch
        self._steps = steps
        self.runtime = runtime

    def is_ready(self) -> bool:
        """Whether `take` would return without waiting."""
        return not self._steps or self.runtime.stream.is_ready()

    def take(self) -> Lease | None:
        """The next batch, or None after the last; blocks until it is complete."""
        if not self._steps:
            return None
        if not self._feed._is_open(self):
            raise ConfigError(
                "This pass has ended: the feed was closed, or a new iteration was started. Take batches from the new "
                "one."
            )
        lease = self.runtime.stream.take()
        # Before the batch is returned: a checkpoint saved during its step must not repeat it.
        self._feed._epoch, self._feed._next_step = self.position_after(lease.batch.step)
        self._steps = self._steps[1:]
        if not self._steps and not self._feed.config.persistent_workers:
            # Now, not on the call that returns None: a loop that counts its steps never makes that call.
            self.runtime.backend.stop_workers()
        return lease

    def give_back(self, lease: Lease) -> None:
        """Return a batch that is no longer needed, so that its slot can be filled again."""
        if self._feed._is_open(self):
            self.runtime.stream.give_back(lease)

    def position_after(self, step: int) -> tuple[int, int]:
        """Epoch and step that come after `step` of this pass."""
        return (self._epoch, step + 1) if step + 1 < self._steps.stop else (self._epoch + 1, 0)


def _as_weights(weights: np.ndarray | list[float] | None) -> np.ndarray | None:
    return None if weights is None else np.asarray(weights, np.float64)


def _lend_batches(feed_pass: FeedPass) -> Iterator[Batch]:
    """Each batch stays valid until the next is requested; after a `break`, until the feed is iterated again."""
    while (lease := feed_pass.take()) is not None:
        yield lease.batch
        feed_pass.give_back(lease)
