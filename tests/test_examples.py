"""The examples do what their headers promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str) -> str:
    # From another folder, as a user might: an example needs nothing but the installed package.
    done = subprocess.run([sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_detector_is_short_and_learns():
    assert len((EXAMPLES / "train_detector.py").read_text().splitlines()) <= 150
    output = run("train_detector.py")
    found = re.search(r"mAP@\.5 (\d\.\d+) on 64 images", output)
    assert found and float(found[1]) > 0.65, output


def test_crops_on_the_device_are_learned():
    output = run("gpu_crops.py")
    accuracies = [float(each) for each in re.findall(r"accuracy (\d\.\d+)", output)]
    assert len(accuracies) == 3 and accuracies[-1] > 0.95, output
