"""What a spike file holds follows from a table, and a file that fits nothing is named with what would fit."""

import pytest

from flatout.errors import ConfigError, DataError
from flatout.spike.data.stream_layout import StreamError, StreamWishes, decide, highest
from tests.golden_cases import golden_cases

KEYS = {"fmt": "format", "h": "height", "w": "width", "t": "frames"}


@pytest.mark.parametrize("case", golden_cases("spike/dat_format_cases.json"))
def test_the_decision_table_matches_the_golden_one(case):
    given, expect = dict(case["input"]), case["expect"]
    size, content, sidecar = given.pop("size"), given.pop("content"), given.pop("sidecar", None)

    def layout():
        wishes = StreamWishes(**{KEYS[key]: value for key, value in given.items()})
        return decide(size, content, wishes, tuple(sidecar) if sidecar else None)

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


def test_an_unfit_file_is_a_value_error_that_says_all_that_helps():
    with pytest.raises(ValueError, match=r"^Cannot reshape spike data") as caught:
        decide(2_500_000, "bytes", StreamWishes(), where="000012.dat")
    text = str(caught.value)
    for part in ("000012.dat", "2500000 bytes", "360 x 640", "28800 bytes per frame", "remainder of 23200",
                 "250 x 400 (200 frames)", "SPIKE_H", "SPIKE_FORMAT"):  # fmt: skip
        assert part in text
    assert isinstance(caught.value, DataError)
    assert caught.value.exit_code == 3


def test_packed_bytes_under_the_name_of_uint8_show_the_packed_reading():
    with pytest.raises(ValueError, match=r"^Cannot reshape spike data.*88 frames of 360 x 640.*SPIKE_FORMAT: packed"):
        decide(2_534_400, "bytes", StreamWishes(format="uint8"), where="a.dat")


def test_the_flip_may_be_overruled():
    assert not decide(28_800, "bytes", StreamWishes(flipud=False)).flipud
    assert decide(230_400, "binary", StreamWishes(flipud=True)).flipud


def test_any_size_is_read_whole_or_refused():
    """2000 lengths: never a frame too many, never a byte left over."""
    wishes = StreamWishes(height=36, width=64)
    for size in range(1, 2001):
        if size % 288:
            with pytest.raises(StreamError):
                decide(size, "bytes", wishes)
        else:
            assert decide(size, "bytes", wishes).nbytes == size


def test_of_several_files_the_highest_content_counts():
    assert highest(["zero", "binary", "zero"]) == "binary"
    assert highest(["bytes", "binary"]) == "bytes"
    assert highest([]) == "zero"
