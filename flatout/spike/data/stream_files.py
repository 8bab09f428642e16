"""Opens spike streams: `.dat` files, and arrays of spikes in `.npz`, `.npy` and `.h5` files.

    .dat          size, content, geometry --stream_layout--> Layout --memory map--> bytes [T, F]
    .npz .npy .h5 array [T, H, W] of 0 and 1, in image orientation  --pack--------> bytes [T, F]

So everything after this file, from crops to stores and GPU memory, sees the same packed bytes. Nothing in a file is
executed: arrays of Python objects are refused.

Dimension key:  T spike frames   H W spike frame   F bytes of a spike frame
"""

import logging
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, SupportsIndex

import numpy as np

from flatout.errors import DataError, MissingFileError, ResourceError
from flatout.spike.data.decode import Box, content_of, decode, map_stream, pack
from flatout.spike.data.geometry import geometry_beside, geometry_name, parse_geometry
from flatout.spike.data.stream_layout import (
    DEFAULT_HW,
    Format,
    Layout,
    StreamError,
    StreamSettings,
    decide_layout,
    fitting_geometries,
)

logger = logging.getLogger(__name__)

ARRAY_EXTS = (".npz", ".npy", ".h5", ".hdf5")
STREAM_EXTS = (".dat", *ARRAY_EXTS)
"""Endings of spike streams; of equal names, the first one is used."""
ARRAY_NAMES = ("spk", "spikes", "spike", "raw_spike")
"""Names of the array of spikes in a file that has several arrays of three dimensions."""


class SpikeStream:
    """The spikes of one file, unpacked as they are asked for: `stream[100:140]` is uint8 [40, H, W] of 0 and 1.

    `stream[100]` is a single spike frame [H, W].
    """

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path, self.layout = path, layout
        self._stream_TF = stream_bytes(path, layout)

    def __len__(self) -> int:
        return self.layout.frames

    @property
    def shape(self) -> tuple[int, int, int]:
        """Spike frames, height, width."""
        return self.layout.frames, self.layout.height, self.layout.width

    def __getitem__(self, frames: slice | SupportsIndex) -> np.ndarray:
        if not isinstance(frames, slice):
            number = range(len(self))[frames]
            return np.asarray(self[number : number + 1][0])
        return decode(self._stream_TF[frames], self.layout, Box(0, 0, self.layout.height, self.layout.width))

    def __repr__(self) -> str:
        rows = "bottom-up" if self.layout.flipud else "top-down"
        size = geometry_name((self.layout.height, self.layout.width))
        return f"{self.path}: {self.layout.frames} spike frames of {size}, {self.layout.format}, rows {rows}"


def open_stream(
    path: str | Path, *, geometry: str = "", stored_as: Format = "auto", flipud: bool | None = None
) -> SpikeStream:
    """Open a stream of any format.

    `geometry` like `400x250` is needed for `.dat` files without a sidecar, unless their frames are 640 x 360 pixels.
    `flipud`: whether rows are stored bottom-up; None: they are in packed `.dat` files. StreamError lists the known
    geometries that fit if this one does not.
    """
    path = Path(path)
    if not path.is_file():
        problem = "is a folder; give one stream" if path.is_dir() else "does not exist; check the path"
        raise MissingFileError(f"{path} {problem}.")
    if path.suffix.lower() not in STREAM_EXTS:
        raise DataError(f"{path}: not a spike stream by its name. Endings of streams: {', '.join(STREAM_EXTS)}.")
    height, width = parse_geometry(geometry) if geometry else (None, None)
    settings = StreamSettings(format=stored_as, height=height, width=width, flipud=flipud)
    if path.suffix.lower() in ARRAY_EXTS:
        return SpikeStream(path, array_layout(path, settings))
    sidecar_hw = geometry_beside(path)
    size = path.stat().st_size
    try:
        layout = decide_layout(size, content_of(path), settings, sidecar_hw, where=str(path))
    except StreamError as error:
        raise error.advising(_geometry_advice(error)) from None
    if not geometry and sidecar_hw is None:
        _warn_of_other_geometries(path.parent, size, layout)
    return SpikeStream(path, layout)


def _geometry_advice(error: StreamError) -> str:
    known = " or ".join(f"--geometry {geometry_name((height, width))}" for height, width, _ in error.hints)
    return (
        f"Give {known or '--geometry WIDTHxHEIGHT'}, or write spike_h and spike_w into a config.yaml beside the stream."
    )


@lru_cache(maxsize=64)  # not for each of the thousands of streams of a folder
def _warn_of_other_geometries(folder: Path, size: int, layout: Layout) -> None:
    """Warn, once per folder and size of file, if 640 x 360 was assumed but other known geometries fit too."""
    others = [
        f"{geometry_name((height, width))} ({frames} frames)"
        for height, width, frames in fitting_geometries(size)
        if (height, width) != DEFAULT_HW
    ]
    if layout.format == "packed" and others:
        logger.warning(
            "%s: read as %s, because no geometry is given; %s would fit too. If images look torn, give --geometry.",
            folder, geometry_name((layout.height, layout.width)), ", ".join(others),
        )  # fmt: skip


def stream_bytes(path: str | Path, layout: Layout) -> np.ndarray:
    """The bytes of a stream as uint8 [T, F]: memory-mapped for a `.dat` file, packed for an array of spikes.

    StreamError if the file no longer fits the layout, or if an array has values other than 0 and 1.
    """
    if Path(path).suffix.lower() not in ARRAY_EXTS:
        return map_stream(path, layout)
    with _opened(Path(path)) as (_, read):
        spikes_THW = read()
    if spikes_THW.shape != (layout.frames, layout.height, layout.width):
        raise StreamError(
            f"{path} has shape {spikes_THW.shape} where {(layout.frames, layout.height, layout.width)} was found when "
            "the data set was opened. The file has changed since: run the command again.",
        )
    is_spike = spikes_THW != 0
    if spikes_THW.dtype != bool and not np.array_equal(spikes_THW, is_spike):
        raise StreamError(
            f"{path} has values other than 0 and 1, so it is not a stream of spikes. Voxels and intervals cannot be "
            "read as spikes.",
            kind="not_binary",
        )
    # Rows as the array has them: `decode` turns them around if the layout says that they are bottom-up.
    if layout.format != "packed":
        return np.asarray(is_spike, np.uint8).reshape(layout.frames, -1)
    return pack(is_spike, flipud=False).reshape(layout.frames, layout.frame_bytes)


def array_layout(path: Path, settings: StreamSettings) -> Layout:
    """The layout of an array of spikes once it is packed; only its header is read. StreamError if it does not fit."""
    with _opened(path) as (shape, _):
        num_frames, height, width = shape
    configured = (settings.height or height, settings.width or width, settings.frames or num_frames)
    if configured != (height, width, num_frames):
        raise StreamError(
            f"{path} holds {num_frames} spike frames of {geometry_name((height, width))}, but the configuration says "
            f"{configured[2]} of {geometry_name((configured[0], configured[1]))}. This file states its size: omit "
            "--geometry, or SPIKE_H, SPIKE_W and SPIKE_T.",
        )
    if num_frames == 0:
        raise StreamError(f"{path} holds no spike frames. Copy or create it again.", kind="empty")
    # One byte per pixel where pixels do not fill whole bytes. Rows of arrays are in image orientation.
    kind: Literal["packed", "uint8"] = "uint8" if height * width % 8 else "packed"
    return Layout(kind, num_frames, height, width, bool(settings.flipud))


@contextmanager
def _opened(path: Path) -> Iterator[tuple[tuple[int, ...], Callable[[], np.ndarray]]]:
    """The shape of the array of spikes in a file, and a function that reads it."""
    try:
        with ExitStack() as stack:
            values: Mapping[str, Any]
            if path.suffix.lower() in (".h5", ".hdf5"):
                values = stack.enter_context(_open_h5(path))
                shapes = {name: item.shape for name, item in values.items()}
            elif path.suffix.lower() == ".npy":
                values = {"": np.load(path, mmap_mode="r", allow_pickle=False)}
                shapes = {"": values[""].shape}
            else:
                values = stack.enter_context(np.load(path, allow_pickle=False))
                shapes = _shapes_in(path)
            name = _name_in(path, shapes)
            yield shapes[name], lambda: np.asarray(values[name][()])
    except StreamError:
        raise
    # The last two: one kind of file under the ending of the other.
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
        raise StreamError(f"{path} is not a file of arrays: {error}. Copy or create it again.") from None


def _name_in(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The name of the array of spikes; StreamError if it is not certain."""
    streams = [name for name, shape in shapes.items() if len(shape) == 3]
    known = [name for each in ARRAY_NAMES for name in streams if name.rpartition("/")[2] == each]
    if len(streams) != 1 and not known:
        listed = ", ".join(f"{name or 'array'} {shape}" for name, shape in shapes.items()) or "none"
        raise StreamError(
            f"{path} needs one array of spikes [frames, height, width], alone or under the name {ARRAY_NAMES[0]}. Its "
            f"arrays: {listed}."
        )
    return (known or streams)[0]


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of an .npz file, from their headers."""
    shapes = {}
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            with archive.open(name) as member:
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shapes[name.removesuffix(".npy")] = read(member)[0]
    return shapes


@contextmanager
def _open_h5(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import h5py
    except ImportError:
        raise ResourceError(f"{path}: h5py is needed to read .h5 files. Install it with: pip install h5py") from None
    try:
        # Without locks, which network file systems refuse; files are only read.
        file = h5py.File(path, "r", locking=False)
    except OSError as error:
        raise StreamError(f"{path} is not an HDF5 file: {error}. Copy or create it again.") from None
    with file:
        found: dict[str, Any] = {}
        file.visititems(lambda name, item: found.update({name: item}) if isinstance(item, h5py.Dataset) else None)
        yield found
