"""Faults of a store: damage, full disks, killed builders, locks that are never released."""

import fcntl
import json
import logging
import os
import pickle
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.errors import ConfigError
from flatout.feed import DecodeError, Feed, FeedConfig, Plan, SampleError, Store, StoreConfig
from flatout.feed.store.home import FdAddress
from tests.feed.blobs import Blobs, Sums, contents, write_blobs
from tests.feed.injections import Script, in_private_mounts, run_script, wait_until
from tests.feed.sources import die, fail, lines_of

pytestmark = pytest.mark.fault

COUNT = 24


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(write_blobs(tmp_path / "data", COUNT), log=tmp_path / "log")


def config(tmp_path: Path, place: str = "disk", **knobs) -> StoreConfig:
    base: dict[str, Any] = {"place": place, "folder": tmp_path / "stores", "workers": 0, "patience_s": 5}
    return StoreConfig(**base | knobs)


def the_file(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "stores").glob("*.store")
    return path


def left_in(folder: Path) -> set[str]:
    return {path.suffix for path in folder.iterdir()}


# Damage


def test_an_invalid_store_is_rebuilt_with_one_warning(tmp_path, blobs, caplog):
    Store.open(blobs, config(tmp_path)).close()
    path = the_file(tmp_path)
    whole = path.read_bytes()
    for damaged, reason in (
        (b"", "it has only 0 bytes"),
        (whole[:-1], f"it has {len(whole) - 1} of {len(whole)} bytes"),
        (b"X" + whole[1:], "it is not a store file"),
        (whole[:8] + b"\x07" + whole[9:], "it has format version 7, but this version of flatout reads 1"),
        (whole[:5000] + b"\x07" + whole[5001:], "its header or index is damaged"),
    ):
        path.write_bytes(damaged)
        caplog.clear()
        with Store.open(blobs, config(tmp_path)) as store:
            assert contents(store) == contents(blobs)
        assert caplog.messages == [f"The store {path} cannot be used: {reason}. It is rebuilt."]
        assert path.read_bytes() == whole


def test_damaged_data_is_never_returned_and_the_next_run_rebuilds_the_store(tmp_path, blobs, caplog):
    Store.open(blobs, config(tmp_path)).close()
    path = the_file(tmp_path)
    data = bytearray(path.read_bytes())
    data[-3] ^= 16
    path.write_bytes(data)
    with Store.open(blobs, config(tmp_path)) as store:
        plan = Plan(num_samples=COUNT, batch_size=6)
        with Feed(Sums(store), plan, FeedConfig(workers=2, start_method="fork", epochs=1)) as feed:
            list(feed)
        assert contents(store) == contents(blobs)
        assert not store.is_resident(COUNT - 1)
        assert store.statistics().misses == 1
        assert not path.exists()
    with Store.open(blobs, config(tmp_path)) as store:
        contents(store)
        assert store.statistics().misses == 0


@pytest.mark.parametrize("place", ["disk", "ram"])
def test_verify_finds_changes_that_do_not_show_in_times_and_sizes(tmp_path, blobs, caplog, monkeypatch, place):
    # As on a file system with coarse timestamps: the key stays the same.
    monkeypatch.setattr("flatout.feed.store.home._state_of", lambda path: "always the same")
    with Store.open(blobs, config(tmp_path, place, verify=True)):
        Path(blobs.paths[7]).write_bytes(bytes(12 * 47))
        with Store.open(blobs, config(tmp_path, place)) as trusting:
            assert contents(trusting, [7]) != contents(blobs, [7])
        assert not caplog.messages
        with Store.open(blobs, config(tmp_path, place, verify=True)) as verified:
            assert contents(verified) == contents(blobs)
    assert caplog.messages == [f"The store is rebuilt: {blobs.paths[7]} is gone or has changed since it was decoded."]


def test_verify_finds_damaged_bytes_and_deleted_inputs(tmp_path, blobs, caplog, monkeypatch):
    monkeypatch.setattr("flatout.feed.store.home._state_of", lambda path: "always the same")
    Store.open(blobs, config(tmp_path)).close()
    data = bytearray(the_file(tmp_path).read_bytes())
    data[-3] ^= 16
    the_file(tmp_path).write_bytes(data)
    Store.open(blobs, config(tmp_path, verify=True)).close()
    Path(blobs.paths[2]).unlink()
    Store.open(blobs, config(tmp_path, verify=True)).close()
    assert caplog.messages == [
        f"The store is rebuilt: the stored bytes of {blobs.paths[-1]} are damaged.",
        f"The store is rebuilt: {blobs.paths[2]} is gone or has changed since it was decoded.",
        f"1 of 24 items could not be decoded and are missing from the store; the first: {blobs.paths[2]} "
        f"(FileNotFoundError: [Errno 2] No such file or directory: '{blobs.paths[2]}').",
    ]


# Input files


@pytest.mark.parametrize("workers", [0, 2])
def test_items_that_cannot_be_decoded_are_omitted_and_raise_when_they_are_read(tmp_path, blobs, caplog, workers):
    Path(blobs.paths[4]).unlink()
    Path(blobs.paths[9]).write_bytes(bytes(13))
    for _ in range(2):  # built, then found
        with Store.open(blobs, config(tmp_path, workers=workers)) as store:
            assert store.statistics().items == COUNT - 2
            assert store.statistics().unreadable == 2
            with pytest.raises(FileNotFoundError):
                store[4]
            with pytest.raises(DecodeError, match="13 bytes"):
                store[9]
            fine = [index for index in range(COUNT) if index not in (4, 9)]
            assert contents(store, fine) == contents(blobs, fine)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(
        "2 of 24 items could not be decoded and are missing from the store; the first: "
    )


def test_an_input_that_is_deleted_later_is_still_in_the_store_of_this_run(tmp_path, blobs):
    expected = contents(blobs)
    with Store.open(blobs, config(tmp_path, "ram")) as store:
        Path(blobs.paths[4]).unlink()
        assert contents(store) == expected


def test_an_item_that_kills_its_workers_is_omitted(tmp_path, blobs):
    blobs.faults = {11: partial(only_in_workers, os.getpid())}
    with Store.open(blobs, config(tmp_path, workers=2)) as store:
        assert [index for index in range(COUNT) if not store.is_resident(index)] == [11]
        assert store.statistics().unreadable == 1


def only_in_workers(owner: int) -> None:
    if os.getpid() != owner:
        die()


def test_a_bug_in_decode_stops_the_build_and_names_the_item(tmp_path, blobs):
    blobs.faults = {5: partial(fail, ZeroDivisionError, "oh")}
    for place in ("ram", "disk"):
        with pytest.raises(SampleError, match=r"005\.blob\) could not be read.*ZeroDivisionError: oh"):
            Store.open(blobs, config(tmp_path, place))
    assert left_in(tmp_path / "stores") == {".lock"}


def test_items_that_cannot_be_pickled_are_named(tmp_path, blobs):
    blobs.handle = threading.Lock()
    with pytest.raises(ConfigError) as caught:
        Store.open(blobs, config(tmp_path, workers=2))
    assert str(caught.value) == (
        "Blobs cannot be sent to worker processes: its attribute 'handle' cannot be pickled (cannot pickle "
        "'_thread.lock' object). Open files and handles on first use in `decode`, or use StoreConfig(backend='thread') "
        "or StoreConfig(workers=0)."
    )
    with Store.open(blobs, config(tmp_path, workers=2, backend="thread")) as store:
        assert store.statistics().items == COUNT


# Lack of room


ON_A_SMALL_DISK = """
import logging, sys
from pathlib import Path
from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs, contents
logging.basicConfig(format="%(message)s")
folder = Path(sys.argv[1])
blobs = Blobs(sorted((folder / "data").iterdir()))
for budget in (10**9, 10**9, None):
    with Store.open(blobs, StoreConfig(place="disk", folder=folder / "disk", workers=0, budget_bytes=budget)) as store:
        assert contents(store) == contents(blobs)
        print(store.statistics().items, [path.suffix for path in sorted((folder / "disk").iterdir())])
"""


def test_a_real_disk_that_runs_full_keeps_what_fits(tmp_path):
    write_blobs(tmp_path / "data", COUNT, dozens=4000)
    (tmp_path / "disk").mkdir()
    prefix = in_private_mounts(f"mount -t tmpfs -o size=600k none {tmp_path / 'disk'}")
    outcome = run_script(ON_A_SMALL_DISK, tmp_path, tmp_path, prefix=prefix)
    assert outcome.code == 0, outcome
    first, second, third = outcome.out.splitlines()
    assert first == second == third
    assert 8 <= int(first.split()[0]) <= 12
    assert outcome.err.count("there is no more room. The others are decoded on every access.") == 1


@pytest.mark.parametrize("size", ["4k", "12k"])
def test_a_disk_with_no_room_at_all_does_not_stop_the_run(tmp_path, size):
    write_blobs(tmp_path / "data", COUNT, dozens=4000)
    (tmp_path / "disk").mkdir()
    script = ON_A_SMALL_DISK.replace("(10**9, 10**9, None)", "(10**9,)")
    prefix = in_private_mounts(f"mount -t tmpfs -o size={size} none {tmp_path / 'disk'}")
    outcome = run_script(script, tmp_path, tmp_path, prefix=prefix)
    assert outcome.code == 0, outcome
    assert "The store could not be built" in outcome.err or "there is no more room" in outcome.err


READ_ONLY = """
import logging, sys
from pathlib import Path
from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs, contents
logging.basicConfig(format="%(message)s")
folder = Path(sys.argv[1])
blobs = Blobs(sorted((folder / "data").iterdir()), log=folder / "log of the script")
for place in ("ram", "disk"):
    with Store.open(blobs, StoreConfig(place=place, folder=sys.argv[2], workers=0)) as store:
        assert contents(store) == contents(blobs)
        print(place, store.statistics().items)
"""


def test_without_a_writable_folder_the_store_is_kept_in_memory(tmp_path, blobs):
    (tmp_path / "stores").mkdir()
    folder = tmp_path / "stores"
    read_only = in_private_mounts(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")
    for where in (folder, folder / "deeper"):
        outcome = run_script(READ_ONLY, tmp_path, tmp_path, where, prefix=read_only)
        assert outcome.code == 0, outcome
        assert outcome.out.split() == ["ram", "24", "disk", "24"]
        warning = (
            f"Cannot write to {where} (Read-only file system): the store is kept in memory for this run, separately in "
            "each process that opens it. Choose another folder with StoreConfig(folder=...)."
        )
        assert outcome.err.splitlines() == [warning] * 2
    assert not list(folder.iterdir())


def test_an_existing_store_in_a_read_only_folder_is_used(tmp_path, blobs):
    Store.open(blobs, config(tmp_path)).close()
    folder = tmp_path / "stores"
    read_only = in_private_mounts(f"mount --bind {folder} {folder} && mount -o remount,bind,ro {folder}")
    script = READ_ONLY.replace('("ram", "disk")', '("disk",)')
    outcome = run_script(script, tmp_path, tmp_path, folder, prefix=read_only)
    assert outcome.out.split() == ["disk", "24"], outcome
    assert outcome.err == ""


def test_a_budget_larger_than_the_memory_is_reduced(tmp_path, blobs, caplog):
    with Store.open(blobs, config(tmp_path, "ram", budget_bytes=10**15)) as store:
        assert store.statistics().items == COUNT
    assert "budget_bytes=1000000000000000 is more than the free memory allows" in caplog.text


# Builders that end early

SLOW_BUILD = """
import sys
from pathlib import Path
from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs
folder = Path(sys.argv[1])
blobs = Blobs(sorted((folder / "data").iterdir()), log=folder / "log of the script")
blobs.sleep_s = 0.05
Store.open(blobs, StoreConfig(place=sys.argv[2], folder=folder / "stores", workers=int(sys.argv[3])))
"""


@pytest.mark.parametrize("place", ["disk", "ram"])
def test_a_killed_builder_does_not_block_others_and_leaves_nothing(tmp_path, blobs, place):
    with Script(SLOW_BUILD, tmp_path, tmp_path, place, 2) as script:
        wait_until(lambda: len(lines_of(tmp_path / "log of the script")) > 12)
        script.process.kill()
        script.wait_until_gone()
    with Store.open(blobs, config(tmp_path, place)) as store:
        assert contents(store) == contents(blobs)
        assert left_in(tmp_path / "stores") - {".store", ".memory", ".lock"} == set()


def test_an_interrupted_build_leaves_no_partial_file(tmp_path, blobs):
    with Script(SLOW_BUILD, tmp_path, tmp_path, "disk", 0) as script:
        wait_until(lambda: len(lines_of(tmp_path / "log of the script")) > 12)
        assert ".part" in left_in(tmp_path / "stores")
        script.process.send_signal(signal.SIGINT)
        outcome = script.end()
    assert "KeyboardInterrupt" in outcome.err
    assert left_in(tmp_path / "stores") == {".lock"}


def test_leftovers_are_removed_but_not_files_that_are_still_written(tmp_path, blobs):
    folder = tmp_path / "stores"
    folder.mkdir()
    (folder / "dead.host.1.part").write_bytes(b"half")
    with (folder / "alive.host.2.part").open("wb") as alive:
        fcntl.flock(alive, fcntl.LOCK_EX)
        Store.open(blobs, config(tmp_path)).close()
        assert [path.name for path in folder.glob("*.part")] == ["alive.host.2.part"]


def test_a_builder_that_makes_no_progress_is_not_waited_for(tmp_path, blobs, caplog):
    Store.open(blobs, config(tmp_path)).close()
    path = the_file(tmp_path)
    path.unlink()
    note = {"pid": 77, "host": "far-away", "since": "2026-01-02 03:04:05", "done": 3}
    path.with_suffix(".owner").write_text(json.dumps(note))
    with path.with_suffix(".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with Store.open(blobs, config(tmp_path, patience_s=0.2)) as store:
            assert contents(store) == contents(blobs)
    assert path.exists()
    assert caplog.messages == [
        "Waiting for process 77 on far-away (since 2026-01-02 03:04:05, 3 items), which is building the store of the "
        "same data.",
        "process 77 on far-away (since 2026-01-02 03:04:05, 3 items) has made no progress for 0.2 s: "
        "building a private store instead.",
    ]


def test_a_slow_builder_is_waited_for_as_long_as_it_makes_progress(tmp_path, blobs, caplog):
    Store.open(blobs, config(tmp_path)).close()
    path = the_file(tmp_path)
    built = path.read_bytes()
    path.unlink()
    held = path.with_suffix(".lock").open("w")
    fcntl.flock(held, fcntl.LOCK_EX)

    def make_progress() -> None:
        for done in range(8):
            path.with_suffix(".owner").write_text(json.dumps({"done": done}))
            threading.Event().wait(0.1)
        path.write_bytes(built)
        held.close()

    builder = threading.Thread(target=make_progress)
    builder.start()
    visits = len(lines_of(blobs.log))
    with Store.open(blobs, config(tmp_path, patience_s=0.5)) as store:
        builder.join()
        assert store.statistics().items == COUNT
    assert len(lines_of(blobs.log)) == visits
    assert not any("private" in message for message in caplog.messages)


@pytest.mark.parametrize(
    "record",
    [
        "",
        "{}",
        "[1, 2]",
        json.dumps(["another boot", 1, 1, 1]),
        json.dumps([*FdAddress.of(0)[:2], 1, 0]),
        json.dumps([*FdAddress.of(0)[:3], 987654]),
    ],
    ids=["empty", "no list", "too short", "another boot", "another process", "no such descriptor"],
)
def test_a_stale_record_of_memory_is_ignored(tmp_path, blobs, record):
    Store.open(blobs, config(tmp_path)).close()
    the_file(tmp_path).with_suffix(".memory").write_text(record)
    with Store.open(blobs, config(tmp_path, "ram")) as store:
        assert contents(store) == contents(blobs)


def test_a_worker_that_opens_the_store_after_it_was_closed_decodes_by_itself(tmp_path, blobs, caplog):
    store = Store.open(blobs, config(tmp_path, "ram"))
    payload = pickle.dumps(store)
    store.close()
    late = pickle.loads(payload)
    assert contents(late) == contents(blobs)
    assert late.statistics().items == 0
    assert "The store cannot be opened in this process" in caplog.text


def test_the_memory_of_a_store_cannot_be_written_or_truncated(tmp_path, blobs):
    with Store.open(blobs, config(tmp_path, "ram")) as store:
        (record,) = (tmp_path / "stores").glob("*.memory")
        fd = FdAddress(*json.loads(record.read_text())).open(os.O_RDWR)
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 100)
        with pytest.raises(PermissionError):
            os.pwrite(fd, b"x", 5000)
        os.close(fd)
        with pytest.raises(ValueError, match="read-only"):
            store[0][...] = np.uint8(1)


def test_a_build_without_a_terminal_logs_its_progress(tmp_path, blobs, caplog, monkeypatch):
    monkeypatch.setattr("flatout.progress.LINE_INTERVAL_S", 0.0)
    with caplog.at_level(logging.INFO):
        Store.open(blobs, config(tmp_path)).close()
    assert any(message.startswith("decoding: 24/24 items, 0 MB, ") for message in caplog.messages)
