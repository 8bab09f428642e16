"""bench.coco256 report: parts of a run's wall time from its log, and nothing of the machine it ran on."""

from itertools import pairwise

import pytest

from bench.coco256 import ends_of_epochs, parts_of, speeds_of_epochs, without_paths

LOG = """\
   12.37 device: cuda:0, images: kept and augmented on the device
   13.77 train: 90 found, 1 missing
   13.82 val: 5000 found, 0 missing
   19.75 decoding: 40/91 items
   33.97 Training images: 91 items
   41.13 91 of 91 items on cuda:0
   67.06 train    100/84600    0 %  epoch 0
   88.83 5000 of 5000 items on cuda:0
   94.05                Class      Images
   94.05                  all        5000
  106.15                  all        5000
  117.68                  all        5000
  118.85 Results are in runs
"""


def test_the_parts_follow_each_other_from_the_command_to_the_end():
    parts = parts_of(LOG, wall_s=125.0)
    assert (parts[0].begin_s, parts[-1].end_s) == (0.0, 125.0)
    assert all(part.end_s == following.begin_s for part, following in pairwise(parts))
    seconds = [part.end_s - part.begin_s for part in parts]
    assert seconds == pytest.approx([12.37, 1.45, 20.15, 7.16, 25.93, 26.99, 23.63, 7.32])


def test_an_epoch_ends_with_its_score():
    assert ends_of_epochs(LOG) == [94.05, 106.15, 117.68]


def test_a_command_is_kept_without_folders_of_its_machine():
    command = "train.py --data /mnt/a/data.yaml --weights '' --hyp /b/hyp.ota.yaml --img 256 --project /b --name x"
    assert without_paths(command) == (
        "train.py --data SET/data.yaml --weights '' --hyp RUNS/hyp.ota.yaml --img 256 --project RUNS --name x"
    )


def test_the_speed_of_an_epoch_is_that_of_its_last_line():
    lines = (
        "train 1/9 epoch 0 lr 1 speed 10 img/s",
        "train 2/9 epoch 0 lr 1 speed 20 img/s",
        "train 3/9 epoch 1 lr 1 speed 30 img/s",
    )
    assert speeds_of_epochs("\n".join(lines)) == [20, 30]
