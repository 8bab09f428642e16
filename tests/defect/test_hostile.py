"""Every invalid file of a data set is named in an error, and none is decoded to something that it is not."""

from pathlib import Path

import numpy as np
import pytest

from flatout.defect.check import check_data_set
from flatout.defect.data.items import read_canonical
from flatout.feed.source import DecodeError
from tests.defect.hostile_strips import bad_files, good_files, mutations


@pytest.mark.parametrize(("name", "content", "expected"), [pytest.param(*case, id=case[0]) for case in good_files()])
def test_every_kind_of_file_gives_its_planes(name, content, expected, tmp_path: Path):
    (tmp_path / "strip").write_bytes(content)
    found = read_canonical(tmp_path / "strip")
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize(("name", "content"), [pytest.param(*case, id=case[0]) for case in bad_files()])
def test_an_invalid_file_is_refused_and_named(name, content, tmp_path: Path):
    (tmp_path / "strip_17").write_bytes(content)
    with pytest.raises(DecodeError, match="strip_17") as caught:
        read_canonical(tmp_path / "strip_17")
    assert "index out of range" not in str(caught.value)


def test_the_check_captures_the_output_of_decoders(tmp_path: Path, capfd):
    folder = tmp_path / "train" / "good"
    folder.mkdir(parents=True)
    contents = [*(content for _, content in bad_files()), *mutations(40)]
    for number, content in enumerate(contents):
        (folder / f"{number:03}.tiff").write_bytes(content)
    report = check_data_set(str(tmp_path), "tiff")
    assert len({finding.where for finding in report.findings if finding.topic == "cannot be used"}) > 20
    assert capfd.readouterr().err == ""


def test_damaged_files_are_refused_or_give_valid_planes(tmp_path: Path):
    path = tmp_path / "strip"
    num_read = 0
    for content in mutations(200):
        path.write_bytes(content)
        try:
            planes_CHW = read_canonical(path)
        except DecodeError:
            continue
        num_read += 1
        assert planes_CHW.ndim == 3 and len(planes_CHW) == 3 and planes_CHW.dtype == np.float32
        assert planes_CHW.min() >= 0 and planes_CHW.max() <= 255.001
    assert num_read < 200
