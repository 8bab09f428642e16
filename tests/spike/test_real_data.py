"""Real files, if $FLATOUT_DATA has them: a stream in the community's format, and videos with simulated spikes."""

import os
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from flatout.spike.check import orientation_of
from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import open_clips, open_training
from flatout.spike.data.decode import content_of, decode, map_stream
from flatout.spike.data.frames import read_frame
from flatout.spike.data.prepare import PrepareConfig, prepare
from flatout.spike.data.stream_layout import StreamError, StreamSettings, decide_layout
from flatout.spike.evaluate import standard_scores

MINI = Path(os.environ.get("FLATOUT_DATA", "")) / "spike_mini"
pytestmark = pytest.mark.skipif(
    not os.environ.get("FLATOUT_DATA") or not MINI.is_dir(), reason="FLATOUT_DATA names no folder with spike_mini"
)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> DataConfig:
    output = tmp_path_factory.mktemp("mini")
    done = prepare(
        PrepareConfig(spike_root=MINI / "spike", blur_root=MINI / "rgb", output=output, use_symlinks=True)
    )  # fmt: skip
    assert {split: len(sequences) for split, sequences in done.created.items()} == {"train": 2, "test": 1}
    return DataConfig(ROOT=str(output), SPIKE_H=72, SPIKE_W=128, CROP_SIZE=128)


def test_the_community_s_own_file_is_read_the_right_way_up():
    path = next((MINI / "reference_file").glob("*.dat"))
    size, content = path.stat().st_size, content_of(path)
    with pytest.raises(StreamError) as caught:
        decide_layout(size, content, StreamSettings())
    assert (250, 400, 301) in caught.value.hints
    layout = decide_layout(size, content, StreamSettings(height=250, width=400))
    spikes = decode(map_stream(path, layout), layout)
    assert spikes.mean() == pytest.approx(0.2877, abs=1e-4)
    grey = cv2.imread(str(path.with_suffix(".png")), cv2.IMREAD_GRAYSCALE)
    rate = spikes[130:172].mean(axis=0)
    assert np.corrcoef(rate.ravel(), grey.ravel())[0, 1] == pytest.approx(0.988, abs=2e-3)
    assert np.corrcoef(rate[::-1].ravel(), grey.ravel())[0, 1] < 0


def test_every_stream_matches_its_frame(tree):
    train, test = open_training(tree)
    assert test is not None and (len(train), len(test)) == (16, 3)
    for clips in (train, test):
        for frame in range(len(clips.frames)):
            found = orientation_of(clips, frame)
            assert found.problem == "" and found.correlation["identity"] > 0.95


def test_the_blurry_input_has_the_published_score(tree):
    clips = open_clips(tree, "test", scored=True)

    def load_frames(part: str) -> torch.Tensor:
        frames = [torch.from_numpy(read_frame(getattr(each, part))) for each in clips.frames]
        return torch.stack(frames).permute(0, 3, 1, 2) / 255

    blur, sharp = load_frames("blur"), load_frames("sharp")
    assert float(standard_scores(blur, sharp).psnr.mean()) == pytest.approx(31.46, abs=0.02)
