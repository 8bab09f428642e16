"""Samples that cannot be read, or that kill or hold up whoever reads them."""

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
    Files,
    Mosaics,
    Pictures,
    SilentPictures,
    Trouble,
    die,
    fail,
    fail_the_first,
    lines_of,
    logged,
)

pytestmark = pytest.mark.fault

COUNT, BATCH = 80, 8
PLAN = Plan(num_samples=COUNT, batch_size=BATCH, seed=5, shuffle=False)
CREWS = {
    "processes": {"workers": 2, "start_method": "fork"},
    "threads": {"workers": 2, "backend": "thread"},
    "nobody": {"workers": 0},
}
every_crew = pytest.mark.parametrize("crew", CREWS.values(), ids=CREWS)
USUAL: dict[str, Any] = {"workers": 2, "epochs": 1, "start_method": "fork"}


def troubled(trouble: Mapping[int, Trouble], *, source: type[Pictures] = Pictures, **knobs: Any) -> Feed:
    return Feed(source(COUNT, trouble), PLAN, FeedConfig(**USUAL | knobs))


@functools.cache
def undisturbed() -> list[str]:
    with troubled({}, workers=0) as feed:
        return digests(feed)


# Samples that raise.


@every_crew
def test_an_unreadable_sample_raises_at_its_own_step_and_says_all_about_it(crew: dict):
    with troubled({21: partial(fail, OSError, errno.EACCES, "Permission denied")}, **crew) as feed:
        seen: list[str] = []
        with pytest.raises(SampleError) as caught:
            seen.extend(digest(batch) for batch in feed)
        assert seen == undisturbed()[:2]
        assert (caught.value.index, caught.value.position, caught.value.where) == (21, 21, "pictures/0021.png")
        assert caught.value.exit_code == 3
        assert "Sample 21 (pictures/0021.png)" in str(caught.value)
        assert "Permission denied" in str(caught.value)
        assert "in fail\n    raise error(*args)" in str(caught.value.__cause__)


@every_crew
def test_a_feed_that_raised_can_be_iterated_again_and_raises_again_at_the_same_step(crew: dict):
    with troubled({21: partial(fail, KeyError, "boxes")}, **crew) as feed:
        for _ in range(2):
            seen: list[str] = []
            with pytest.raises(SampleError, match=r"Sample 21 .*KeyError: 'boxes'"):
                seen.extend(digest(batch) for batch in feed.epoch(0))
            assert seen == undisturbed()[:2]
        with pytest.raises(SampleError, match="Sample 21"):
            next(iter(feed))
        assert digests(feed.epoch(0, start=3)) == undisturbed()[3:]


@every_crew
@pytest.mark.parametrize("bug", [KeyError, SystemExit])
def test_a_bug_in_the_source_is_never_replaced_by_a_substitute(crew: dict, bug: type[BaseException]):
    with (
        troubled({0: partial(fail, bug, "a bug")}, on_error="substitute", watchdog_s=2, **crew) as feed,
        pytest.raises(SampleError, match=rf"Sample 0 \(pictures/0000.png\).*{bug.__name__}"),
    ):
        next(iter(feed))


def test_a_batch_that_failed_is_not_ready_before_it_is_due():
    # Whoever copies ahead takes what is ready: the batch before must be handed out first.
    with troubled({BATCH: partial(fail, KeyError, "a bug")}) as feed:
        run = feed.open(0)
        assert run.take().batch.step == 0
        wait_until(lambda: feed._started.stream._foreman._failures or run.is_ready())
        assert not run.is_ready()
        with pytest.raises(SampleError, match="Sample 8"):
            run.take()


def test_an_error_with_a_very_long_text_arrives_shortened():
    with (
        troubled({0: partial(fail, ValueError, "long " * 1_000_000)}) as feed,
        pytest.raises(SampleError, match="ValueError: long long") as caught,
    ):
        next(iter(feed))
    assert len(str(caught.value)) < 10_000


def test_many_bad_samples_with_long_texts_in_one_task_are_all_replaced():
    trouble = {index: partial(fail, DecodeError, "long " * 1000) for index in range(64)}
    plan = Plan(num_samples=400, batch_size=64, seed=5, shuffle=False)
    config = FeedConfig(**USUAL | {"workers": 1, "micro_batch": 64, "on_error": "substitute", "bad_share": 1})
    with Feed(Pictures(400, trouble), plan, config) as feed:
        batch = next(iter(feed))
        assert batch.indices.min() >= 64
        assert feed.bad_samples.keys() == set(range(64))
        assert feed.num_replaced == 64


@pytest.mark.parametrize("error", [FileNotFoundError, DecodeError])
def test_substitutes_are_the_same_for_any_number_of_workers_and_are_counted(error: type[Exception]):
    trouble: dict[int, Trouble] = {21: partial(fail, error, "broken"), 50: partial(fail, error, "broken")}
    seen = []
    for workers in (0, 1, 3):
        with troubled(trouble, workers=workers, on_error="substitute", bad_share=0.05) as feed:
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


@every_crew
def test_more_bad_samples_than_tolerated_end_the_run_each_time(crew: dict):
    trouble = {index: partial(fail, DecodeError, "broken") for index in (21, 40, 60)}
    with troubled(trouble, on_error="substitute", bad_share=0.03, **crew) as feed:
        for _ in range(2):
            with pytest.raises(DataError, match=r"3 of 80 samples .* more than the 2 .*pictures/0060.png") as caught:
                digests(feed.epoch(0))
            assert caught.value.exit_code == 3


def test_no_bad_sample_is_tolerated_where_none_is_allowed():
    with (
        troubled({3: partial(fail, DecodeError, "broken")}, workers=0, on_error="substitute", bad_share=0) as feed,
        pytest.raises(DataError, match="1 of 80 samples"),
    ):
        next(iter(feed))


def test_an_error_that_passes_is_retried_and_nothing_is_replaced(tmp_path: Path):
    with troubled({21: partial(fail_the_first, 2, tmp_path / "log")}, on_error="substitute") as feed:
        assert digests(feed) == undisturbed()
        assert feed.num_replaced == 0
        assert feed.bad_samples == {}
    assert len(lines_of(tmp_path / "log")) == 2


def test_an_error_that_stays_is_replaced_after_three_retries(tmp_path: Path):
    with troubled({21: partial(fail_the_first, 99, tmp_path / "log")}, on_error="substitute") as feed:
        digests(feed)
        assert feed.bad_samples.keys() == {21}
    # Once with its micro-batch, then alone: a first try and three more.
    assert len(lines_of(tmp_path / "log")) == 1 + 4


# Files that vanish or block.


def four_bytes_each(folder: Path, count: int) -> list[Path]:
    paths = [folder / f"{number:03}.bin" for number in range(count)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number] * 4))
    return paths


def test_a_file_deleted_in_mid_epoch_is_replaced_and_counted(tmp_path: Path):
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
def test_a_file_that_blocks_holds_up_one_worker_only_and_is_named(tmp_path: Path, caplog, writer_comes: bool):
    paths = four_bytes_each(tmp_path, 80)
    paths[3].unlink()
    os.mkfifo(paths[3])

    def write_after_warning() -> None:
        wait_until(lambda: any("other workers go on" in text for text in caplog.messages))
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
    assert any(f"sample 3 ({paths[3]})" in text and "other workers go on" in text for text in caplog.messages)
    assert any("It is killed" in text for text in caplog.messages) != writer_comes


# Samples that kill.


@pytest.mark.parametrize(("source", "way"), [(Pictures, die), (SilentPictures, os.abort)], ids=["noted", "silent"])
def test_a_deadly_sample_is_quarantined_after_three_deaths(tmp_path: Path, source: type[Pictures], way: Trouble):
    seen = []
    for workers in (1, 3):
        log = tmp_path / f"log{workers}"
        with troubled({21: partial(logged, log, way)}, source=source, workers=workers, start_method="spawn") as feed:
            seen.append(digests(feed))
            assert feed.bad_samples == {21: "3 workers died while reading it"}
            assert feed.num_replaced == 1
        # A silent source is read once more to find out which sample it is.
        assert len(lines_of(log)) == (3 if source is Pictures else 4)
    assert seen[0] == seen[1]
    assert [step for step, same in enumerate(np.equal(seen[0], undisturbed())) if not same] == [2]


def test_without_quarantine_a_deadly_sample_ends_the_run(monkeypatch):
    monkeypatch.setattr(supervisor, "STRIKES", 10**6)
    with troubled({21: die}, workers=1) as feed:
        with pytest.raises(ChildLostError, match=r"14 workers in a row .*SIGKILL.*workers=0") as caught:
            digests(feed)
        assert caught.value.exit_code == 7


def test_a_quarantined_sample_stays_so_after_a_resume_without_another_death(tmp_path: Path):
    log = tmp_path / "log"
    # Every second step shows the deadly sample.
    plan = Plan(num_samples=COUNT, batch_size=4, seed=5, order=np.tile([1, 2, 3, 4, 5, 6, 7, 21], 4))
    source = Pictures(COUNT, {21: partial(logged, log, die)})
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


def test_more_deadly_samples_than_tolerated_end_the_run_each_time():
    with troubled({3: die, 21: die, 40: die}, workers=1, bad_share=0.03) as feed:
        for _ in range(2):
            with pytest.raises(DataError, match=r"3 of 80 samples .* more than the 2 .*3 workers died") as caught:
                digests(feed.epoch(0))
            assert caught.value.exit_code == 3


def test_many_deadly_samples_in_one_task_are_told_apart():
    deadly = set(range(0, 10, 2))  # 15 deaths in a row
    plan = Plan(num_samples=COUNT, batch_size=16, seed=5, shuffle=False)
    config = FeedConfig(**USUAL | {"workers": 1, "micro_batch": 16, "bad_share": 0.5})
    with Feed(Pictures(COUNT, dict.fromkeys(deadly, die)), plan, config) as feed:
        batch = next(iter(feed))
        assert not deadly & set(batch.indices.tolist())
        assert feed.bad_samples.keys() == deadly


def test_a_sample_whose_readers_died_of_other_causes_is_not_quarantined(tmp_path: Path):
    # Every epoch the same sample is being read when its worker is killed.
    log = tmp_path / "log"
    with troubled({21: partial(logged, log, partial(die_every_other_time, log))}, epochs=4) as feed:
        for epoch in range(4):
            assert digests(feed.epoch(epoch)) == digests_of_epoch(epoch)
        assert feed.bad_samples == {}
    assert len(lines_of(log)) == 8


def die_every_other_time(log: Path) -> None:
    """Die at the first of two visits."""
    if len(lines_of(log)) % 2:
        os.kill(os.getpid(), signal.SIGKILL)


def digests_of_epoch(epoch: int) -> list[str]:
    with troubled({}, workers=0) as feed:
        return digests(feed.epoch(epoch))


# Items that several samples share.


def mosaics(trouble: Mapping[int, Trouble], *, unreadable: Mapping[int, str] | None = None, **knobs: Any) -> Feed:
    return Feed(Mosaics(COUNT, trouble), PLAN, FeedConfig(**USUAL | knobs), unreadable=unreadable)


BROKEN: dict[int, Trouble] = {21: partial(fail, DecodeError, "broken"), 50: partial(fail, FileNotFoundError, "gone")}


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


def test_what_stands_in_for_an_item_does_not_depend_on_workers_or_on_what_was_known():
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
    three, four = (unreadable.stand_ins(samples, np.full(9, bad), unreadable.is_bad_N) for bad in (3, 4))
    assert (three != four).all()
    assert len(set(three.tolist())) > 3, "one for each place in the stream"
    all_but_one = np.arange(100_000) != 70_000
    assert (unreadable.stand_ins(samples, np.arange(9), all_but_one) == 70_000).all()
    with pytest.raises(DataError, match="none of 5 files can be read"):
        unreadable.stand_ins(samples[:1], np.array([2]), np.ones(5, bool))


@pytest.mark.parametrize(("num_failures", "bad"), [(2, set()), (99, {21})], ids=["passes", "stays"])
def test_a_failing_item_is_tried_four_times(tmp_path: Path, num_failures: int, bad: set[int]):
    log = tmp_path / "log"
    with mosaics({21: partial(fail_the_first, num_failures, log)}, workers=1, on_error="substitute") as feed:
        digests(feed)
        assert feed.bad_samples.keys() == bad
    assert len(lines_of(log)) == (4 if bad else 2)


def test_too_many_unreadable_items_end_the_run_with_their_names(caplog):
    trouble = {item: partial(fail, DecodeError, "broken") for item in (21, 40, 60)}
    with (
        mosaics(trouble, workers=2, on_error="substitute", bad_share=0.03) as feed,
        pytest.raises(DataError, match=r"3 of 80 files .* more than the 2") as caught,
    ):
        digests(feed)
    assert all(f"pictures/{item:04}.png (DecodeError: broken)" in str(caught.value) for item in trouble)
    assert sum("is replaced by a substitute" in text for text in caplog.messages) == 2


def test_each_item_is_named_once_when_it_is_found_and_once_at_the_end(caplog):
    with mosaics(BROKEN, workers=2, on_error="substitute", bad_share=0.05) as feed:
        digests(feed)
        feed.log_replaced()
    feed.log_replaced()
    assert sorted(text for text in caplog.messages if "replaced by" in text) == [
        "File pictures/0021.png is replaced by a substitute: DecodeError: broken",
        "File pictures/0050.png is replaced by a substitute: FileNotFoundError: gone",
    ]
    (summary,) = (text for text in caplog.messages if text.startswith("2 files could not be read"))
    assert "pictures/0021.png (DecodeError: broken)" in summary
    assert "pictures/0050.png (FileNotFoundError: gone)" in summary


def test_an_item_that_may_not_be_replaced_is_named_by_the_error():
    with (
        mosaics({21: partial(fail, DecodeError, "broken")}) as feed,
        pytest.raises(SampleError, match=r"\(pictures/0021.png\) could not be read") as caught,
    ):
        digests(feed)
    assert caught.value.where == "pictures/0021.png"


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
    with mosaics({21: die}, workers=0) as feed:  # it would be this process that dies
        feed.load_state_dict(state)
        assert digests(feed.epoch(0)) == seen[0]


def test_a_quarantine_of_otherwise_numbered_things_is_not_taken_over():
    with mosaics({}, workers=0) as feed:
        state = feed.state_dict()
    del state["num_items"]  # as written before items were numbered
    state["quarantine"] = {"21": "3 workers died while reading it"}
    with mosaics({}, workers=0) as feed:
        feed.load_state_dict(state)
        assert feed.bad_samples.keys() == {21}
    with mosaics({}, workers=0) as feed:
        feed.load_state_dict(state | {"num_items": 7})
        assert feed.bad_samples == {}


def test_a_file_that_hangs_as_a_part_of_samples_is_named(caplog):
    with mosaics({21: partial(time.sleep, 60)}, workers=1, watchdog_s=0.2) as feed:
        digests(feed)
        assert feed.bad_samples.keys() == {21}
    assert any("at file pictures/0021.png for" in text for text in caplog.messages)
