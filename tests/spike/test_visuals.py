"""A page with a slider holds its frames, and needs nothing else."""

import base64
import json
import re

import cv2
import numpy as np
import pytest

from flatout.spike.visuals import MAX_PAGE_FRAMES, MAX_PAGE_PX, BeforeAfter, write_image, write_slider_page


@pytest.fixture
def pairs_of(tmp_path):
    def write(count, shape_hw=(8, 12)):
        pairs = []
        for number in range(count):
            paths = [tmp_path / f"{name}_{number}.png" for name in ("before", "after")]
            for path, level in zip(paths, (40, 200), strict=True):
                write_image(path, np.full((*shape_hw, 3), level + number % 20, np.uint8))
            pairs.append(BeforeAfter(f"{number:03}", *paths))
        return pairs

    return write


def frames_in(path):
    text = path.read_text()
    frames = json.loads(re.search(r"const frames = (\[.*\]);", text).group(1))
    return [(name, *map(decoded, links)) for name, *links in frames]


def decoded(link):
    content = base64.b64decode(link.removeprefix("data:image/jpeg;base64,"))
    return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)


def test_a_page_holds_every_frame_before_and_after(pairs_of, tmp_path):
    path = tmp_path / "page.html"
    assert write_slider_page(path, pairs_of(3), title="a <b> & c") == 3
    found = frames_in(path)
    assert [name for name, *_ in found] == ["000", "001", "002"]
    for number, (_, before, after) in enumerate(found):
        assert abs(before.mean() - 40 - number) < 2 and abs(after.mean() - 200 - number) < 2
    assert "a &lt;b&gt; &amp; c" in path.read_text()


def test_a_page_asks_no_other_machine(pairs_of, tmp_path):
    path = tmp_path / "page.html"
    write_slider_page(path, pairs_of(1), title="one")
    assert not re.search(r"https?:|src=|@import|url\(", path.read_text())


def test_long_sequences_and_large_frames_make_no_huge_page(pairs_of, tmp_path):
    path = tmp_path / "page.html"
    assert write_slider_page(path, pairs_of(2 * MAX_PAGE_FRAMES), title="long") == MAX_PAGE_FRAMES
    names = [name for name, *_ in frames_in(path)]
    assert (names[0], names[-1]) == ("000", f"{2 * MAX_PAGE_FRAMES - 1:03}") and len(set(names)) == MAX_PAGE_FRAMES
    assert f"{MAX_PAGE_FRAMES} of {2 * MAX_PAGE_FRAMES} frames" in path.read_text()
    write_slider_page(path, pairs_of(1, (20, 2 * MAX_PAGE_PX)), title="wide")
    ((_, before, _),) = frames_in(path)
    assert before.shape == (10, MAX_PAGE_PX, 3)


def test_a_name_cannot_end_the_script(pairs_of, tmp_path):
    (pair,) = pairs_of(1)
    path = tmp_path / "page.html"
    write_slider_page(path, [pair._replace(name="</script><b>")], title="name")
    assert path.read_text().count("</script>") == 1 and frames_in(path)[0][0] == "</script><b>"
