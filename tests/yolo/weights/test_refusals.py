"""The complete messages for files that are not weights."""

from pathlib import Path

import pytest

from flatout.errors import CheckpointError
from flatout.yolo.weights import read_weights
from tests.yolo.weights.pickle_bytes import call, checkpoint, text, torch_file

OS_SYSTEM = (
    "its pickle refers to os.system, which weights do not need; nothing was run. If the file is yours, load it "
    "with torch and save only its tensors and plain values. If not, it may have been made to run code when it is "
    "loaded: do not open it with torch.load. Get the weights from a source you trust, as safetensors if possible."
)
PAGE = "is a web page, not weights: the download returned HTML or XML. Download or copy it again."
POINTER = "is a Git LFS pointer, not the file itself. Fetch it with: git lfs pull"
CUT = "is truncated: the directory at the end of the zip is missing. Download or copy it again."
OLD = (
    "was saved by torch older than 1.6, in a format that can only be read by running it. "
    "If you trust it, load it with torch and save it again with torch.save."
)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (torch_file(checkpoint(call("os.system", text("true")))), OS_SYSTEM),
        (b"<html>404</html>", PAGE),
        (b"version https://git-lfs.github.com/spec/v1\n", POINTER),
        (torch_file(checkpoint())[:200], CUT),
        (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.", OLD),
        (b"", "is empty: the copy or download did not finish. Download or copy it again."),
    ],
    ids=["os.system", "web page", "pointer", "cut off", "old torch", "empty"],
)
def test_the_line_says_what_it_is_and_what_to_do(content: bytes, line: str, tmp_path: Path):
    path = tmp_path / "yolov7.pt"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_weights(path)
    assert str(caught.value) == f"{path}: {line}"
    assert caught.value.exit_code == 4


def test_a_missing_file_is_reported(tmp_path: Path):
    with pytest.raises(
        CheckpointError, match=r"yolov7.pt: no such file\. Give the path of a \.pt or \.safetensors file"
    ):
        read_weights(tmp_path / "yolov7.pt")


def test_a_name_that_no_file_can_have_is_reported():
    with pytest.raises(CheckpointError, match="not a valid file name"):
        read_weights("a\0b")
