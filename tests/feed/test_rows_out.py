"""Rows of a whole micro-batch that are put at once equal those put one sample at a time."""

import numpy as np
import pytest

from flatout.errors import DataError
from flatout.feed import Rows
from flatout.feed.source import RowsOut


def test_rows_put_at_once_equal_those_put_one_by_one():
    rng = np.random.default_rng(0)
    counts = np.array([2, 0, 3, 1])
    rows = rng.random((6, 5))
    at_once, singly = RowsOut("boxes", Rows(5), 4), RowsOut("boxes", Rows(5), 4)
    at_once.put_all(rows, counts)
    for sample, own in enumerate(np.split(rows, np.cumsum(counts)[:-1])):
        singly.put(sample, own)
    for mine, theirs in zip(at_once.taken, singly.taken, strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype == np.float32
    rows[:] = 0
    assert at_once.taken[0].any(), "what was put is a copy"


@pytest.mark.parametrize(
    ("shape", "counts"), [((6, 4), [2, 4]), ((5, 5), [2, 4]), ((6, 5), [2, 3, 1])], ids=["width", "rows", "samples"]
)
def test_rows_that_do_not_fit_are_refused(shape, counts):
    with pytest.raises(DataError, match="field 'boxes': put_all\\(\\) got rows of shape"):
        RowsOut("boxes", Rows(5), 2).put_all(np.zeros(shape), np.array(counts))
