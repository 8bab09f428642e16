"""User errors in sources, plans and settings: each raises one clear message of the right class."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from flatout.errors import ConfigError, DataError, FlatoutError
from flatout.feed import Feed, FeedConfig, Field, Out, Plan, Rows, SampleError
from tests.feed.comparing import digests
from tests.feed.sources import Images

BACKENDS = {"processes": {"workers": 1, "start_method": "fork"}, "inline": {"workers": 0}}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)


def expect(kind: type[FlatoutError], *words: str) -> Any:
    """Expect an error of this class whose one-line message contains these words in this order."""
    return pytest.raises(kind, match="^[^\n]*" + ".*".join(map(re.escape, words)) + "[^\n]*$")


def start(source: Any = None, plan: Plan | None = None, **knobs: Any) -> None:
    """Run a feed up to its first batch."""
    source = Images(32) if source is None else source
    with Feed(source, plan or Plan(num_samples=32, batch_size=8), FeedConfig(**{"workers": 0} | knobs)) as feed:
        next(iter(feed))


# Settings


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"workers": -1}, ["workers=-1", "whole number from 0 to"]),
        ({"workers": 10**6}, ["workers=1000000", "whole number from 0 to"]),
        ({"workers": True}, ["workers=True", "whole number"]),
        ({"workers": 1.5}, ["workers=1.5", "whole number"]),
        ({"workers": "cpu*x"}, ["workers='cpu*x'", '"cpu*0.9"']),
        ({"workers": "many"}, ["workers='many'", '"auto"']),
        ({"workers": None}, ["workers=None", '"auto"']),
        ({"slots": 1}, ["slots=1", "Use slots=2 or more"]),
        ({"slots": -3}, ["slots=-3", "Use slots=2 or more"]),
        ({"slots": 4, "prefetch_factor": 2}, ["slots and prefetch_factor", "give only one"]),
        ({"prefetch_factor": 0}, ["prefetch_factor=0", "1 or more"]),
        ({"micro_batch": 0}, ["micro_batch=0", "1 or more"]),
        ({"epochs": 0}, ["epochs=0", "1 or more"]),
        ({"local_ranks": 0}, ["local_ranks=0", "1 or more"]),
        ({"backend": "ray"}, ["backend='ray'", "'process' or 'thread'"]),
        ({"start_method": "forkserver"}, ["start_method='forkserver'", "'spawn' or 'fork'"]),
        ({"on_error": "ignore"}, ["on_error='ignore'", "'raise' or 'substitute'"]),
        ({"bad_share": 2}, ["bad_share=2", "between 0 and 1"]),
        ({"bad_share": float("nan")}, ["bad_share=nan", "between 0 and 1"]),
        ({"watchdog_s": -1}, ["watchdog_s=-1", "Use 0 to switch the watchdog off"]),
        ({"watchdog_s": float("nan")}, ["watchdog_s=nan", "Use 0 to switch the watchdog off"]),
    ],
    ids=lambda value: next(iter(value.items())) if isinstance(value, dict) else None,
)
def test_an_invalid_setting_is_refused(knobs: dict[str, Any], words: list[str]):
    with expect(ConfigError, *words) as caught:
        start(**knobs)
    assert caught.value.exit_code == 2


# Plans


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"batch_size": 0}, ["batch_size=0", "1 or more"]),
        ({"batch_size": 33}, ["32 samples has no complete step of 33", "last='short' or last='pad'"]),
        ({"num_ranks": 8, "rank": 8}, ["rank=8", "0..7"]),
        ({"seed": -1}, ["seed=-1", "0..2**64-1"]),
        ({"last": "repeat"}, ["last='repeat'", "'drop', 'pad' or 'short'"]),
        ({"weights": np.ones(31)}, ["weights has shape (31,)", "32 samples"]),
        ({"weights": -np.ones(32)}, ["weights must be finite, non-negative"]),
        ({"weights": np.full(32, np.nan)}, ["weights must be finite, non-negative"]),
        ({"weights": np.zeros(32)}, ["weights must be", "not all zero"]),
        ({"weights": np.ones(32), "order": np.arange(32)}, ["weights and order cannot be combined"]),
        ({"order": np.arange(33)}, ["order contains sample 32", "0 to 31"]),
        ({"order": [0, -1]}, ["order contains sample -1", "0 to 31"]),
        ({"order": []}, ["order has shape (0,)"]),
        ({"order": np.zeros((4, 8), int)}, ["order has shape (4, 8)"]),
        ({"order": np.linspace(0, 31, 32)}, ["order has dtype float64", "integers"]),
        ({"order": np.ones(32, bool)}, ["order has dtype bool", "np.flatnonzero"]),
        ({"num_samples": 31}, ["plan is for 31 samples, but the source has 32"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_an_invalid_plan_is_refused(plan: dict[str, Any], words: list[str]):
    with expect(ConfigError, *words) as caught:
        start(plan=Plan(**{"num_samples": 32, "batch_size": 8} | plan))
    assert caught.value.exit_code == 2


def test_an_order_that_raises_for_a_later_epoch_only_fails_when_that_epoch_is_opened():
    orders = [np.arange(32), np.arange(32)[::-1]]
    plan = Plan(num_samples=32, batch_size=8, order=lambda epoch: orders[epoch])
    with Feed(Images(32), plan, FeedConfig(workers=0)) as feed:
        shown = [np.concatenate([batch.indices.copy() for batch in feed]) for _ in orders]
        assert np.array_equal(shown, orders)
        with pytest.raises(IndexError):
            iter(feed)


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 4), (3, 4, 0)])
def test_a_step_shape_that_the_source_does_not_allow_is_refused(shape: tuple[int, ...]):
    plan = Plan(num_samples=32, batch_size=8, shapes=lambda epoch, step: {"image": shape})
    with expect(DataError, f"'image' the shape {shape}", "allows at most (3, 4, 4)"):
        start(plan=plan)


def test_a_step_shape_for_an_unknown_field_is_refused():
    plan = Plan(num_samples=32, batch_size=8, shapes=lambda epoch, step: {"images": (3, 2, 2)})
    with expect(DataError, "'images'", "'image'"):
        start(plan=plan)


# Sources


class Broken(Images):
    """A source whose `sample` returns something wrong."""

    def __init__(self, wrong: Any) -> None:
        super().__init__(32)
        self.wrong = wrong

    def sample(self, index: int, rng: np.random.Generator) -> Any:
        good = {"image": np.zeros((3, 4, 4), np.uint8), "boxes": np.zeros((1, 5))}
        return good | self.wrong if isinstance(self.wrong, dict) else self.wrong


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (None, ["sample() returned None", "{'boxes', 'image'}"]),
        ((np.ones((3, 64, 64)), 2), ["sample() returned a tuple, but", "{'boxes', 'image'}. Return a dict"]),
        ({"mask": 1}, ["sample() returned {'boxes', 'image', 'mask'}", "declares {'boxes', 'image'}"]),
        ({"image": np.zeros((3, 4, 5), np.uint8)}, ["'image'", "(3, 4, 5)", "declares uint8 (3, 4, 4)"]),
        ({"image": np.zeros((4, 4), np.uint8)}, ["'image'", "(4, 4)", "declares uint8 (3, 4, 4)"]),
        ({"image": np.zeros((1, 4, 4), np.uint8)}, ["'image'", "(1, 4, 4)", "declares uint8 (3, 4, 4)"]),
        ({"image": np.zeros((3, 4, 4))}, ["'image'", "float64", "declares uint8 (3, 4, 4)"]),
        ({"image": np.zeros((3, 4, 4), np.int64)}, ["'image'", "int64", "declares uint8 (3, 4, 4)"]),
        ({"image": None}, ["'image'", "object", "declares uint8 (3, 4, 4)"]),
        ({"boxes": np.zeros((2, 4))}, ["'boxes'", "(2, 4)", "declares [n, 5]"]),
        ({"boxes": np.zeros(5)}, ["'boxes'", "(5,)", "declares [n, 5]"]),
        ({"boxes": None}, ["'boxes'", "()", "declares [n, 5]"]),
    ],
    ids=str,
)
def test_a_sample_that_does_not_match_the_declared_fields_is_named(wrong: Any, words: list[str]):
    with expect(SampleError, "Sample", "(images/", *words) as caught:
        start(Broken(wrong))
    assert caught.value.exit_code == 3


class Raw:
    """A source written without SampleSource."""

    fields: Any = {"image": Field((3, 4, 4)), "boxes": Rows(5)}

    def __len__(self) -> int:
        return 32

    def where(self, index: int) -> str:
        return f"row {index}"

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return {}

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out["image"][:] = 0
        for i in range(len(indices)):
            out["boxes"].put(i, np.zeros((0, 5)))


class DrawsNothing(Raw):
    def draw(self, *args: Any) -> Any:
        return None


class PutsNothing(Raw):
    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        out["image"][:] = 0


class ReplacesTheView(Raw):
    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Any) -> None:
        out["image"] = np.zeros((len(indices), 3, 4, 4), np.uint8)


class LosesItsFiles(Raw):
    def where(self, index: int) -> str:
        raise LookupError("no list of files")

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Any) -> None:
        raise ValueError("broken")


@every_backend
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (DrawsNothing(), ["DrawsNothing.draw() returned None", "a dict of arrays"]),
        (PutsNothing(), ["read() put no rows into field 'boxes'", "out['boxes'].put("]),
        (ReplacesTheView(), ["does not support item assignment"]),
        (LosesItsFiles(), ["ValueError: broken"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Raw) else None,
)
def test_a_source_that_breaks_the_protocol_raises_an_error_with_the_rule(
    backend: dict[str, Any], source: Raw, words: list[str]
):
    with expect(SampleError, *words) as caught:
        start(source, **backend)
    assert caught.value.exit_code == 3


def test_a_raw_source_that_follows_the_protocol_works():
    start(Raw())


def with_fields(fields: Any) -> Raw:
    source = Raw()
    source.fields = fields
    return source


class Empty(Images):
    def __init__(self) -> None:
        super().__init__(0)


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (Empty, DataError, ["Empty is empty (0 samples)", "Check the data path"]),
        (lambda: with_fields({}), ConfigError, ["Raw.fields is {}", "at least one Field or Rows"]),
        (lambda: with_fields(None), ConfigError, ["Raw.fields is None", "at least one Field or Rows"]),
        (lambda: with_fields({"image": (3, 4, 4)}), ConfigError, ["Raw.fields['image'] is (3, 4, 4)", "use Field"]),
        (lambda: with_fields({"image": Field((), object)}), ConfigError, ["fields['image']", "dtype object"]),
        (lambda: Field((3, 0)), ConfigError, ["Field shape (3, 0)", "1 or more"]),
        (lambda: Rows(0), ConfigError, ["Rows width=0", "1 or more"]),
        (lambda: ["a.jpg"] * 32, ConfigError, ["list is not a source", "'fields'", "SampleSource"]),
    ],
    ids=["empty", "no fields", "fields None", "a shape", "objects", "flat field", "no width", "a list"],
)
def test_an_invalid_source_is_refused(make: Callable[[], Any], kind: type[FlatoutError], words: list[str]):
    with expect(kind, *words):
        Feed(make(), Plan(num_samples=32, batch_size=8))


def test_a_plan_for_no_samples_is_refused():
    with expect(DataError, "empty (0 samples)", "Check the data path") as caught:
        Plan(num_samples=0, batch_size=8)
    assert caught.value.exit_code == 3


# Use at the wrong time


def test_a_pass_that_has_ended_raises_an_error_that_says_so():
    with Feed(Images(32), Plan(num_samples=32, batch_size=8), FeedConfig(workers=0)) as feed:
        old = iter(feed)
        next(old)
        assert len(digests(feed.epoch(0))) == 4
        with expect(ConfigError, "This pass has ended", "a new iteration was started"):
            next(old)
        old = iter(feed)
        feed.close()
        with expect(ConfigError, "This pass has ended", "closed"):
            next(old)


@pytest.mark.parametrize("name", ["meter", "worker_pids", "memory_bytes", "num_replaced"])
def test_properties_of_a_feed_that_is_not_started_are_refused(name: str):
    feed = Feed(Images(32), Plan(num_samples=32, batch_size=8))
    with expect(ConfigError, "not started", "start()"):
        getattr(feed, name)


@pytest.mark.parametrize(("epoch", "begin"), [(-1, 0), (0, -1), (0, 5)])
def test_a_position_outside_the_plan_is_refused(epoch: int, begin: int):
    feed = Feed(Images(32), Plan(num_samples=32, batch_size=8), FeedConfig(workers=0))
    with expect(ConfigError, f"epoch={epoch}, start={begin}", "4 steps"):
        feed.epoch(epoch, begin)


def test_weights_cannot_change_within_an_epoch():
    with Feed(Images(32), Plan(num_samples=32, batch_size=8), FeedConfig(workers=0)) as feed:
        batches = iter(feed)
        next(batches)
        with expect(ConfigError, "only change between epochs", "epoch 0 is at step 1"):
            feed.set_weights(np.ones(32))


# Saved states


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"seed": 8}, ["cannot continue", "seed was 0, is 8"]),
        ({"batch_size": 16}, ["cannot continue", "samples_per_step was 8, is 16"]),
        ({"order": np.arange(32)}, ["cannot continue", "the order of epoch 0 has changed", "start a new stream"]),
    ],
    ids=["seed", "batch", "order"],
)
def test_a_state_of_another_plan_is_refused(changed: dict[str, Any], words: list[str]):
    state = Feed(Images(32), Plan(num_samples=32, batch_size=8)).state_dict()
    other = Feed(Images(32), Plan(**{"num_samples": 32, "batch_size": 8} | changed))
    with expect(ConfigError, *words) as caught:
        other.load_state_dict(state)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("state", [{}, {"epoch": 3}, None, {"model": 1, "optimizer": 2}])
def test_a_state_that_is_not_from_a_feed_is_refused(state: Any):
    with expect(ConfigError, "not the state of a feed", "state_dict()"):
        Feed(Images(32), Plan(num_samples=32, batch_size=8)).load_state_dict(state)
