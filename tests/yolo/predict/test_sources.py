"""What --source means."""

import pytest

from flatout.errors import ConfigError, DataError
from flatout.yolo.predict.files import Files, Frame, Origin, Streams, Unreadable, count_frames, find_sources, frames_of
from tests.yolo.predict.small_sources import draw_pictures, draw_video


def frames(source: str) -> list[Frame | Unreadable]:
    found = find_sources(source)
    assert isinstance(found, Files)
    return [read() for read in frames_of(found)]


def test_a_folder_gives_pictures_then_videos_sorted_and_nothing_below_it(tmp_path):
    draw_pictures(tmp_path / "in", 3)
    draw_pictures(tmp_path / "in/deeper", 2)
    draw_video(tmp_path / "in/00.avi", 2)
    (tmp_path / "in/notes.md").write_text("no picture")
    (tmp_path / "in/.hidden.png").write_bytes(b"")
    found = find_sources(str(tmp_path / "in"))
    assert isinstance(found, Files)
    assert [path.rpartition("/")[2] for path in found.pictures] == ["00.png", "01.png", "02.png"]
    assert [path.rpartition("/")[2] for path in found.videos] == ["00.avi"]


def test_a_pattern_reaches_below_folders(tmp_path):
    draw_pictures(tmp_path / "in/a/b", 2)
    draw_pictures(tmp_path / "in", 1)
    found = find_sources(f"{tmp_path}/in/**/*.png")
    assert isinstance(found, Files) and len(found.pictures) == 3
    assert find_sources(f"{tmp_path}/in/*.png").pictures == [f"{tmp_path}/in/00.png"]


def test_a_list_of_files_is_read_in_its_order_and_beside_itself(tmp_path):
    first, second = draw_pictures(tmp_path / "in", 2)
    (tmp_path / "list.txt").write_text(f"{second}\n\n./in/00.png\nmissing.jpg\n")
    found = find_sources(str(tmp_path / "list.txt"))
    assert found == Files([str(second), str(tmp_path / "in/00.png"), "missing.jpg"], [])
    assert frames(str(tmp_path / "list.txt"))[2] == Unreadable("missing.jpg", "No such file or directory")
    assert str(first) == str(tmp_path / "in/00.png")


@pytest.mark.parametrize("text", ["0", "12", "rtsp://camera/1", "RTMP://x", "http://h/a.mjpg", "https://h/v.mp4"])
def test_numbers_and_addresses_are_streams(text):
    assert find_sources(text) == Streams([text], listed=False)


def test_a_list_with_a_stream_is_a_list_of_streams(tmp_path):
    (tmp_path / "streams.txt").write_text("rtsp://camera/1\n0\nfile.mp4\n")
    found = find_sources(str(tmp_path / "streams.txt"))
    assert found == Streams(["rtsp://camera/1", "0", "file.mp4"], listed=True)


@pytest.mark.parametrize(
    ("make", "source", "error", "words"),
    [
        (lambda folder: None, "nowhere", ConfigError, "--source nowhere: no such file or folder"),
        (lambda folder: (folder / "in").mkdir(), "in", DataError, "no pictures and no videos in this folder"),
        (lambda folder: None, "in/*.jpg", DataError, "no picture and no video has such a name"),
        (lambda folder: (folder / "a.gif").write_bytes(b"GIF"), "a.gif", DataError, "neither a picture nor a video"),
        (lambda folder: (folder / "a.txt").write_text("\n"), "a.txt", DataError, "an empty list"),
        (lambda folder: (folder / "a.txt").write_text("a.md"), "a.txt", DataError, "no line of it names a picture"),
    ],
)
def test_nothing_to_look_at_is_said_in_a_sentence(tmp_path, make, source, error, words):
    make(tmp_path)  # the working directory
    with pytest.raises(error, match=words.replace("*", r"\*")):
        find_sources(source)


def test_frames_of_a_video_are_numbered_from_one(tmp_path):
    draw_video(tmp_path / "v.mp4", 3, fps=12.0)
    found = [frame.origin for frame in frames("v.mp4") if isinstance(frame, Frame)]
    assert found == [Origin("v.mp4", "video", 0, 1, frame=n, num_frames=3, fps=12.0) for n in (1, 2, 3)]
    assert count_frames(Files(["a.png"], ["v.mp4"])) == 4


def test_what_cannot_be_decoded_says_why_and_stops_nothing(tmp_path):
    (good,) = draw_pictures(tmp_path / "in", 1)
    (tmp_path / "in/empty.jpg").write_bytes(b"")
    (tmp_path / "in/page.png").write_text("<html>404</html>")
    (tmp_path / "in/cut.png").write_bytes(good.read_bytes()[:50])
    (tmp_path / "in/broken.mp4").write_bytes(b"x" * 99)
    seen = {each.path.rpartition("/")[2]: each.reason for each in frames("in") if isinstance(each, Unreadable)}
    assert set(seen) == {"empty.jpg", "page.png", "cut.png", "broken.mp4"}
    assert seen["empty.jpg"] == "an empty file" and "not a usable image" in seen["page.png"]
    assert seen["broken.mp4"] == "not a video that can be decoded: damaged, or cut off"


def test_a_video_that_was_cut_off_is_seen_as_far_as_it_goes(tmp_path):
    whole = draw_video(tmp_path / "v.avi", 40).read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) // 2])
    seen = frames("cut.avi")
    assert isinstance(seen[0], Frame) and 1 < len(seen) < 40
    assert isinstance(seen[-1], Unreadable) and seen[-1].reason == f"ends after {len(seen) - 1} of 40 frames"


@pytest.mark.parametrize(
    ("path", "stem"),
    [("rtsp://camera.local:554/a/b?x=1", "camera.local_554_a_b_x_1"), ("0", "0"), ("http://", "stream")],
)
def test_a_stream_has_a_name_that_a_file_may_have(path, stem):
    assert Origin(path, "stream", 0, 1, frame=0).stem == stem
