"""What --source means."""

import os

import pytest

from flatout.errors import ConfigError, DataError
from flatout.yolo.predict.files import Files, Frame, Origin, Streams, Unreadable, count_frames, find_sources, frames_of
from tests.yolo.predict.small_sources import write_images, write_video


def frames(source: str) -> list[Frame | Unreadable]:
    found = find_sources(source)
    assert isinstance(found, Files)
    return [read() for read in frames_of(found)]


def test_a_folder_gives_images_then_videos_sorted_and_nothing_of_its_subfolders(tmp_path):
    write_images(tmp_path / "in", 3)
    write_images(tmp_path / "in/deeper", 2)
    write_video(tmp_path / "in/00.avi", 2)
    (tmp_path / "in/notes.md").write_text("no image")
    (tmp_path / "in/.hidden.png").write_bytes(b"")
    found = find_sources(str(tmp_path / "in"))
    assert isinstance(found, Files)
    assert [path.rpartition("/")[2] for path in found.images] == ["00.png", "01.png", "02.png"]
    assert [path.rpartition("/")[2] for path in found.videos] == ["00.avi"]


@pytest.mark.parametrize("pattern", ["in", "in/*"])
def test_a_link_that_leads_nowhere_is_reported_and_folders_and_pipes_are_no_images(tmp_path, pattern):
    write_images(tmp_path / "in", 1)
    (tmp_path / "in/gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "in/folder.jpg").mkdir()
    os.mkfifo(tmp_path / "in/pipe.jpg")
    image, gone = frames(f"{tmp_path}/{pattern}")
    assert isinstance(image, Frame)
    assert gone == Unreadable(f"{tmp_path}/in/gone.jpg", "No such file or directory")


def test_a_pattern_reaches_subfolders(tmp_path):
    write_images(tmp_path / "in/a/b", 2)
    write_images(tmp_path / "in", 1)
    found = find_sources(f"{tmp_path}/in/**/*.png")
    assert isinstance(found, Files) and len(found.images) == 3
    assert find_sources(f"{tmp_path}/in/*.png").images == [f"{tmp_path}/in/00.png"]


def test_a_list_of_files_is_read_in_order_with_paths_relative_to_it(tmp_path):
    first, second = write_images(tmp_path / "in", 2)
    (tmp_path / "list.txt").write_text(f"{second}\n\n./in/00.png\nmissing.jpg\nmissing.mp4\n")
    found = find_sources(str(tmp_path / "list.txt"))
    assert found == Files([str(second), str(tmp_path / "in/00.png"), "missing.jpg"], ["missing.mp4"])
    missing = frames(str(tmp_path / "list.txt"))[2:]
    assert missing == [Unreadable(f"missing.{each}", "No such file or directory") for each in ("jpg", "mp4")]
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
        (lambda folder: (folder / "in").mkdir(), "in", DataError, "no images and no videos in this folder"),
        (lambda folder: None, "in/*.jpg", DataError, "no image and no video matches"),
        (lambda folder: (folder / "a.gif").write_bytes(b"GIF"), "a.gif", DataError, "neither an image nor a video"),
        (lambda folder: (folder / "a.txt").write_text("\n"), "a.txt", DataError, "the list is empty"),
        (lambda folder: (folder / "a.txt").write_text("a.md"), "a.txt", DataError, "no line names an image or a video"),
    ],
)
def test_a_source_without_images_and_videos_is_refused(tmp_path, make, source, error, words):
    make(tmp_path)  # the working directory
    with pytest.raises(error, match=words.replace("*", r"\*")):
        find_sources(source)


def test_frames_of_a_video_are_numbered_from_one(tmp_path):
    write_video(tmp_path / "v.mp4", 3, fps=12.0)
    found = [frame.origin for frame in frames("v.mp4") if isinstance(frame, Frame)]
    assert found == [Origin("v.mp4", "video", 0, 1, frame=n, num_frames=3, fps=12.0) for n in (1, 2, 3)]
    assert count_frames(Files(["a.png"], ["v.mp4"])) == 4


def test_files_that_cannot_be_decoded_say_why_and_do_not_end_the_iteration(tmp_path):
    (good,) = write_images(tmp_path / "in", 1)
    (tmp_path / "in/empty.jpg").write_bytes(b"")
    (tmp_path / "in/page.png").write_text("<html>404</html>")
    (tmp_path / "in/cut.png").write_bytes(good.read_bytes()[:50])
    (tmp_path / "in/broken.mp4").write_bytes(b"x" * 99)
    seen = {each.path.rpartition("/")[2]: each.reason for each in frames("in") if isinstance(each, Unreadable)}
    assert set(seen) == {"empty.jpg", "page.png", "cut.png", "broken.mp4"}
    assert seen["empty.jpg"] == "an empty file" and "not a usable image" in seen["page.png"]
    assert seen["broken.mp4"] == "cannot be decoded: damaged, cut off, or not a video"


def test_a_video_that_was_cut_off_is_read_as_far_as_it_goes(tmp_path):
    whole = write_video(tmp_path / "v.avi", 40).read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) // 2])
    seen = frames("cut.avi")
    assert isinstance(seen[0], Frame) and 1 < len(seen) < 40
    assert isinstance(seen[-1], Unreadable) and seen[-1].reason == f"ends after {len(seen) - 1} of 40 frames"


@pytest.mark.parametrize(
    ("path", "stem"),
    [("rtsp://camera.local:554/a/b?x=1", "camera.local_554_a_b_x_1"), ("0", "0"), ("http://", "stream")],
)
def test_the_stem_of_a_stream_is_a_valid_file_name(path, stem):
    assert Origin(path, "stream", 0, 1, frame=0).stem == stem
