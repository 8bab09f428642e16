"""A store returns the same arrays as decoding, decodes each item once, and shares its memory between processes."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.errors import ConfigError
from flatout.feed import Feed, FeedConfig, Plan, Store, StoreConfig
from flatout.feed.store.build import Budget, is_enough, memory_budget
from flatout.feed.store.file import StoreHeader
from flatout.feed.store.home import default_folder, key_of
from flatout.feed.store.store import HIT, MISS
from flatout.progress import progress_line
from tests.feed.blobs import Blobs, Sums, contents, write_blobs
from tests.feed.injections import CHECKOUT, Script, run_script
from tests.feed.sources import lines_of

PLACES = ["ram", "disk"]


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(write_blobs(tmp_path / "data", 24), log=tmp_path / "log")


def room_for(num_items: int) -> int:
    """Budget for exactly the first `num_items` blobs: two pages, then 12 * (40 + i) bytes each, aligned to 64."""
    *before, last = [12 * (40 + number) for number in range(num_items)]
    return 2 * 4096 + sum(-(-nbytes // 64) * 64 for nbytes in before) + last


def config(tmp_path: Path, place: str = "ram", **knobs) -> StoreConfig:
    base: dict[str, Any] = {"place": place, "folder": tmp_path / "stores", "workers": 0, "patience_s": 5}
    return StoreConfig(**base | knobs)


@pytest.mark.parametrize("place", [*PLACES, "off"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_store_returns_what_decode_returns(tmp_path, blobs, place, workers):
    with Store.open(blobs, config(tmp_path, place, workers=workers)) as store:
        assert contents(store) == contents(blobs)
        assert all(store.is_resident(index) == (place != "off") for index in range(len(store)))
        assert not any(store[index].flags.writeable for index in range(len(store)))


@pytest.mark.parametrize("place", PLACES)
def test_everything_is_decoded_once_and_never_again_while_the_store_is_open(tmp_path, blobs, place):
    with Store.open(blobs, config(tmp_path, place)) as store:
        visits = len(lines_of(blobs.log))
        assert visits == len(blobs), "nothing is decoded twice, not even to find out how much room to reserve"
        with Store.open(blobs, config(tmp_path, place)) as again:
            contents(store)
            contents(again)
        assert len(lines_of(blobs.log)) == visits


def test_a_store_on_disk_is_found_by_the_next_run_and_one_in_memory_is_gone(tmp_path, blobs):
    for place, decoded_again in (("disk", False), ("ram", True)):
        Store.open(blobs, config(tmp_path, place)).close()
        visits = len(lines_of(blobs.log))
        Store.open(blobs, config(tmp_path, place)).close()
        assert (len(lines_of(blobs.log)) > visits) == decoded_again
    assert {path.suffix for path in (tmp_path / "stores").iterdir()} == {".store", ".lock"}


def test_nothing_is_written_beside_the_data(tmp_path, blobs):
    before = sorted((tmp_path / "data").iterdir())
    for place in PLACES:
        Store.open(blobs, config(tmp_path, place)).close()
    assert sorted((tmp_path / "data").iterdir()) == before


def test_the_default_folder_is_in_the_users_cache(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere/cache")
    assert default_folder() == Path("/somewhere/cache/flatout/stores")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/somewhere/home")
    assert default_folder() == Path("/somewhere/home/.cache/flatout/stores")


# Budgets


def test_a_small_budget_keeps_the_same_first_items_however_it_is_built(tmp_path, blobs):
    kept = []
    for number, knobs in enumerate([{"workers": 0}, {"workers": 2}, {"workers": 3, "backend": "thread"}]):
        knobs |= {"folder": tmp_path / str(number), "budget_bytes": room_for(11)}
        with Store.open(blobs, config(tmp_path, **knobs)) as store:
            kept.append([store.is_resident(index) for index in range(24)])
            assert contents(store) == contents(blobs)
            statistics = store.statistics()
            assert statistics.hits == statistics.items == sum(kept[-1])
            assert statistics.misses == 24 - statistics.items
    assert kept[0] == kept[1] == kept[2] == [True] * 11 + [False] * 13


def test_omitted_items_are_reported_in_one_warning(tmp_path, blobs, caplog):
    Store.open(blobs, config(tmp_path, budget_bytes=room_for(7))).close()
    (record,) = caplog.records
    assert record.getMessage() == (
        "The store holds 7 of 24 items (0 MB): the budget is used up. The others are decoded on every access."
    )


def test_a_larger_budget_rebuilds_the_store_and_a_smaller_one_does_not(tmp_path, blobs):
    for budget, kept in ((room_for(7), 7), (room_for(3), 7), (room_for(21), 21), (None, 24), (room_for(7), 24)):
        with Store.open(blobs, config(tmp_path, "disk", budget_bytes=budget)) as store:
            assert store.statistics().items == kept


@pytest.mark.parametrize(
    ("stopped_by", "asked", "default", "enough"),
    [
        ("", 10**9, 10**9, True),
        ("budget", 500, 10**9, True),
        ("budget", 501, 10**9, False),
        ("budget", None, 400, True),
        ("budget", None, 401, False),
        ("no room", 10**9, 400, True),
        ("no room", 10**9, 401, False),
    ],
)
def test_a_store_is_enough_unless_a_new_one_would_be_larger(stopped_by, asked, default, enough):
    header = StoreHeader(state="", num_items=9, nbytes=400, budget_bytes=500, stopped_by=stopped_by)
    assert is_enough(header, Budget(asked, default, 10**9)) == enough


def test_a_store_never_takes_all_memory():
    assert memory_budget(None, 1000).limit_bytes == 500
    assert memory_budget(700, 1000).limit_bytes == 700
    assert memory_budget(10**6, 1000).limit_bytes == 900


# Keys


def test_the_key_changes_with_content_time_parameters_class_and_files(tmp_path, blobs):
    keys = [key_of(blobs)]
    path = tmp_path / "data/003.blob"
    status = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # same size, same mtime, different ctime
    keys.append(key_of(blobs))
    os.utime(path)
    keys.append(key_of(blobs))
    blobs.parameters = "other"
    keys.append(key_of(blobs))
    path.unlink()
    keys.append(key_of(blobs))
    blobs.paths.pop()
    keys.append(key_of(blobs))
    keys.append(key_of(type("OtherLoad", (Blobs,), {})(map(Path, blobs.paths), parameters="other")))
    assert len({key.state for key in keys}) == len(keys)
    assert len({key.family for key in keys[:3]}) == 1


def test_the_key_does_not_depend_on_the_working_folder(tmp_path, blobs, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = Blobs([Path(path).relative_to(tmp_path) for path in blobs.paths])
    assert key_of(relative) == key_of(blobs)


def test_a_changed_input_leads_to_a_new_store_and_the_old_one_is_removed(tmp_path, blobs):
    Store.open(blobs, config(tmp_path, "disk")).close()
    Path(blobs.paths[5]).write_bytes(bytes(24))
    with Store.open(blobs, config(tmp_path, "disk")) as store:
        assert contents(store) == contents(blobs)
    assert len(list((tmp_path / "stores").glob("*.store"))) == 1


# Sharing


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_workers_use_the_same_memory_and_yield_the_same_stream(tmp_path, blobs, place, start_method):
    streams = []
    with Store.open(blobs, config(tmp_path, place, budget_bytes=15_000)) as store:
        resident = store.statistics().items
        for workers in (0, 2):
            plan = Plan(num_samples=24, batch_size=6, seed=3)
            with Feed(Sums(store), plan, FeedConfig(workers=workers, start_method=start_method, epochs=1)) as feed:
                streams.append([batch["sum"].tolist() + batch["first"].tolist() for batch in feed])
                stages = feed.meter.read().stages
                mapped = [mapped_inodes(pid) for pid in feed.worker_pids.values()]
            assert (stages[HIT].runs, stages[MISS].runs) == (resident, 24 - resident)
            assert store.statistics(stages).hit_rate == resident / 24
        own = mapped_inodes(os.getpid())
        assert all(inodes and inodes <= own for inodes in mapped)
    assert streams[0] == streams[1]


def mapped_inodes(pid: int) -> set[str]:
    """Inodes of the store's mappings in a process."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:flatout-store " in line or ".store" in line}


def test_another_process_finds_the_store_in_memory_and_keeps_it_when_the_owner_closes(tmp_path, blobs):
    script = """
import sys
from pathlib import Path
from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs
folder = Path(sys.argv[1])
blobs = Blobs(sorted((folder / "data").iterdir()), log=folder / "log of the other")
store = Store.open(blobs, StoreConfig(folder=folder / "stores", workers=0))
print("open", flush=True)
input()
print(store[3].sum(), store.statistics().hits)
"""
    path = tmp_path / "other.py"
    path.write_text(script)
    with Store.open(blobs, config(tmp_path)) as store:
        expected = store[3].sum()
        other = subprocess.Popen(
            [sys.executable, path, tmp_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(CHECKOUT)},
        )
        assert other.stdout.readline() == "open\n"
    out, _ = other.communicate("\n", timeout=20)
    assert out.split() == [str(expected), "1"]
    assert not lines_of(tmp_path / "log of the other")


def test_two_runs_that_start_at_once_build_one_store(tmp_path, blobs):
    script = """
import logging, sys, time
from pathlib import Path
from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs
logging.basicConfig(level=logging.INFO)
folder = Path(sys.argv[1])
blobs = Blobs(sorted((folder / "data").iterdir()), log=folder / "log")
blobs.sleep_s = 0.02
(folder / f"{sys.argv[2]} {sys.argv[3]} is ready").touch()
while len(list(folder.glob(f"{sys.argv[2]} * is ready"))) < 2:
    time.sleep(0.005)
store = Store.open(blobs, StoreConfig(place=sys.argv[2], folder=folder / "stores", workers=0))
print(store.statistics().items, flush=True)
time.sleep(60)
"""
    for place in PLACES:
        blobs.log.unlink(missing_ok=True)
        with Script(script, tmp_path, tmp_path, place, 1) as one, Script(script, tmp_path, tmp_path, place, 2) as two:
            assert [one.wait_for_line(), two.wait_for_line()] == ["24", "24"]
            errors = ""
            for each in (one, two):
                each.process.kill()
                errors += each.end().err
        assert 24 <= len(lines_of(blobs.log)) <= 24 + 8  # a few are decoded first, to estimate their size
        assert "Waiting for process " in errors
        assert "which is building the store of the same data" in errors


# Least recently used items


def test_an_lru_store_keeps_what_was_used_last_in_each_process(tmp_path, blobs):
    sizes = [blobs.decode(index).nbytes for index in range(24)]
    budget = 2 * (sizes[0] + sizes[1] + sizes[2])
    with Store.open(blobs, config(tmp_path, policy="lru", budget_bytes=budget, workers=2)) as store:
        assert contents(store, [0, 1, 2, 0, 3]) == contents(blobs, [0, 1, 2, 0, 3])
        # 1 was evicted for 3; that was not enough, and 0 had been used since, so 2 was evicted too.
        assert [store.is_resident(index) for index in range(5)] == [True, False, False, True, False]
        assert store.statistics().hits == 1
        assert store.statistics().nbytes <= budget // 2 == store.statistics().budget_bytes
    assert not (tmp_path / "stores").exists()


def test_an_lru_store_gives_the_same_stream_with_workers(tmp_path, blobs):
    with Store.open(blobs, config(tmp_path, policy="lru", budget_bytes=10_000, workers=2)) as store:
        plan = Plan(num_samples=24, batch_size=6)
        streams = []
        for workers, backend in ((0, "process"), (2, "process"), (2, "thread")):
            with Feed(Sums(store), plan, FeedConfig(workers=workers, backend=backend, epochs=2)) as feed:
                streams.append([batch["sum"].tolist() for _ in range(2) for batch in feed])
    assert streams[0] == streams[1] == streams[2]


# Texts and errors


def test_the_text_of_statistics_is_one_line(tmp_path, blobs):
    with Store.open(blobs, config(tmp_path, budget_bytes=2_000_000)) as store:
        store[0], store[1]
        nbytes = sum(blobs.decode(index).nbytes for index in range(24))
        assert str(store.statistics()) == f"24 items, {nbytes / 1e6:.1f} MB used / 2.0 MB budget, hit rate 100.0%"


def test_the_progress_line_has_the_remaining_time():
    assert progress_line("decoding", 300, 1000, 280_000_000, 2.0) == (
        "decoding: 300/1000 items, 280 MB, 150 items/s, 5 s left"
    )
    assert progress_line("decoding", 0, 1000, 0, 0.0).endswith("just started")


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"place": "vram"}, "place='vram' is unknown: use 'ram' or 'disk' or 'off'."),
        ({"policy": "fifo"}, "policy='fifo' is unknown: use 'resident' or 'lru'."),
        ({"policy": "lru", "place": "disk"}, "policy='lru' keeps items in each process's memory: "
                                             "use it with place='ram'."),
        ({"budget_bytes": -1}, "budget_bytes=-1 must not be negative."),
        ({"patience_s": -1}, "patience_s=-1 must not be negative."),
    ],
)  # fmt: skip
def test_an_invalid_config_raises_one_clear_message(knobs, message):
    with pytest.raises(ConfigError) as caught:
        StoreConfig(**knobs)
    assert str(caught.value) == message


def test_a_closed_store_raises_an_error_and_its_arrays_stay_valid(tmp_path, blobs):
    store = Store.open(blobs, config(tmp_path))
    array = store[0]
    store.close()
    store.close()
    assert array.tobytes() == contents(blobs, [0])[0][2]
    with pytest.raises(ConfigError, match="The store is closed"):
        store[0]


def test_an_index_out_of_range_is_an_error_and_an_empty_store_is_not(tmp_path, blobs):
    with Store.open(blobs, config(tmp_path)) as store:
        for index in (-1, 24):
            with pytest.raises(IndexError, match=f"item {index} is out of range: the store has 24 items"):
                store[index]
    with Store.open(Blobs([]), config(tmp_path)) as store:
        assert len(store) == store.statistics().items == 0


def test_opening_and_closing_leaks_no_file_descriptor(tmp_path, blobs):
    for place in PLACES:
        Store.open(blobs, config(tmp_path, place)).close()
    before = len(os.listdir("/proc/self/fd"))
    for place in PLACES * 3:
        with Store.open(blobs, config(tmp_path, place)) as store:
            contents(store)
    assert len(os.listdir("/proc/self/fd")) == before


def test_building_a_store_does_not_import_torch(tmp_path, blobs):
    script = """
import sys
from pathlib import Path
from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs
folder = Path(sys.argv[1])
store = Store.open(Blobs(sorted((folder / "data").iterdir())), StoreConfig(folder=folder / "stores", workers=0))
assert store.statistics().items == 24
assert not {"torch", "cv2"} & sys.modules.keys()
"""
    outcome = run_script(script, tmp_path, tmp_path)
    assert outcome.code == 0, outcome


def test_arrays_do_not_depend_on_where_they_come_from(tmp_path, blobs):
    with Store.open(blobs, config(tmp_path, budget_bytes=room_for(7))) as store:
        kept, decoded = store[0], store[23]
        assert store.is_resident(0)
        assert not store.is_resident(23)
        for array in (kept, decoded):
            assert array.flags.c_contiguous
            assert not array.flags.writeable
            assert array.dtype == np.dtype(array.dtype).newbyteorder("<")
