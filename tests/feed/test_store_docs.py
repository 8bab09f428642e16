"""The examples in docs/store.md run."""

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np

from flatout.feed import Store, StoreConfig
from tests.feed.blobs import Blobs, write_blobs
from tests.feed.injections import CHECKOUT, run_script

EXAMPLE, READER = (part.split("```")[0] for part in (CHECKOUT / "docs/store.md").read_text().split("```python\n")[1:])


def test_the_example_trains_and_decodes_nothing_twice(tmp_path: Path, monkeypatch):
    (tmp_path / "store_example.py").write_text(EXAMPLE)
    for number in range(9):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.zeros((40, 50, 3), np.uint8))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Not in this process: OpenCV's threads would disturb tests that fork.
    script = "import sys, store_example\nif __name__ == '__main__':\n    store_example.train(sys.argv[1:])"
    outcome = run_script(script, tmp_path, *sorted(tmp_path.glob("*.png")))
    rates = [line.rpartition("hit rate ")[2] for line in outcome.out.splitlines()]
    assert len(rates) == 3, outcome
    assert rates[0] == "100.0%", outcome
    assert set(rates) <= {"100.0%", "unknown (nothing was read)"}, outcome  # epochs are read ahead


def test_a_store_can_be_read_without_opencv_torch_and_flatout(tmp_path: Path):
    blobs = Blobs(write_blobs(tmp_path / "data", 8))
    Path(blobs.paths[4]).unlink()
    Store.open(blobs, StoreConfig(place="disk", folder=tmp_path, workers=0)).close()
    (store,) = tmp_path.glob("*.store")
    script = f"""
import sys
sys.modules.update(dict.fromkeys(("cv2", "torch", "flatout")))  # importing them fails
{READER}
items = [read_item({str(store)!r}, number) for number in range(8)]
print([None if item is None else (item.dtype.str, item.shape, item.sum().item()) for item in items])
"""
    out = subprocess.run([sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True).stdout
    expected = [None if index == 4 else blobs.decode(index) for index in range(8)]
    assert out.strip() == repr(
        [None if array is None else (array.dtype.str, array.shape, array.sum().item()) for array in expected]
    )
