"""pixels.c paints the bytes of OpenCV; where it cannot be compiled, OpenCV paints."""

import functools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import pytest

from flatout.yolo.augment import c_library, paint_compiled
from flatout.yolo.augment.c_library import NotCompiled, load_library
from flatout.yolo.augment.draw import Color, colors
from flatout.yolo.augment.paint import Classic, Fast, Painter, PreparedCanvas
from flatout.yolo.augment.paint_compiled import Compiled, fastest_painter, load_pixels, matches_classic

SIZE = 64


@pytest.fixture(scope="module")
def compiled(tmp_path_factory) -> Compiled:
    if not cv2.__version__.startswith("4."):
        pytest.skip("OpenCV 5 does not round coordinates, so its warp is used")
    try:
        return Compiled(load_pixels(tmp_path_factory.mktemp("compiled")))
    except NotCompiled as error:
        pytest.skip(f"pixels.c is not compiled here: {error}")


def random_canvas(
    rng: np.random.Generator, num_tiles: int, matrix_33: np.ndarray, out_wh: tuple[int, int]
) -> PreparedCanvas:
    sizes = rng.integers(1, 70, (num_tiles, 2)).tolist()
    tiles = [rng.integers(0, 256, (height, width, 3), np.uint8) for width, height in sizes]
    origin_K2 = rng.integers(-60, 120, (num_tiles, 2))
    return PreparedCanvas(tiles, origin_K2, (128, 112), [], matrix_33, out_wh, True, False)


def moved(rng: np.random.Generator, scale: float) -> np.ndarray:
    x, y = rng.uniform(-150, 60, 2)
    return np.array([[scale, 0, x], [0, scale, y], [0, 0, 1]])


@pytest.mark.parametrize("num_tiles", [0, 1, 4, 9])
def test_canvases_equal_opencvs_to_the_byte(compiled, num_tiles):
    rng, classic = np.random.default_rng(num_tiles), Classic()
    for number in range(40):
        scale = float(rng.choice([0.05, 0.5, 1, 1.3, 7]) * rng.choice([1, -1], p=[0.8, 0.2]))
        prepared = random_canvas(rng, num_tiles, moved(rng, scale), (SIZE, 48) if number % 2 else (50, SIZE))
        np.testing.assert_array_equal(compiled.paint(prepared)[..., :3], classic.paint(prepared), err_msg=f"{number}")


def test_a_canvas_that_is_far_away_is_grey(compiled):
    rng = np.random.default_rng(0)
    for x, y in ((1e9, 0), (-1e9, 0), (0, 1e9), (300, -1e6)):
        prepared = random_canvas(rng, 4, np.array([[1, 0, x], [0, 1, y], [0, 0, 1.0]]), (SIZE, SIZE))
        assert (compiled.paint(prepared)[..., :3] == 114).all()


def test_tiles_that_are_views_of_images_are_read_by_their_strides(compiled):
    rng = np.random.default_rng(0)
    prepared = random_canvas(rng, 1, np.eye(3), (SIZE, SIZE))
    whole = rng.integers(0, 256, (90, 90, 3), np.uint8)
    for part in (whole[3:60, 5:70], whole[::2, ::-1], np.broadcast_to(whole[:1, :1], (40, 40, 3))):
        of_part = prepared._replace(tiles=[part], origin_K2=np.array([[4, 7]]))
        np.testing.assert_array_equal(compiled.paint(of_part)[..., :3], Classic().paint(of_part))


@pytest.mark.parametrize("matrix", [[[0.9, 0.1, 3], [-0.1, 0.9, 2]], [[1, 0.2, 0], [0, 1, 0]]])
def test_rotated_and_sheared_canvases_are_left_to_opencv(compiled, matrix):
    prepared = random_canvas(np.random.default_rng(1), 4, np.array([*matrix, [0, 0, 1.0]]), (SIZE, SIZE))
    np.testing.assert_array_equal(compiled.paint(prepared)[..., :3], Classic().paint(prepared))


@pytest.mark.parametrize("gamma", [{}, {"gamma": np.exp(np.linspace(-1, 1, 123))}], ids=["scaled", "gamma"])
@pytest.mark.parametrize("width", [64, 192, 96, 50])
def test_colours_and_flips_equal_opencvs_to_the_byte(compiled, width, gamma):
    """Also for gains whose table is not a multiplication, for gamma, and for widths that are left to OpenCV."""
    rng = np.random.default_rng(width)
    gain_M3 = np.concatenate((np.ones((1, 3)), [[1.2, 3, 0], [2.5, 0.5, 1.999]], rng.uniform(0.3, 1.7, (120, 3))))
    image = rng.integers(0, 256, (40, width, 4), np.uint8)
    image[:8] = image[:8, :, :1]  # grey
    found, expected = np.empty((2, 3, 40, width), np.uint8)
    for number, change in enumerate(zip(*colors({"hsv": gain_M3, **gamma}), strict=True)):
        flip_2 = np.array([number & 1, number >> 1 & 1], bool)
        compiled.finish(image, Color(*change), flip_2, found)
        Classic().finish(image[..., :3], Color(*change), flip_2, expected)
        np.testing.assert_array_equal(found, expected, err_msg=str(gain_M3[number]))


def test_mixtures_are_truncated_products_of_doubles(compiled):
    values = np.arange(256, dtype=np.uint8)
    image, other = (np.ascontiguousarray(array) for array in np.broadcast_arrays(values[:, None], values))
    for share in (0.0, 1.0, 0.5, 0.4999999, 1 / 3):
        expected = Classic().mix(image, other, share)
        np.testing.assert_array_equal(compiled.mix(image.copy(), other, share), expected)


def test_painters_of_several_threads_do_not_disturb_each_other(compiled):
    rng = np.random.default_rng(5)
    canvases = [random_canvas(rng, 4, moved(rng, 0.8), (SIZE, SIZE)) for _ in range(8)]
    expected = [compiled.paint(prepared)[..., :3].copy() for prepared in canvases]

    def differ(prepared: PreparedCanvas, wanted: np.ndarray) -> int:
        painter = Compiled(compiled._pixels)
        return sum(not np.array_equal(painter.paint(prepared)[..., :3], wanted) for _ in range(200))

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(differ, canvases, expected)) == 0


def test_it_is_compiled_once(tmp_path, compiled, monkeypatch):
    load_pixels(tmp_path)
    monkeypatch.setattr(subprocess, "run", None)
    load_pixels(tmp_path)
    assert len(list(tmp_path.glob("*.so"))) == 1


def test_a_library_that_others_can_write_to_is_not_loaded(tmp_path, compiled):
    load_pixels(tmp_path)
    next(tmp_path.glob("*.so")).chmod(0o666)
    with pytest.raises(NotCompiled, match="is writable by other users"):
        load_pixels(tmp_path)


ANSWER = "int answer(void) { return 42; }\n" + "".join(
    f"int padding_{n}(int x) {{ return x * {n}; }}\n" for n in range(200)
)
ASK = """
import logging, sys
from pathlib import Path
from flatout.yolo.augment.c_library import load_library
logging.basicConfig(format="%(message)s")
print(load_library(Path(sys.argv[1]), Path(sys.argv[2])).answer())
"""


@pytest.fixture
def answer_c(tmp_path, compiled) -> Path:
    """A C file that compiles in no time."""
    (tmp_path / "answer.c").write_text(ANSWER)
    return tmp_path / "answer.c"


def ask(source: Path, folder: Path) -> subprocess.CompletedProcess:
    """Load it in a process of its own, since loading a truncated library kills the process."""
    command = [sys.executable, "-c", ASK, str(source), str(folder)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def truncated(library: Path) -> None:
    os.truncate(library, library.stat().st_size // 2)


def emptied(library: Path) -> None:
    os.truncate(library, 0)


def one_bit_flipped(library: Path) -> None:
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)


def without_its_digest(library: Path) -> None:
    library.with_suffix(".sha256").unlink()


def with_another_digest(library: Path) -> None:
    library.with_suffix(".sha256").write_bytes(b"\xff\xfe nonsense")


@pytest.mark.parametrize(
    "damage", [truncated, emptied, one_bit_flipped, without_its_digest, with_another_digest], ids=lambda f: f.__name__
)
def test_a_damaged_library_is_compiled_again(damage, tmp_path, answer_c):
    folder = tmp_path / "compiled"
    load_library(answer_c, folder)
    (library,) = folder.glob("*.so")
    whole = library.read_bytes()
    # A new file, because the old one stays mapped into this process.
    shutil.copy(library, tmp_path / "copy")
    (tmp_path / "copy").replace(library)
    damage(library)
    found = ask(answer_c, folder)
    assert (found.returncode, found.stdout) == (0, "42\n"), found.stderr
    # Without a digest it may be of an earlier version, which is no reason for a warning.
    expected = "" if damage is without_its_digest else f"{library} is damaged: compiling it again.\n"
    assert found.stderr == expected
    assert library.read_bytes() == whole
    assert "damaged" not in ask(answer_c, folder).stderr


def test_library_and_digest_are_synced_before_they_get_their_names(tmp_path, answer_c, monkeypatch):
    events = []
    monkeypatch.setattr(os, "fsync", lambda fd: events.append(("sync", Path(os.readlink(f"/proc/self/fd/{fd}")).name)))
    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda self, to: (events.append(("name", to.name)), rename(self, to))[1])
    load_library(answer_c, tmp_path / "compiled")
    (library,), (checksum,) = ((tmp_path / "compiled").glob(f"*{suffix}") for suffix in (".so", ".sha256"))
    for name in (library.name, checksum.name):
        assert events.index(("sync", name)) < events.index(("name", name))
    assert events[-1] == ("sync", "compiled")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_no_library_is_kept_below_a_folder_that_others_can_write_to(
    mode, depth, tmp_path, answer_c, monkeypatch, caplog
):
    folder = tmp_path / "home" / "cache" / "compiled"
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    folder.mkdir(parents=True, mode=0o700)
    weak = (folder, *folder.parents)[depth]
    weak.chmod(mode)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert load_library(answer_c, folder).answer() == 42
    assert not list(folder.iterdir())
    instead = tmp_path / "temporary" / f"flatout-compiled-{os.geteuid()}"
    assert len(list(instead.glob("*.so"))) == 1 and instead.stat().st_mode & 0o777 == 0o700
    expected = f"Keeping compiled code in {instead}: {weak} is writable by other users (to fix it: chmod go-w)."
    assert [record.getMessage() for record in caplog.records] == [expected], "logged once"
    # If the other folder is no better, there is no library, and the slower implementation is used.
    instead.chmod(0o777)
    with pytest.raises(
        NotCompiled, match=r"home.* is writable by other users.*; .*temporary.* is writable by other users"
    ):
        load_library(answer_c, folder)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_new_folders_above_are_private_whatever_the_umask(tmp_path, answer_c, caplog):
    before = os.umask(0o002)
    try:
        load_library(answer_c, tmp_path / "cache" / "flatout" / "compiled")
    finally:
        os.umask(before)
    assert len(list((tmp_path / "cache").rglob("*.so"))) == 1 and not warnings_in(caplog)


def test_a_sticky_folder_above_is_no_danger(tmp_path, answer_c, caplog):
    folder = tmp_path / "sticky" / "compiled"
    folder.mkdir(parents=True, mode=0o700)
    folder.parent.chmod(0o1777)
    load_library(answer_c, folder)
    assert len(list(folder.glob("*.so"))) == 1 and not warnings_in(caplog)


@pytest.mark.parametrize(
    ("compiler", "text"),
    [
        (None, "no C compiler (cc) found"),
        ("#!/bin/sh\necho 'pixels.c: error: no' >&2; exit 1", "error: no"),
        ("#!/bin/sh\nwhile [ $# -gt 1 ]; do [ $1 = -o ] && echo no library > $2; shift; done", "pixels-"),
    ],
)
def test_without_compiled_code_opencv_paints_with_one_warning(tmp_path, monkeypatch, caplog, compiler, text):
    path = tmp_path / "cc"
    if compiler is not None:
        path.write_text(compiler)
        path.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: None if compiler is None else str(path))
    monkeypatch.setattr(c_library, "store_folder", lambda: tmp_path / "cache" / "stores")
    for cached in (paint_compiled.pixels_library, paint_compiled._equal_warps):
        monkeypatch.setattr(paint_compiled, cached.__name__, functools.cache(cached.__wrapped__))
    with caplog.at_level(logging.WARNING):
        assert type(fastest_painter()) is type(fastest_painter()) is Fast
    assert caplog.text.count("OpenCV paints the samples") == 1 and text in caplog.text


def test_a_painter_with_different_bytes_is_detected():
    class Wrong(Fast):
        def recolor(self, image: np.ndarray, color: Color) -> np.ndarray:
            return super().recolor(image, color) // 2 * 2

    right: Painter = Fast()
    assert matches_classic(right)
    assert not matches_classic(Wrong())


def test_the_source_is_part_of_the_package():
    assert Path(paint_compiled.__file__).with_name("pixels.c").is_file()
    assert os.access(paint_compiled.SOURCE, os.R_OK)
