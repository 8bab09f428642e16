"""No file in a data folder causes a crash, a hang or unbounded memory, and no file is changed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.yolo.data.check.run import CheckConfig, check_data_set
from tests.yolo.data.drawn_set import SmallDataSet
from tests.yolo.data.hostile_images import FIXED, generated, write_fixed

MAX_S_PER_FILE = 5.0
MAX_RSS_MIB = 1024
GENERATED = (32, 64, 500)
"""Number of originals, of truncations of each, and of all files with flipped bits."""

EXAMINE_ALL = """
import json, os, sys, time
from flatout.yolo.data.check.facts import decode_facts
from flatout.yolo.data.scan import scan_image

slowest, kept, decoded = (0.0, ""), 0, 0
names = sorted(os.listdir(sys.argv[1]))
for name in names:
    path = os.path.join(sys.argv[1], name)
    for strict in (False, True):
        begin = time.monotonic()
        scanned = scan_image(path, path + ".txt", strict=strict)
        slowest = max(slowest, (time.monotonic() - begin, name))
    begin = time.monotonic()
    facts = decode_facts(path)
    slowest = max(slowest, (time.monotonic() - begin, name))
    kept += not scanned.reason
    decoded += int(facts["state"]) == 0
# Not getrusage, which would count the memory of the parent at the fork.
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
print(json.dumps({"files": len(names), "slowest": slowest, "kept": kept, "decoded": decoded,
                  "rss_mib": peak_kib / 1024}))
"""


def examine_all(folder: Path) -> dict[str, object]:
    """Scan and decode all files in a separate process, so that crashes and memory can be observed."""
    done = subprocess.run(
        [sys.executable, "-c", EXAMINE_ALL, str(folder)], check=False, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def check_outcome(outcome: dict, num_files: int) -> None:
    assert outcome["files"] == num_files
    assert outcome["slowest"][0] < MAX_S_PER_FILE, outcome["slowest"]
    assert outcome["rss_mib"] < MAX_RSS_MIB
    assert 0 < outcome["kept"] < num_files
    assert 0 < outcome["decoded"] < num_files


def state_of(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*")}


@pytest.mark.timing
def test_the_fixed_corpus_is_examined_without_harm(tmp_path):
    paths = write_fixed(tmp_path / "images")
    assert len(paths) >= 40
    before = state_of(tmp_path)
    check_outcome(examine_all(tmp_path / "images"), len(paths))
    assert state_of(tmp_path) == before


@pytest.mark.timing
def test_truncated_images_and_images_with_flipped_bits_are_examined_without_harm(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name, content in generated(*GENERATED):
        (folder / name).write_bytes(content)
    check_outcome(examine_all(folder), len(list(folder.iterdir())))


@pytest.mark.parametrize("strict", [False, True])
def test_the_whole_check_survives_the_corpus_on_a_read_only_copy(tmp_path, strict):
    made = SmallDataSet(tmp_path / "set", num_train=0)
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
    reported = {os.path.basename(finding.where) for finding in report.findings}
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
    assert bad <= reported
    assert report.counts["train"]["total"] == len(FIXED) + 4, "a folder named like an image is a folder"
    assert state_of(made.folder) == before
    for folder, _, _ in os.walk(made.folder):
        os.chmod(folder, 0o755)  # for the clean-up
