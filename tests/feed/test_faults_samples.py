"""Samples that cannot be read, or that kill or block the workers that read them."""

import errno
import functools
import os
import signal
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.errors import ChildLostError, DataError
from flatout.feed import DecodeError, Feed, FeedConfig, Plan, SampleError, Unreadable, supervisor
from tests.feed.comparing import digest, digests
from tests.feed.injections import wait_until
from tests.feed.sources import (
    Crowds,
    Fault,
    Files,
    Images,
    Mosaics,
    SilentImages,
    die,
    fail,
    fail_the_first,
    lines_of,
    logged,
)

pytestmark = pytest.mark.fault

COUNT, BATCH = 80, 8
PLAN = Plan(num_samples=COUNT, batch_size=BATCH, seed=5, shuffle=False)
BACKENDS = {
    "processes": {"workers": 2, "start_method": "fork"},
    "threads": {"workers": 2, "backend": "thread"},
    "inline": {"workers": 0},
}
every_backend = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
USUAL: dict[str, Any] = {"workers": 2, "epochs": 1, "start_method": "fork"}


def feed_with(faults: Mapping[int, Fault], *, source: type[Images] = Images, **knobs: Any) -> Feed:
    return Feed(source(COUNT, faults), PLAN, FeedConfig(**USUAL | knobs))


@functools.cache
def undisturbed() -> list[str]:
    with feed_with({}, workers=0) as feed:
        return digests(feed)


# Samples that raise


@every_backend
def test_an_unreadable_sample_raises_at_its_own_step_with_all_details(backend: dict):
    with feed_with({21: partial(fail, OSError, errno.EACCES, "Permission denied")}, **backend) as feed:
        seen: list[str] = []
        with pytest.raises(SampleError) as caught:
            seen.extend(digest(batch) for batch in feed)
        assert seen == undisturbed()[:2]
        assert (caught.value.index, caught.value.position, caught.value.where) == (21, 21, "images/0021.png")
        assert caught.value.exit_code == 3
        assert "Sample 21 (images/0021.png)" in str(caught.value)
        assert "Permission denied" in str(caught.value)
        assert "in fail\n    raise error(*args)" in str(caught.value.__cause__)


@every_backend
def test_a_feed_that_raised_can_be_iterated_again_and_raises_again_at_the_same_step(backend: dict):
    with feed_with({21: partial(fail, KeyError, "boxes")}, **backend) as feed:
        for _ in range(2):
            seen: list[str] = []
            with pytest.raises(SampleError, match=r"Sample 21 .*KeyError: 'boxes'"):
                seen.extend(digest(batch) for batch in feed.epoch(0))
            assert seen == undisturbed()[:2]
        with pytest.raises(SampleError, match="Sample 21"):
            next(iter(feed))
        assert digests(feed.epoch(0, start=3)) == undisturbed()[3:]


@every_backend
@pytest.mark.parametrize("bug", [KeyError, SystemExit])
def test_a_bug_in_the_source_is_never_replaced_by_a_substitute(backend: dict, bug: type[BaseException]):
    with (
        feed_with({0: partial(fail, bug, "a bug")}, on_error="substitute", watchdog_s=2, **backend) as feed,
        pytest.raises(SampleError, match=rf"Sample 0 \(images/0000.png\).*{bug.__name__}"),
    ):
        next(iter(feed))


def test_a_batch_that_failed_is_not_reported_as_ready():
    # The copy to a device takes batches that are ready: the batch before must be yielded first.
    with feed_with({BATCH: partial(fail, KeyError, "a bug")}) as feed:
        feed_pass = feed.open(0)
        assert feed_pass.take().batch.step == 0
        wait_until(lambda: feed._started.stream._supervisor._failures or feed_pass.is_ready())
        assert not feed_pass.is_ready()
        with pytest.raises(SampleError, match="Sample 8"):
            feed_pass.take()


def test_an_error_with_a_very_long_message_is_shortened():
    with (
        feed_with({0: partial(fail, ValueError, "long " * 1_000_000)}) as feed,
        pytest.raises(SampleError, match="ValueError: long long") as caught,
    ):
        next(iter(feed))
    assert len(str(caught.value)) < 10_000


def test_many_bad_samples_with_long_messages_in_one_task_are_all_replaced():
    faults = {index: partial(fail, DecodeError, "long " * 1000) for index in range(64)}
    plan = Plan(num_samples=400, batch_size=64, seed=5, shuffle=False)
    config = FeedConfig(**USUAL | {"workers": 1, "micro_batch": 64, "on_error": "substitute", "bad_share": 1})
    with Feed(Images(400, faults), plan, config) as feed:
        batch = next(iter(feed))
        assert batch.indices.min() >= 64
        assert feed.bad_samples.keys() == set(range(64))
        assert feed.num_replaced == 64


@pytest.mark.parametrize("error", [FileNotFoundError, DecodeError])
def test_substitutes_are_the_same_for_any_number_of_workers_and_are_counted(error: type[Exception]):
    faults: dict[int, Fault] = {21: partial(fail, error, "broken"), 50: partial(fail, error, "broken")}
    seen = []
    for workers in (0, 1, 3):
        with feed_with(faults, workers=workers, on_error="substitute", bad_share=0.05) as feed:
            seen.append(digests(feed))
            assert feed.num_replaced == 2
            assert feed.bad_samples == {21: f"{error.__name__}: broken", 50: f"{error.__name__}: broken"}
    assert seen[0] == seen[1] == seen[2]
    assert [step for step, same in enumerate(np.equal(seen[0], undisturbed())) if not same] == [2, 6]


def test_a_bad_sample_in_a_task_that_overflows_is_counted_too(tmp_path: Path):
    class Mixed(Crowds):
        def sample(self, index, rng):
            if index == 5:
                raise DecodeError("broken")
            return super().sample(index, rng)

    source = Mixed(64, {6: 5000}, tmp_path / "log")
    plan = Plan(num_samples=64, batch_size=8, shuffle=False)
    with Feed(source, plan, FeedConfig(workers=0, micro_batch=8, on_error="substitute")) as feed:
        batch = next(iter(feed))
        assert list(np.delete(batch.indices, 5)) == [0, 1, 2, 3, 4, 6, 7]
        assert feed.bad_samples == {5: "DecodeError: broken"}
        assert feed.num_replaced == 1


@every_backend
def test_more_bad_samples_than_allowed_end_the_run_each_time(backend: dict):
    faults = {index: partial(fail, DecodeError, "broken") for index in (21, 40, 60)}
    with feed_with(faults, on_error="substitute", bad_share=0.03, **backend) as feed:
        for _ in range(2):
            with pytest.raises(DataError, match=r"3 of 80 samples .* more than the 2 .*images/0060.png") as caught:
                digests(feed.epoch(0))
            assert caught.value.exit_code == 3


def test_a_single_bad_sample_is_an_error_if_none_is_allowed():
    with (
        feed_with({3: partial(fail, DecodeError, "broken")}, workers=0, on_error="substitute", bad_share=0) as feed,
        pytest.raises(DataError, match="1 of 80 samples"),
    ):
        next(iter(feed))


def test_a_transient_error_is_retried_and_nothing_is_replaced(tmp_path: Path):
    with feed_with({21: partial(fail_the_first, 2, tmp_path / "log")}, on_error="substitute") as feed:
        assert digests(feed) == undisturbed()
        assert feed.num_replaced == 0
        assert feed.bad_samples == {}
    assert len(lines_of(tmp_path / "log")) == 2


def test_a_permanent_error_leads_to_a_substitute_after_three_retries(tmp_path: Path):
    with feed_with({21: partial(fail_the_first, 99, tmp_path / "log")}, on_error="substitute") as feed:
        digests(feed)
        assert feed.bad_samples.keys() == {21}
    # Once with its micro-batch, then alone: a first attempt and three retries.
    assert len(lines_of(tmp_path / "log")) == 1 + 4


# Files that vanish or block


def four_bytes_each(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"{number:03}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number] * 4))
    return paths


def test_a_file_deleted_during_an_epoch_is_replaced_and_counted(tmp_path: Path):
    paths = four_bytes_each(tmp_path, 80)
    with Feed(Files(paths), PLAN, FeedConfig(**USUAL | {"slots": 2, "on_error": "substitute"})) as feed:
        for batch in feed:
            if batch.step == 0:
                paths[70].unlink()
            assert (batch["bytes"] == batch.indices[:, None]).all()
            assert np.array_equal(batch.indices != batch.positions, batch.positions == 70)
        assert feed.num_replaced == 1
        assert str(paths[70]) in feed.bad_samples[70]


@pytest.mark.parametrize("writer_comes", [True, False])
def test_a_file_that_blocks_only_delays_one_worker_and_is_named(tmp_path: Path, caplog, writer_comes: bool):
    paths = four_bytes_each(tmp_path, 80)
    paths[3].unlink()
    os.mkfifo(paths[3])

    def write_after_warning() -> None:
        wait_until(lambda: any("the others continue" in text for text in caplog.messages))
        paths[3].write_bytes(bytes([3] * 4))

    config = FeedConfig(**USUAL | {"micro_batch": 1, "watchdog_s": 2 if writer_comes else 0.4})
    with Feed(Files(paths), PLAN, config) as feed:
        batches = iter(feed)
        if writer_comes:
            threading.Thread(target=write_after_warning).start()
        first = next(batches).copy()
        # While the first batch waited, the other worker filled the rest of the ring.
        assert feed._started.stream.is_ready()
        rest = [batch.indices.copy() for batch in batches]
        assert feed.bad_samples.keys() == (set() if writer_comes else {3})
        assert feed.num_replaced == (0 if writer_comes else 1)
    assert (first["bytes"] == first.indices[:, None]).all()
    assert (first.indices[3] == 3) == writer_comes
    assert np.array_equal(np.concatenate(rest), np.arange(8, 80))
    assert any(f"sample 3 ({paths[3]})" in text and "the others continue" in text for text in caplog.messages)
    assert any("It is killed" in text for text in caplog.messages) != writer_comes


# Samples that kill workers


@pytest.mark.parametrize(("source", "fault"), [(Images, die), (SilentImages, os.abort)], ids=["reported", "silent"])
def test_a_deadly_sample_is_quarantined_after_three_deaths(tmp_path: Path, source: type[Images], fault: Fault):
    seen = []
    for workers in (1, 3):
        log = tmp_path / f"log{workers}"
        with feed_with({21: partial(logged, log, fault)}, source=source, workers=workers, start_method="spawn") as feed:
            seen.append(digests(feed))
            assert feed.bad_samples == {21: "3 workers died while reading it"}
            assert feed.num_replaced == 1
        # A silent source is read once more to find the sample.
        assert len(lines_of(log)) == (3 if source is Images else 4)
    assert seen[0] == seen[1]
    assert [step for step, same in enumerate(np.equal(seen[0], undisturbed())) if not same] == [2]


def test_without_quarantine_a_deadly_sample_ends_the_run(monkeypatch):
    monkeypatch.setattr(supervisor, "STRIKES", 10**6)
    with feed_with({21: die}, workers=1) as feed:
        with pytest.raises(ChildLostError, match=r"14 workers in a row .*SIGKILL.*workers=0") as caught:
            digests(feed)
        assert caught.value.exit_code == 7


def test_a_quarantined_sample_stays_so_after_a_resume_without_another_death(tmp_path: Path):
    log = tmp_path / "log"
    # Every second step contains the deadly sample.
    plan = Plan(num_samples=COUNT, batch_size=4, seed=5, order=np.tile([1, 2, 3, 4, 5, 6, 7, 21], 4))
    source = Images(COUNT, {21: partial(logged, log, die)})
    with Feed(source, plan, FeedConfig(**USUAL)) as feed:
        unbroken = digests(feed)
        assert feed.num_replaced == 4
    log.unlink()
    with Feed(source, plan, FeedConfig(**USUAL | {"slots": 2})) as feed:
        batches = iter(feed)
        seen = [digest(next(batches)) for _ in range(3)]
        state = feed.state_dict()
    assert len(lines_of(log)) == 3
    with Feed(source, plan, FeedConfig(**USUAL | {"workers": 1})) as feed:
        feed.load_state_dict(state)
        seen += digests(feed)
        assert feed.bad_samples == {21: "3 workers died while reading it"}
    assert seen == unbroken
    assert len(lines_of(log)) == 3


def test_more_deadly_samples_than_allowed_end_the_run_each_time():
    with feed_with({3: die, 21: die, 40: die}, workers=1, bad_share=0.03) as feed:
        for _ in range(2):
            with pytest.raises(DataError, match=r"3 of 80 samples .* more than the 2 .*3 workers died") as caught:
                digests(feed.epoch(0))
            assert caught.value.exit_code == 3


def test_many_deadly_samples_in_one_task_are_all_found():
    deadly = set(range(0, 10, 2))  # 15 consecutive deaths
    plan = Plan(num_samples=COUNT, batch_size=16, seed=5, shuffle=False)
    config = FeedConfig(**USUAL | {"workers": 1, "micro_batch": 16, "bad_share": 0.5})
    with Feed(Images(COUNT, dict.fromkeys(deadly, die)), plan, config) as feed:
        batch = next(iter(feed))
        assert not deadly & set(batch.indices.tolist())
        assert feed.bad_samples.keys() == deadly


def test_a_sample_whose_workers_died_of_other_causes_is_not_quarantined(tmp_path: Path):
    # In every epoch, the worker is killed while it reads the same sample.
    log = tmp_path / "log"
    with feed_with({21: partial(logged, log, partial(die_every_other_time, log))}, epochs=4) as feed:
        for epoch in range(4):
            assert digests(feed.epoch(epoch)) == digests_of_epoch(epoch)
        assert feed.bad_samples == {}
    assert len(lines_of(log)) == 8


def die_every_other_time(log: Path) -> None:
    """Die at the first of every two reads."""
    if len(lines_of(log)) % 2:
        os.kill(os.getpid(), signal.SIGKILL)


def digests_of_epoch(epoch: int) -> list[str]:
    with feed_with({}, workers=0) as feed:
        return digests(feed.epoch(epoch))


# Items that several samples share


def mosaics(faults: Mapping[int, Fault], *, unreadable: Mapping[int, str] | None = None, **knobs: Any) -> Feed:
    return Feed(Mosaics(COUNT, faults), PLAN, FeedConfig(**USUAL | knobs), unreadable=unreadable)


BROKEN: dict[int, Fault] = {21: partial(fail, DecodeError, "broken"), 50: partial(fail, FileNotFoundError, "gone")}


def test_an_unreadable_item_is_replaced_wherever_samples_use_it_and_nothing_else_is():
    with mosaics({}, workers=0) as feed:
        whole = [batch["items"].copy() for batch in feed]
    with mosaics(BROKEN, workers=0, on_error="substitute", bad_share=0.05) as feed:
        batches = [batch.copy() for batch in feed]
        num_replaced = feed.num_replaced
        assert feed.bad_samples == {21: "DecodeError: broken", 50: "FileNotFoundError: gone"}
    expected, found = np.concatenate(whole), np.concatenate([batch["items"] for batch in batches])
    is_bad = np.isin(expected, [21, 50])
    assert is_bad[:, 1:].any(), "a partner, not only a sample's own item"
    assert not np.isin(found, [21, 50]).any()
    assert np.array_equal(found != expected, is_bad)
    assert num_replaced == is_bad.sum()
    assert np.array_equal(np.concatenate([batch.indices for batch in batches]), found[:, 0])
    assert all((batch["bytes"] == batch["items"]).all() for batch in batches)


def test_substitutes_do_not_depend_on_workers_or_on_which_items_are_known_to_be_unreadable():
    seen = []
    known = [None, {21: "known"}, {21: "known", 50: "known"}]
    for workers, unreadable in ((0, None), (1, None), (3, None), *((0, each) for each in known)):
        knobs = {"workers": workers, "on_error": "substitute", "bad_share": 0.05}
        with mosaics(BROKEN, unreadable=unreadable, **knobs) as feed:
            seen.append(digests(feed))
            assert feed.bad_samples.keys() == {21, 50}
    with mosaics(BROKEN, slots=2, workers=1, on_error="substitute", bad_share=0.05) as feed:
        batches = iter(feed)
        resumed = [digest(next(batches)) for _ in range(4)]
        state = feed.state_dict()
    with mosaics(BROKEN, workers=2, on_error="substitute", bad_share=0.05) as feed:
        feed.load_state_dict(state)
        resumed += digests(feed)
    assert all(each == seen[0] for each in [*seen, resumed])


def test_two_substitutes_of_one_sample_differ_and_the_last_readable_item_is_found():
    unreadable = Unreadable(np.isin(np.arange(80), [3, 4]), seed=1, epoch=2, positions_M=np.arange(9))
    samples = np.arange(9)
    three, four = (unreadable.substitutes(samples, np.full(9, bad), unreadable.is_bad_N) for bad in (3, 4))
    assert (three != four).all()
    assert len(set(three.tolist())) > 3, "one for each position in the stream"
    all_but_one = np.arange(100_000) != 70_000
    assert (unreadable.substitutes(samples, np.arange(9), all_but_one) == 70_000).all()
    with pytest.raises(DataError, match="none of the 5 files can be read"):
        unreadable.substitutes(samples[:1], np.array([2]), np.ones(5, bool))


@pytest.mark.parametrize(("num_failures", "bad"), [(2, set()), (99, {21})], ids=["transient", "permanent"])
def test_a_failing_item_is_read_up_to_four_times(tmp_path: Path, num_failures: int, bad: set[int]):
    log = tmp_path / "log"
    with mosaics({21: partial(fail_the_first, num_failures, log)}, workers=1, on_error="substitute") as feed:
        digests(feed)
        assert feed.bad_samples.keys() == bad
    assert len(lines_of(log)) == (4 if bad else 2)


def test_too_many_unreadable_items_end_the_run_with_their_names(caplog):
    faults = {item: partial(fail, DecodeError, "broken") for item in (21, 40, 60)}
    with (
        mosaics(faults, workers=2, on_error="substitute", bad_share=0.03) as feed,
        pytest.raises(DataError, match=r"3 of 80 files .* more than the 2") as caught,
    ):
        digests(feed)
    assert all(f"images/{item:04}.png (DecodeError: broken)" in str(caught.value) for item in faults)
    assert sum("is replaced by a substitute" in text for text in caplog.messages) == 2


def test_each_item_is_named_once_when_it_is_found_and_once_at_the_end(caplog):
    with mosaics(BROKEN, workers=2, on_error="substitute", bad_share=0.05) as feed:
        digests(feed)
        feed.log_replaced()
    feed.log_replaced()
    assert sorted(text for text in caplog.messages if "replaced by" in text) == [
        "File images/0021.png is replaced by a substitute: DecodeError: broken",
        "File images/0050.png is replaced by a substitute: FileNotFoundError: gone",
    ]
    (summary,) = (text for text in caplog.messages if text.startswith("2 files could not be read"))
    assert "images/0021.png (DecodeError: broken)" in summary
    assert "images/0050.png (FileNotFoundError: gone)" in summary


def test_the_error_names_an_item_that_may_not_be_replaced():
    with (
        mosaics({21: partial(fail, DecodeError, "broken")}) as feed,
        pytest.raises(SampleError, match=r"\(images/0021.png\) could not be read") as caught,
    ):
        digests(feed)
    assert caught.value.where == "images/0021.png"


def test_a_bug_while_an_item_is_read_is_never_replaced():
    with (
        mosaics({21: partial(fail, KeyError, "a bug")}, on_error="substitute") as feed,
        pytest.raises(SampleError, match=r"KeyError: 'a bug'"),
    ):
        digests(feed)


def test_a_deadly_item_is_quarantined_wherever_samples_use_it(tmp_path: Path):
    seen = []
    for workers in (1, 3):
        with mosaics({21: partial(logged, tmp_path / f"log{workers}", die)}, workers=workers) as feed:
            seen.append(digests(feed))
            assert feed.bad_samples == {21: "3 workers died while reading it"}
            state = feed.state_dict()
    assert seen[0] == seen[1]
    assert len(lines_of(tmp_path / "log1")) == 3
    with mosaics({21: die}, workers=0) as feed:  # otherwise this process would die
        feed.load_state_dict(state)
        assert digests(feed.epoch(0)) == seen[0]


def test_a_quarantine_of_differently_numbered_items_is_ignored():
    with mosaics({}, workers=0) as feed:
        state = feed.state_dict()
    del state["num_items"]  # as in states saved before items were numbered
    state["quarantine"] = {"21": "3 workers died while reading it"}
    with mosaics({}, workers=0) as feed:
        feed.load_state_dict(state)
        assert feed.bad_samples.keys() == {21}
    with mosaics({}, workers=0) as feed:
        feed.load_state_dict(state | {"num_items": 7})
        assert feed.bad_samples == {}


def test_a_file_that_hangs_as_part_of_a_sample_is_named(caplog):
    with mosaics({21: partial(time.sleep, 60)}, workers=1, watchdog_s=0.2) as feed:
        digests(feed)
        assert feed.bad_samples.keys() == {21}
    assert any("reading file images/0021.png for" in text for text in caplog.messages)
