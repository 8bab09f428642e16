"""Heat maps of many images: read ahead in threads, mapped in batches of one size, finished in threads, in their order.

    files --threads--> planes --batches--> HostMapMaker: aligned and compared by OpenCV in the threads, one image each
                                           DeviceMapMaker: aligned, mapped and compared on the device, without a wait
          --threads--> components, heat map, whatever the caller makes of it --> results, in the order of the files

The patches of all images of a batch are a batch of the network; every pixel of a heat map is from exactly one of them.

Dimension key:  B images   C planes   H W image   T tiles   P patch side   N tiles at a time
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.clock import machine
from flatout.defect.compare.align import AlignConfig
from flatout.defect.compare.align_torch import align_batch
from flatout.defect.compare.classical import (
    Differences,
    drawn_by,
    find_differences,
    heat_of_differences,
    refined,
)
from flatout.defect.compare.classical_torch import find_differences_batch
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import MAX_GREY
from flatout.defect.data.pairs import three_planes
from flatout.defect.evaluate.network import PIXEL_BYTES, finest_channels, for_prediction, input_channels
from flatout.defect.model import GRID, DefectNet
from flatout.defect.patches import GridOver
from flatout.errors import ConfigError, DataError
from flatout.feed import DecodeError

logger = logging.getLogger(__name__)

MakeMap = Callable[[np.ndarray], np.ndarray]
"""Planes [C, H, W] -> heat map [H, W]."""
ReadImage = Callable[[Path], np.ndarray]
"""Path -> planes, 2 or 3 of them: target, ref1, and ref2 unless it repeats ref1."""
Result = TypeVar("Result")


class Mapped:
    """The heat map of an image, and the planes that it is of. The caller owns the arrays."""

    def __init__(self, heat_HW: np.ndarray, planes: Callable[[], np.ndarray]) -> None:
        self.heat_HW = heat_HW
        """float32, in 0..1."""
        self._planes = planes

    @cached_property
    def planes_CHW(self) -> np.ndarray:
        """Aligned planes in 0..255, float32; if need be copied from the device, which is then waited for."""
        return self._planes()


Finish = Callable[[], Mapped]
"""What is left to do for one image, in any thread."""
Wait = Callable[[], Sequence[Finish]]
"""Waits for a batch."""


class MapMaker(Protocol):
    """A way from planes to heat maps."""

    def batch_size(self, shape_hw: tuple[int, int]) -> int:
        """Images of one size that are mapped together."""

    def prepare(self, planes_CHW: np.ndarray) -> np.ndarray:
        """What can be done image by image before; called in several threads."""

    def run(self, planes: Sequence[np.ndarray]) -> Wait:
        """Map prepared planes of one shape and type; called in one thread. A device is not waited for."""


# The stream of images

AHEAD_BYTES = 1 << 29
"""Planes that are read ahead, and planes of images that are not finished."""
IN_FLIGHT = 2
"""Batches that a device has to do while the host finishes others."""


def map_images(
    images: Iterable[EvaluationImage],
    read: ReadImage,
    maker: MapMaker,
    finish: Callable[[EvaluationImage, Mapped], Result],
    *,
    threads: int | None = None,
) -> Iterator[Result]:
    """What `finish` makes of every image, in their order.

    `read` and `finish` are called in threads, as many as there are cores; 0: in the thread of the caller, for a `read`
    that is not thread-safe. Raises DataError for an image that cannot be read, and ConfigError for one that the maker
    cannot map, after the results of those before it.
    """
    import cv2

    num = machine.cores().usable if threads is None else threads
    with ExitStack() as stack:
        if num:
            # Threads of OpenCV's own, beside these, would only wait for each other.
            stack.callback(cv2.setNumThreads, cv2.getNumThreads())
            cv2.setNumThreads(1)
        readers, finishers = (stack.enter_context(_executor(num)) for _ in range(2))
        stack.callback(readers.shutdown, wait=False, cancel_futures=True)
        stack.callback(finishers.shutdown, wait=False, cancel_futures=True)
        stream = _ReadAhead(images, lambda image: maker.prepare(read(image.path)), readers, maker, num)
        running: deque[tuple[list[EvaluationImage], list[np.ndarray], Wait]] = deque()
        finishing: deque[tuple[Future[Result], int]] = deque()

        def finish_oldest() -> None:
            group, planes, wait = running.popleft()
            for image, planes_CHW, each in zip(group, planes, wait(), strict=True):
                future = finishers.submit(lambda image, each: finish(image, each()), image, each)
                finishing.append((future, planes_CHW.nbytes))

        def is_too_much() -> bool:
            held = sum(planes_CHW.nbytes for _, planes, _ in running for planes_CHW in planes)
            return held + sum(nbytes for _, nbytes in finishing) > AHEAD_BYTES

        unfit: ConfigError | None = None
        for group, planes in _batches(stream, maker):
            try:
                running.append((group, planes, maker.run(planes)))
            except ConfigError as error:
                unfit = ConfigError(f"{group[0].path}: {error}")
                break
            while running and (len(running) > IN_FLIGHT or is_too_much()):
                finish_oldest()
            while finishing and (finishing[0][0].done() or len(finishing) > num + len(group) or is_too_much()):
                yield finishing.popleft()[0].result()
        while running:
            finish_oldest()
        while finishing:
            yield finishing.popleft()[0].result()
        if unfit is not None:
            raise unfit
        if stream.error is not None:
            raise DataError(str(stream.error)) from None


def _batches(stream: "_ReadAhead", maker: MapMaker) -> Iterator[tuple[list[EvaluationImage], list[np.ndarray]]]:
    """Consecutive images of one shape and type, as many as are mapped together."""
    group: list[EvaluationImage] = []
    planes: list[np.ndarray] = []
    for image, planes_CHW in stream:
        if planes and (planes_CHW.shape, planes_CHW.dtype) != (planes[0].shape, planes[0].dtype):
            yield group, planes
            group, planes = [], []
        group.append(image)
        planes.append(planes_CHW)
        if len(planes) == maker.batch_size(_size(planes_CHW)):
            yield group, planes
            group, planes = [], []
    if planes:
        yield group, planes


@dataclass(eq=False, repr=False)
class _ReadAhead:
    """Images with their planes, in order. Ends before the first that cannot be read; `error` then says why."""

    images: Iterable[EvaluationImage]
    read: Callable[[EvaluationImage], np.ndarray]
    executor: Executor
    maker: MapMaker
    threads: int
    error: Exception | None = None

    def __iter__(self) -> Iterator[tuple[EvaluationImage, np.ndarray]]:
        images = iter(self.images)
        pending: deque[tuple[EvaluationImage, Future[np.ndarray]]] = deque()
        # One at first: images may be so large that two of them do not fit into memory.
        most = 1
        while True:
            while len(pending) < most and (image := next(images, None)) is not None:
                pending.append((image, self.executor.submit(self.read, image)))
            if not pending:
                return
            image, future = pending.popleft()
            try:
                planes_CHW = future.result()
            except (OSError, DecodeError, DataError) as error:
                self.error = error
                return
            yield image, planes_CHW
            wanted = self.threads + 2 * self.maker.batch_size(_size(planes_CHW)) if self.threads else 1
            most = max(1, min(wanted, AHEAD_BYTES // planes_CHW.nbytes))


class _Now(Executor):
    """Runs what is submitted in the thread of the caller."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # broad, because it is raised again by `result`
            future.set_exception(error)
        return future


def _executor(threads: int) -> Executor:
    return ThreadPoolExecutor(threads, thread_name_prefix="defect") if threads else _Now()


def _size(planes_CHW: np.ndarray) -> tuple[int, int]:
    return planes_CHW.shape[1], planes_CHW.shape[2]


# Ways from planes to heat maps


def choose_map_maker(
    mapper: "HeatMapper | None", device: torch.device, *, align: AlignConfig | None, refines: bool
) -> MapMaker:
    """DeviceMapMaker on a GPU, HostMapMaker on the CPU, where OpenCV is faster."""
    if device.type == "cpu":
        return HostMapMaker(mapper, align=align, refines=refines)
    return DeviceMapMaker(mapper, device, align=align, refines=refines)


class HostMapMaker:
    """One image at a time; aligned and compared by OpenCV, in threads."""

    def __init__(self, make_map: MakeMap | None, *, align: AlignConfig | None = None, refines: bool = False) -> None:
        """`make_map`: None: the classical method. `align`: None: references are used as they are.

        `refines`: heat maps are drawn by the difference.
        """
        self._make_map, self._align, self._refines = make_map, align, refines

    def batch_size(self, shape_hw: tuple[int, int]) -> int:
        return 1

    def prepare(self, planes_CHW: np.ndarray) -> np.ndarray:
        return three_planes(planes_CHW, self._align)

    def run(self, planes: Sequence[np.ndarray]) -> Wait:
        heats = [None if self._make_map is None else self._make_map(each_CHW) for each_CHW in planes]
        finishes = [partial(self._finish, *both) for both in zip(planes, heats, strict=True)]
        return lambda: finishes

    def _finish(self, planes_CHW: np.ndarray, heat_HW: np.ndarray | None) -> Mapped:
        if heat_HW is None:
            heat_HW = heat_of_differences(find_differences(planes_CHW))
        elif self._refines:
            heat_HW = refined(heat_HW, planes_CHW)
        return Mapped(heat_HW, lambda: planes_CHW)


MAX_GRAPHS = 4
"""Sizes of images up to which their batches become graphs: each keeps memory of its own."""


class DeviceMapMaker:
    """Batches; aligned and compared on the device as well, so that the host only reads, and labels components.

    Heat maps differ from those of HostMapMaker at edges, where differences are close to their bound, because
    `align_torch` interpolates at unrounded positions.
    """

    def __init__(
        self,
        mapper: "HeatMapper | None",
        device: torch.device,
        *,
        align: AlignConfig | None = None,
        refines: bool = False,
        graphs: bool = True,
    ) -> None:
        """As for HostMapMaker. `graphs`: from the second full batch on, the device gets its work as one CUDA graph."""
        self._mapper, self._device, self._align, self._refines = mapper, device, align, refines
        self._graphs_wanted = graphs and device.type == "cuda"
        self._graphs: dict[tuple[torch.Size, torch.dtype], _Graph | None] = {}
        """By shape and type; None: seen once."""
        self._tilings_of_graphs: list[_Tiling | None] = []
        """What graphs read at its address, so that it must not be released before them."""

    def batch_size(self, shape_hw: tuple[int, int]) -> int:
        return max(1, _pixels_at_once(self._device) // (shape_hw[0] * shape_hw[1]))

    def prepare(self, planes_CHW: np.ndarray) -> np.ndarray:
        return planes_CHW if planes_CHW.dtype == np.uint8 else planes_CHW.astype(np.float32, copy=False)

    def run(self, planes: Sequence[np.ndarray]) -> Wait:
        is_gpu = self._device.type == "cuda"
        # Events, graphs and Triton kernels are those of the current GPU.
        with torch.inference_mode(), torch.cuda.device(self._device) if is_gpu else nullcontext():
            dtype = torch.uint8 if planes[0].dtype == np.uint8 else torch.float32
            stored = torch.empty((len(planes), *planes[0].shape), dtype=dtype, pin_memory=is_gpu)
            np.stack(planes, out=stored.numpy())
            found = self._on_device(stored)
            # Copied on the device, because a graph overwrites its results.
            references = None if found.references_BRHW is None else _OnDevice(found.references_BRHW.clone())
            copies = {name: _to_host(tensor) for name, tensor in found.maps.items()}
            done = torch.cuda.Event() if is_gpu else None
            if done is not None:
                done.record()

        def wait() -> Sequence[Finish]:
            if done is not None:
                done.synchronize()
            arrays = {name: tensor.numpy() for name, tensor in copies.items()}
            maps = [{name: array[number] for name, array in arrays.items()} for number in range(len(planes))]
            return [
                partial(self._finish, planes_CHW, maps[number], references, number)
                for number, planes_CHW in enumerate(planes)
            ]

        return wait

    def _on_device(self, stored: Tensor) -> "_Found":
        """The results of a batch, by a graph if there is one for its shape."""
        key = stored.shape, stored.dtype
        graph = self._graphs.get(key)
        if graph is None and self._graphs_wanted and key in self._graphs and len(self._graphs) <= MAX_GRAPHS:
            if self._mapper is not None:
                self._tilings_of_graphs.append(self._mapper.tiling((stored.shape[2], stored.shape[3])))
            try:
                graph = self._graphs[key] = _Graph(self._map, stored.to(self._device))
            except RuntimeError as error:
                self._graphs_wanted = False
                logger.warning(
                    "The work for a batch cannot be captured as a CUDA graph (%s): the host launches every kernel, "
                    "which is slower.", str(error).splitlines()[0],
                )  # fmt: skip
        if graph is not None:
            return graph(stored)
        if len(stored) == self.batch_size((stored.shape[2], stored.shape[3])):
            self._graphs.setdefault(key, None)
        return self._map(stored.to(self._device, non_blocking=True))

    def _map(self, stored_BCHW: Tensor) -> "_Found":
        """Align, map and compare planes on the device."""
        planes_BCHW = stored_BCHW.float()
        if self._align is not None:
            target_BHW = planes_BCHW[:, 0]
            aligned = [
                align_batch(target_BHW, planes_BCHW[:, number], self._align).reference_BHW
                for number in range(1, planes_BCHW.shape[1])
            ]
            planes_BCHW = torch.stack((target_BHW, *aligned), 1)
        maps: dict[str, Tensor] = {}
        if self._mapper is not None:
            three = [0, 1, planes_BCHW.shape[1] - 1]
            maps["heat"] = self._mapper.probability(torch.stack([planes_BCHW[:, number] for number in three], 1))
        if self._mapper is None or self._refines:
            found = find_differences_batch(planes_BCHW)
            maps["drawn"] = found.drawn_BHW
            if self._mapper is None:
                maps |= {"there": found.there_BHW, "missing": found.missing_BHW, "contrast": found.contrast_B}
        return _Found(maps, None if self._align is None else planes_BCHW[:, 1:])

    def _finish(
        self, planes_CHW: np.ndarray, maps: dict[str, np.ndarray], references: "_OnDevice | None", number: int
    ) -> Mapped:
        if self._mapper is None:
            differences = Differences(maps["drawn"], maps["there"], maps["missing"], float(maps["contrast"]))
            heat_HW = heat_of_differences(differences)
        elif self._refines:
            heat_HW = drawn_by(maps["drawn"], maps["heat"])
        else:
            heat_HW = maps["heat"].copy()
        if references is None:
            return Mapped(heat_HW, lambda: three_planes(planes_CHW))
        return Mapped(heat_HW, lambda: _with_references(planes_CHW, references.on_host[number]))


class _Found(NamedTuple):
    """The results of a batch, on the device."""

    maps: dict[str, Tensor]
    """What the host needs to finish it."""
    references_BRHW: Tensor | None
    """Aligned references; None: they were used as they are."""


class _Graph:
    """The work for batches of one shape as a CUDA graph; its results are overwritten by the next call."""

    def __init__(self, run: Callable[[Tensor], _Found], stored_BCHW: Tensor) -> None:
        self._input, self._graph = stored_BCHW, torch.cuda.CUDAGraph()
        # Other threads only read files and label components; this way they could not break the capture either.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._found = run(stored_BCHW)

    def __call__(self, stored: Tensor) -> _Found:
        self._input.copy_(stored, non_blocking=True)
        self._graph.replay()
        return self._found


class _OnDevice:
    """A tensor that is copied to the host once, when it is first asked for."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._lock = tensor, Lock()
        self._copy: np.ndarray | None = None

    @property
    def on_host(self) -> np.ndarray:
        with self._lock:
            if self._copy is None:
                self._copy = self._tensor.cpu().numpy()
        return self._copy


def _to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is complete when the device has come so far."""
    if tensor.device.type != "cuda":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


def _with_references(planes_CHW: np.ndarray, references_RHW: np.ndarray) -> np.ndarray:
    return three_planes(np.concatenate((planes_CHW[:1].astype(np.float32), references_RHW)))


# The network

VALUES_AT_ONCE = 1 << 26
"""Values of a feature map of the finest level on the CPU, which decide how many tiles there are in a forward pass: 64
tiles of 128 px for a network of base width 64. More are not faster, and would need more memory."""


def _values_at_once(device: torch.device) -> int:
    """VALUES_AT_ONCE on a device: of a GPU, a part of its memory."""
    return VALUES_AT_ONCE if device.type != "cuda" else min(max(_memory(device) >> 9, 1 << 24), 1 << 28)


def _pixels_at_once(device: torch.device) -> int:
    """Pixels of a batch of images."""
    return 1 << 22 if device.type != "cuda" else min(_memory(device) >> 12, 1 << 24)


def _memory(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).total_memory)


def open_mapper(
    network: DefectNet,
    grid_over: GridOver,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.float32,
    untiled: bool = False,
) -> "HeatMapper":
    """The mapper of a network that was loaded for prediction: the network is moved to the device, and changed."""
    network = for_prediction(network, dtype).to(device)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return HeatMapper(network, grid_over, device, dtype=dtype, untiled=untiled)


MAX_TILINGS = 8
"""Sizes of images of which it is kept how they are cut, in about 20 bytes per pixel."""


class _Tiling(NamedTuple):
    """How images of one size are cut into tiles and put together again; on the device."""

    pixel_TPP: Tensor
    """Number of each pixel of each tile in the image, int64."""
    owner_HW: Tensor
    """For each pixel of the image, the number of the pixel of the tiles that it is taken from."""


class HeatMapper:
    """Computes the probability of a defect at every pixel. Images may have different sizes."""

    def __init__(
        self,
        network: nn.Module,
        grid_over: GridOver,
        device: torch.device,
        *,
        dtype: torch.dtype = torch.float32,
        untiled: bool = False,
    ) -> None:
        """`network` is on `device` in evaluation mode and computes in `dtype`. `untiled`: one pass over the image."""
        self._network, self._device, self._dtype, self._untiled = network, device, dtype, untiled
        self._grid_over = grid_over
        self._tilings: dict[tuple[int, int], _Tiling] = {}
        self._pixels_at_once = _values_at_once(device) // finest_channels(network)
        self._channels = input_channels(network)

    @torch.inference_mode()
    def __call__(self, planes_CHW: np.ndarray) -> np.ndarray:
        """Heat map, float32 [H, W], of planes in 0..255. Waits for the device."""
        image_CHW = torch.from_numpy(np.array(planes_CHW, np.float32)).to(self._device)
        return np.asarray(self.probability(image_CHW[None])[0].cpu().numpy())

    @torch.inference_mode()
    def probability(self, planes_BCHW: Tensor) -> Tensor:
        """Heat maps, float32 [B, H, W], of float32 planes in 0..255 on the device, which is not waited for."""
        images_BCHW = (planes_BCHW / MAX_GREY).to(self._dtype)
        if self._channels > planes_BCHW.shape[1]:
            images_BCHW = F.pad(images_BCHW, (0, 0, 0, 0, 0, self._channels - planes_BCHW.shape[1]))
        return self._whole(images_BCHW) if self._untiled else self._stitched(images_BCHW)

    def _stitched(self, images_BCHW: Tensor) -> Tensor:
        tiling = self.tiling((images_BCHW.shape[2], images_BCHW.shape[3]))
        assert tiling is not None
        # Channels last from the start, and the values of a pixel as one number, if there is a type of that size: an
        # index then copies pixels instead of values.
        pixels_BSC = images_BCHW.flatten(2).transpose(1, 2).contiguous()
        if self._channels * pixels_BSC.itemsize == PIXEL_BYTES:
            tiles = pixels_BSC.view(torch.complex128)[..., 0][:, tiling.pixel_TPP].contiguous()
            tiles = tiles[..., None].view(pixels_BSC.dtype)
        else:
            tiles = pixels_BSC[:, tiling.pixel_TPP]
        owned_BS = self._in_parts(tiles.flatten(0, 1).permute(0, 3, 1, 2)).reshape(len(images_BCHW), -1)
        return owned_BS[:, tiling.owner_HW]

    def tiling(self, shape_hw: tuple[int, int]) -> _Tiling | None:
        """How images of this size are cut, on the device; None: they are not. The last MAX_TILINGS are kept."""
        if self._untiled:
            return None
        tiling = self._tilings.pop(shape_hw) if shape_hw in self._tilings else self._new_tiling(shape_hw)
        self._tilings[shape_hw] = tiling  # as the last one
        if len(self._tilings) > MAX_TILINGS:
            del self._tilings[next(iter(self._tilings))]  # the one that was not used for longest
        return tiling

    def _new_tiling(self, shape_hw: tuple[int, int]) -> _Tiling:
        grid = self._grid_over(shape_hw)
        row_TP = torch.tensor(grid.ys)[:, None] + torch.arange(grid.patch_hw[0])
        column_TP = torch.tensor(grid.xs)[:, None] + torch.arange(grid.patch_hw[1])
        pixel = row_TP[:, None, :, None] * shape_hw[1] + column_TP[None, :, None, :]
        pixel_TPP = pixel.reshape(grid.per_image, *grid.patch_hw).to(self._device)
        return _Tiling(pixel_TPP, torch.from_numpy(grid.owners()).to(self._device))

    def _whole(self, images_BCHW: Tensor) -> Tensor:
        height, width = images_BCHW.shape[2:]
        padding = (0, -width % GRID, 0, -height % GRID)
        return self._in_parts(F.pad(images_BCHW, padding, mode="replicate"))[:, :height, :width]

    def _in_parts(self, tiles_NCHW: Tensor) -> Tensor:
        """Probability of a defect, float32 [N, H, W]; as many tiles at a time as fit into memory."""
        tiles_at_once = max(1, self._pixels_at_once // (tiles_NCHW.shape[2] * tiles_NCHW.shape[3]))
        parts = [self._probability(part) for part in tiles_NCHW.split(tiles_at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _probability(self, x: Tensor) -> Tensor:
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._network(x.contiguous(memory_format=torch.channels_last))
        # The softmax of two classes.
        return torch.sigmoid(logits[:, 1].float() - logits[:, 0].float())
