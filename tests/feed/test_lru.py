"""The cache of the items used last: golden traces and invariants."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flatout.feed.store.keep import Lru
from tests.golden_cases import golden_cases


def cases_by_capacity(path: Path) -> Iterable[tuple[str, Any]]:
    return [(f"capacity {case['capacity']}", case) for case in json.loads(path.read_text())["cases"]]


@pytest.mark.parametrize("case", golden_cases("defect/lru.json", cases_by_capacity))
def test_a_cache_that_counts_items_matches_the_golden_trace(case: dict[str, Any]):
    cache: Lru[int, int] = Lru(case["capacity"])
    hits, evicted = "", []
    for key in case["sequence"]:
        hit = cache.get(key) is not None
        hits += str(int(hit))
        if not hit:
            evicted += cache.put(key, key)
    assert hits == case["hits"]
    assert hits.count("1") == case["n_hits"]
    assert evicted == case["evicted"]
    assert list(cache) == case["left_oldest_first"]


@pytest.mark.parametrize("case", golden_cases("spike/lru_trace.json"))
def test_a_cache_that_counts_bytes_matches_the_golden_trace(case: dict[str, Any]):
    cache: Lru[str, str] = Lru(case["budget"])
    log, evicted = [], []
    for key, size in case["ops"]:
        if cache.get(key) is not None:
            log.append("hit")
            continue
        evicted += cache.put(key, key, size)
        log.append("miss" if key in cache else "miss_toobig")
    assert {
        "log": log,
        "hits": log.count("hit"),
        "misses": len(log) - log.count("hit"),
        "evictions": len(evicted),
        "rejected": log.count("miss_toobig"),
        "final_keys_old_to_new": list(cache),
        "bytes": cache.used,
    } == case["expect"]


@pytest.mark.parametrize("seed", range(5))
def test_it_never_holds_more_than_its_budget_and_always_what_was_put_last(seed: int):
    rng = np.random.default_rng(seed)
    cache: Lru[int, int] = Lru(100)
    sizes: dict[int, int] = {}
    for _ in range(300):
        key, size = int(rng.integers(20)), int(rng.integers(1, 60))
        cache.put(key, key, size)
        sizes[key] = size
        assert cache.used == sum(sizes[kept] for kept in cache) <= 100
        assert list(cache)[-1] == key
        assert len(cache) == len(set(cache))
