"""Packed bytes decode to the spikes that they were made from, whole or as a crop cut before unpacking."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.spike.data.decode import Box, content_of, decode, map_stream, pack
from flatout.spike.data.stream_layout import Layout, StreamError
from flatout.spike.data.voxels import voxel_counts
from tests.golden_cases import golden_cases
from tests.spike.recipe import simulate


def streams(path: Path):
    """Every case that has arrays, with its parameters."""
    arrays = np.load(path.with_suffix(".npz")) if path.with_suffix(".npz").exists() else {}
    for name, parameters in json.loads(path.read_text()).get("cases", {}).items():
        yield name, (parameters, {key.split("/")[1]: arrays[key] for key in arrays if key.split("/")[0] == name})


def full_streams(path: Path):
    return json.loads(path.read_text()).get("full", {}).items()


def layout_for(kind: str, spikes_THW: np.ndarray, *, flipud: bool) -> Layout:
    num_frames, height, width = spikes_THW.shape
    return Layout(kind, num_frames, height, width, flipud)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", golden_cases("spike/streams.json", streams, also=("spike/streams.npz",)))
def test_files_decode_to_the_golden_spikes(case):
    parameters, arrays = case
    spikes, _ = simulate(parameters)
    assert int(spikes.sum()) == parameters["spikes_sum"]
    packed = pack(spikes)
    assert len(packed) == parameters["packed_bytes"]
    assert hashlib.sha256(packed.tobytes()).hexdigest() == parameters["sha256_packed"]
    readings = {"dat_packed": ("packed", True), "dat_packed_noflip": ("packed", False), "dat_uint8": ("uint8", False)}
    for name, array in arrays.items():
        if name == "spikes":
            assert np.array_equal(array, spikes)
            continue
        kind, flipud = readings[name]
        layout = layout_for(kind, spikes, flipud=flipud)
        assert np.array_equal(decode(array.reshape(layout.frames, -1), layout), spikes), name


@pytest.mark.parametrize("case", golden_cases("spike/streams.json", full_streams))
def test_full_size_streams_have_the_golden_digests(case):
    spikes, _ = simulate(case)
    packed = pack(spikes)
    assert hashlib.sha256(packed.tobytes()).hexdigest() == case["sha256_packed"]
    assert hashlib.sha256(spikes.tobytes()).hexdigest() == case["sha256_uint8"]
    layout = layout_for("packed", spikes, flipud=True)
    voxel = voxel_counts(decode(packed.reshape(layout.frames, -1), layout), case["bins"])
    assert hashlib.sha256(np.ascontiguousarray(voxel).tobytes()).hexdigest() == case["sha256_voxel_u8"]
    assert voxel.sum(axis=(1, 2), dtype=np.int64).tolist() == case["bin_sums"]
    assert all(voxel[b, y, x] == count for b, y, x, count in case["probes"])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_crop_equals_the_same_part_of_the_whole(data):
    height, width = data.draw(st.sampled_from([(8, 16), (8, 12), (25, 40), (6, 20), (16, 8)]))
    kind = data.draw(st.sampled_from(["packed", "uint8", "bytes"]))
    flipud = data.draw(st.booleans())
    spikes = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 2, (3, height, width), np.uint8)
    raw = pack(spikes, flipud=flipud) if kind == "packed" else (spikes[:, ::-1] if flipud else spikes).reshape(-1)
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    h, w = data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left))
    layout = layout_for(kind, spikes, flipud=flipud)
    crop = decode(np.ascontiguousarray(raw).reshape(3, -1), layout, Box(top, left, h, w))
    assert np.array_equal(crop, spikes[:, top : top + h, left : left + w])


def test_a_file_that_has_changed_since_is_refused(tmp_path):
    spikes = np.ones((2, 8, 16), np.uint8)
    (tmp_path / "a.dat").write_bytes(pack(spikes).tobytes())
    layout = layout_for("packed", spikes, flipud=True)
    assert np.array_equal(decode(map_stream(tmp_path / "a.dat", layout), layout), spikes)
    (tmp_path / "a.dat").write_bytes(b"1234")
    with pytest.raises(StreamError, match=r"^Cannot reshape spike data.*4 bytes where 32"):
        map_stream(tmp_path / "a.dat", layout)


@pytest.mark.parametrize(("bytes_", "expected"), [(b"\0" * 9, "zero"), (b"\0\1", "binary"), (b"\0\1\2", "bytes")])
def test_content_depends_on_the_largest_byte(tmp_path, bytes_, expected):
    (tmp_path / "a.dat").write_bytes(bytes_)
    assert content_of(tmp_path / "a.dat") == expected
