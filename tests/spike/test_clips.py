"""Clips consist of consecutive complete frames, and an evaluation scores every frame once."""

import json
from pathlib import Path

import pytest

from flatout.spike.config import DataConfig
from flatout.spike.data.clip_set import exact_step, num_origins, spike_span, validation_split
from flatout.spike.data.stream_layout import StreamSettings, decide_layout
from flatout.spike.data.tree import scored_windows, training_windows, usable_runs
from tests.golden_cases import golden_cases


def named_cases(path: Path):
    return [(case["name"], case) for case in json.loads(path.read_text()).get("cases", [])]


def gopro(path: Path):
    found = json.loads(path.read_text()).get("gopro")
    return [("gopro", found)] if found else []


@pytest.mark.parametrize("case", golden_cases("spike/clip_index.json", named_cases))
def test_windows_match_the_golden_ones(case):
    runs, length = usable_runs(case["blur"], case["sharp"], case["spike"]), case["clip_len"]
    train = [run[first : first + length] for run in runs for first in training_windows(len(run), length)]
    assert train == case["train_windows"]
    scored = [(run, window) for run in runs for window in scored_windows(len(run), length)]
    assert [list(run[w.first : w.first + length]) for run, w in scored] == case["val_windows"]
    assert [list(map(int, w.score_L)) for _, w in scored] == case["val_score"]


@pytest.mark.parametrize(
    ("given", "reason"),
    [("train", "DATA.VAL_SPLIT=train is the training split"), ("dev", "DATA.VAL_SPLIT=dev does not exist")],
)
def test_the_warning_says_why_another_split_is_validated(given, reason, tmp_path, caplog):
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
    assert validation_split(DataConfig(ROOT=str(tmp_path), VAL_SPLIT=given)) == "test"
    assert caplog.messages == [f"{reason}: test is used for validation."]


@pytest.mark.parametrize("case", golden_cases("spike/clip_index.json", gopro))
def test_the_gopro_set_has_the_golden_numbers_of_clips(case):
    totals = {int(key.removeprefix("clips_L")): value for key, value in case.items() if key.startswith("clips_L")}
    for length, expect in totals.items():
        for split in {"train", "test"} & case.keys():
            assert sum(len(training_windows(row["frames"], length)) for row in case[split]) == expect[split]
        if "test" in case:
            assert sum(len(scored_windows(row["frames"], length)) for row in case["test"]) == expect["test_scored"]
    for row in [*case.get("train", []), *case.get("test", [])]:
        layout = decide_layout(row["dat_bytes"], "bytes", StreamSettings())
        assert (layout.frames, layout.height, layout.width) == (row["spike_frames"], 360, 640)
        assert layout.frames == 8 * row["avg"]


@pytest.mark.parametrize("case", golden_cases("spike/crop_map.json"))
def test_crops_correspond_to_the_golden_spike_pixels(case):
    given, expect = case["input"], case["expect"]
    rows = spike_span(given["H"], given["Hs"], origin=given["top"], size=given["size"])
    columns = spike_span(given["W"], given["Ws"], origin=given["left"], size=given["size"])
    assert (rows.start, columns.start, rows.length, columns.length) == tuple(
        expect[key] for key in ("top", "left", "h", "w")
    )
    assert (rows.is_exact and columns.is_exact) == expect["exact"]
    axes = ((given["H"], given["Hs"]), (given["W"], given["Ws"]))
    assert [exact_step(*axis) for axis in axes] == expect["step"]
    assert [num_origins(*axis, given["size"]) for axis in axes] == expect["origins"]


@pytest.mark.parametrize("length", range(1, 8))
@pytest.mark.parametrize("run_length", range(20))
def test_every_frame_of_a_run_is_scored_exactly_once(run_length, length):
    scored = [w.first + i for w in scored_windows(run_length, length) for i, counts in enumerate(w.score_L) if counts]
    assert scored == (list(range(run_length)) if run_length >= length else [])


def test_a_crop_larger_than_the_frame_is_refused():
    with pytest.raises(ValueError, match=r"CROP_SIZE=256 is larger than a side of the frames, which has 144 px"):
        num_origins(144, 72, 256)
