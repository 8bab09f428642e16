"""The layout of a spike file follows from a table, and an error for a file that does not fit lists what would fit."""

import pytest

from flatout.errors import ConfigError, DataError
from flatout.spike.data.stream_layout import StreamError, StreamSettings, decide_layout, highest_content
from tests.golden_cases import golden_cases

KEYS = {"fmt": "format", "h": "height", "w": "width", "t": "frames"}


@pytest.mark.parametrize("case", golden_cases("spike/dat_format_cases.json"))
def test_the_decision_table_matches_the_golden_one(case):
    given, expect = dict(case["input"]), case["expect"]
    size, content, sidecar = given.pop("size"), given.pop("content"), given.pop("sidecar", None)

    def layout():
        settings = StreamSettings(**{KEYS[key]: value for key, value in given.items()})
        return decide_layout(size, content, settings, tuple(sidecar) if sidecar else None)

    if expect.get("error") == "config":
        with pytest.raises(ConfigError, match="SPIKE_H"):
            layout()
    elif "error" in expect:
        with pytest.raises(StreamError) as caught:
            layout()
        assert caught.value.kind == expect["error"]
        assert [list(hint) for hint in caught.value.hints] == expect.get("hints", [])
    else:
        found = layout()
        assert (found.format, found.frames, found.height, found.width, found.flipud) == tuple(
            expect[key] for key in ("format", "T", "H", "W", "flipud")
        )
        assert found.warning == expect.get("warning", "")
        assert found.nbytes == size


def test_a_file_that_does_not_fit_is_a_value_error_with_all_useful_facts():
    with pytest.raises(ValueError, match=r"^Cannot reshape spike data") as caught:
        decide_layout(2_500_000, "bytes", StreamSettings(), where="000012.dat")
    text = str(caught.value)
    for part in ("000012.dat", "2500000 bytes", "360 x 640 (height x width)", "28800 bytes per frame",
                 "remainder of 23200", "250 x 400 (200 frames)", "SPIKE_H", "SPIKE_FORMAT"):  # fmt: skip
        assert part in text
    assert isinstance(caught.value, DataError)
    assert caught.value.exit_code == 3


def test_packed_data_declared_as_uint8_is_reported_as_packed():
    with pytest.raises(ValueError, match=r"^Cannot reshape spike data.*88 frames of 360 x 640.*SPIKE_FORMAT: packed"):
        decide_layout(2_534_400, "bytes", StreamSettings(format="uint8"), where="a.dat")


def test_the_flip_can_be_overridden():
    assert not decide_layout(28_800, "bytes", StreamSettings(flipud=False)).flipud
    assert decide_layout(230_400, "binary", StreamSettings(flipud=True)).flipud


def test_any_size_is_read_completely_or_refused():
    """2000 sizes: never a frame too many, never a byte left over."""
    settings = StreamSettings(height=36, width=64)
    for size in range(1, 2001):
        if size % 288:
            with pytest.raises(StreamError):
                decide_layout(size, "bytes", settings)
        else:
            assert decide_layout(size, "bytes", settings).nbytes == size


def test_of_several_files_the_highest_content_is_used():
    assert highest_content(["zero", "binary", "zero"]) == "binary"
    assert highest_content(["bytes", "binary"]) == "bytes"
    assert highest_content([]) == "zero"
