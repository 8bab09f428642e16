"""Whatever lies in a data folder: no crash, no hang, bounded memory, and nothing there is changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.yolo.data.check.run import CheckConfig, check_data_set
from tests.yolo.data.drawn_set import DrawnSet
from tests.yolo.data.hostile_pictures import FIXED, generated, write_fixed

MOST_S_PER_FILE = 5.0
MOST_RSS_MIB = 1024
GENERATED = (32, 64, 500)
"""Originals, cuts of each, and flips in all."""

LOOK_AT_ALL = """
import json, os, sys, time
from flatout.yolo.data.check.facts import facts_of
from flatout.yolo.data.scan import scan_picture

slowest, kept, decoded = (0.0, ""), 0, 0
names = sorted(os.listdir(sys.argv[1]))
for name in names:
    path = os.path.join(sys.argv[1], name)
    for strict in (False, True):
        begin = time.monotonic()
        scanned = scan_picture(path, path + ".txt", strict=strict)
        slowest = max(slowest, (time.monotonic() - begin, name))
    begin = time.monotonic()
    facts = facts_of(path)
    slowest = max(slowest, (time.monotonic() - begin, name))
    kept += not scanned.reason
    decoded += int(facts["state"]) == 0
# Not getrusage, which would count what the parent had when it forked.
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
print(json.dumps({"files": len(names), "slowest": slowest, "kept": kept, "decoded": decoded,
                  "rss_mib": peak_kib / 1024}))
"""


def look_at_all(folder: Path) -> dict[str, object]:
    """In a process of its own: a crash is seen, and its memory is its own."""
    done = subprocess.run(
        [sys.executable, "-c", LOOK_AT_ALL, str(folder)], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check_outcome(outcome: dict, num_files: int) -> None:
    assert outcome["files"] == num_files
    assert outcome["slowest"][0] < MOST_S_PER_FILE, outcome["slowest"]
    assert outcome["rss_mib"] < MOST_RSS_MIB
    assert 0 < outcome["kept"] < num_files
    assert 0 < outcome["decoded"] < num_files


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


@pytest.mark.timing
def test_the_fixed_corpus_is_looked_at_without_harm(tmp_path):
    paths = write_fixed(tmp_path / "images")
    assert len(paths) >= 40
    before = state_of(tmp_path)
    check_outcome(look_at_all(tmp_path / "images"), len(paths))
    assert state_of(tmp_path) == before


@pytest.mark.timing
def test_cut_and_flipped_pictures_are_looked_at_without_harm(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, content in generated(*GENERATED):
        (folder / name).write_bytes(content)
    check_outcome(look_at_all(folder), len(list(folder.iterdir())))


@pytest.mark.parametrize("strict", [False, True])
def test_the_whole_check_survives_the_corpus_on_a_read_only_copy(tmp_path, strict):
    made = DrawnSet(tmp_path / "set", num_train=0)
    write_fixed(tmp_path / "set/images/train")
    yaml = made.yaml()
    for folder, _, files in os.walk(made.folder, topdown=False):
        for name in files:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o444)
        os.chmod(folder, 0o555)
    before = state_of(made.folder)
    report = check_data_set(
        yaml, CheckConfig(workers=1, progress=False, strict=strict, cache_folder=tmp_path / "cache")
    )
    told = {os.path.basename(finding.where) for finding in report.findings}
    bad = {
        "empty.jpg",
        "text.jpg",
        "gif.jpg",
        "bomb.png",
        "lie.jpg",
        "zip.jpg",
        "cut.png",
        "pipe.jpg",
        "loop.jpg",
        "1x1.png",
    }
    assert bad <= told
    assert report.counts["train"]["total"] == len(FIXED) + 4, "a folder named like a picture is a folder"
    assert state_of(made.folder) == before
    for folder, _, _ in os.walk(made.folder):
        os.chmod(folder, 0o755)  # for the clean-up
