"""JPEG files decoded and resized on the GPU, for a store: nvJPEG, through torchvision where it is installed.

bench/augment_store.py compares its speed with the CPU's. The pixels differ, since nvJPEG rounds and upsamples colours
differently; so it is only used on request (--fast), and the difference is measured on some images of the set and
logged. Files that are not plain, intact, upright JPEGs of three channels are left to the CPU's decoder, with its checks
and errors.

    files --threads: read, parse the header--> groups --GPU: decode, resize--> RAM [all images, BGR]

Dimension key:  N images   C channels   H W size in the file   h w size in the store   D 3 numbers of a shape
"""

import importlib.util
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from flatout.clock import machine
from flatout.feed import DecodeError, free_bytes, free_ram_bytes
from flatout.images import check_size, header_of, read_bytes
from flatout.progress import progress
from flatout.yolo.augment.layout import decoded_bytes, resized_wh
from flatout.yolo.augment.samples import ResizedImages
from flatout.yolo.data.image_set import ImageSet

logger = logging.getLogger(__name__)

GROUP = 128
"""Files that are decoded at a time."""
READERS = 8
NUM_COMPARED, MAX_LEVELS_OFF = 8, 4.0
"""Images that the CPU decodes, too, and the largest mean difference in levels of 255."""
MARKER_BYTES = 4096
"""Bytes at the end of a file that are searched for its end marker."""

Decode = Callable[[list[Tensor]], list[Tensor]]
"""Bytes of JPEG files, uint8 on the host -> images uint8 [3, H, W], RGB, on a device."""


def nvjpeg(device: str | torch.device) -> Decode | None:
    """The GPU's decoder; None without CUDA, without torchvision, or if torchvision was built without nvJPEG."""
    if torch.device(device).type != "cuda" or importlib.util.find_spec("torchvision") is None:
        return None
    try:
        from torchvision.io import ImageReadMode, decode_jpeg, encode_jpeg

        def decode(files: list[Tensor]) -> list[Tensor]:
            return list(decode_jpeg(files, mode=ImageReadMode.RGB, device=device))

        decode([encode_jpeg(torch.zeros((3, 16, 16), dtype=torch.uint8))])
    except (ImportError, OSError, RuntimeError) as error:
        # Also for a torchvision that does not match this torch.
        logger.info("nvJPEG is not used; torchvision reports: %s", (str(error).splitlines() or ["no reason"])[0])
        return None
    return decode


def decoded_on_device(
    image_set: ImageSet, *, size: int, device: torch.device, budget_bytes: int | None
) -> "DeviceDecoded | None":
    """All images, decoded by `device`; None if it cannot decode, or they do not fit into its memory and into RAM."""
    needed_bytes = decoded_bytes(image_set.size_wh_N2, size)
    free_device_bytes = free_bytes(device) if budget_bytes is None else budget_bytes
    # Only if all fit: workers must be able to read the others from a store.
    if needed_bytes > min(free_device_bytes, free_ram_bytes()) or (decode := nvjpeg(device)) is None:
        return None
    try:
        return DeviceDecoded(image_set, decode, size=size)
    except (DecodeError, OSError) as error:
        reason = str(error).removesuffix(".")
        logger.warning("Not decoding on the GPU: %s. The CPU builds a store of the readable images.", reason)
        return None


class DeviceDecoded:
    """All images in RAM, uint8 [h, w, 3], BGR, resized for training at `size`; decoded by the constructor."""

    dtype = np.dtype(np.uint8)

    def __init__(self, image_set: ImageSet, decode: Decode, *, size: int) -> None:
        """Decode everything, with a progress bar. Raises DecodeError or OSError for a file that cannot be used."""
        self._image_set = image_set
        self._decode = decode
        self._on_cpu = ResizedImages(image_set, size=size, augment=True)
        wh_N2 = resized_wh(image_set.size_wh_N2, size)
        self.shapes_ND = np.concatenate((wh_N2[:, ::-1], np.full((len(wh_N2), 1), 3)), 1)
        ends_N = self.shapes_ND.prod(1).cumsum()
        self._begin_N = np.concatenate(([0], ends_N))
        self._bytes = np.empty(int(ends_N[-1]), np.uint8)
        self.num_on_device = 0
        self._compared: list[int] = []
        self._fill()
        self.levels_off = self._compare()
        if self.levels_off > MAX_LEVELS_OFF:
            raise DecodeError(
                f"pixels decoded by the GPU differ from the CPU's by {self.levels_off:.1f} of 255 levels on average "
                f"(at most {MAX_LEVELS_OFF} is accepted)."
            )
        logger.info("%s", self)

    def __str__(self) -> str:
        rest = len(self) - self.num_on_device
        return (
            f"{self.num_on_device} images decoded by the GPU, {self.levels_off:.2f} levels off the CPU's on average "
            f"over {len(self._compared)}; {rest} by the CPU ({len(self._bytes) / 1e6:,.1f} MB)"
        )

    def __len__(self) -> int:
        return len(self.shapes_ND)

    def __getitem__(self, index: int) -> np.ndarray:
        begin, end = self._begin_N[index : index + 2].tolist()
        return self._bytes[begin:end].reshape(self.shapes_ND[index])

    def _fill(self) -> None:
        num_readers = max(1, min(READERS, machine.cores().usable))
        with progress("decoding", len(self)) as advance, ThreadPoolExecutor(num_readers) as pool:
            groups = [range(begin, min(begin + GROUP, len(self))) for begin in range(0, len(self), GROUP)]
            # One group ahead: while the GPU decodes, threads read the next files and decode those of the CPU.
            waiting = [pool.map(self._read, group) for group in groups[:1]]
            for number, group in enumerate(groups):
                waiting += [pool.map(self._read, after) for after in groups[number + 1 : number + 2]]
                found = [(index, file) for index, file in zip(group, waiting.pop(0), strict=True) if file is not None]
                self._put_group(found)
                advance(group.stop, int(self._begin_N[group.stop]))

    def _compare(self) -> float:
        """Mean difference of the first images of the device from the CPU's, in levels of 255; 0 if there are none."""
        differences = [
            np.abs(self[index].astype(np.int16) - self._on_cpu.decode(index)).mean() for index in self._compared
        ]
        return float(np.mean(differences)) if differences else 0.0

    def _read(self, index: int) -> Tensor | None:
        """The bytes of a file that the GPU can decode; None for any other, which is decoded here."""
        content = read_bytes(self._image_set.paths[index])
        if _is_plain(content, tuple(self._image_set.size_wh_N2[index].tolist())):
            return torch.frombuffer(bytearray(content), dtype=torch.uint8)
        self._put(index, self._on_cpu.decode(index))
        return None

    def _put(self, index: int, image: np.ndarray) -> None:
        if image.shape != tuple(self.shapes_ND[index]):
            height, width, _ = self.shapes_ND[index].tolist()
            raise DecodeError(
                f"{self._image_set.paths[index]} is {image.shape[1]} x {image.shape[0]} px at the size for training, "
                f"but should be {width} x {height} according to the scan: it has changed since. Run the command "
                "again: it scans changed files."
            )
        self[index][:] = image

    def _put_group(self, found: list[tuple[int, Tensor]]) -> None:
        if not found:
            return
        try:
            decoded = self._decode([file for _, file in found])
        except RuntimeError as error:
            # One damaged file fails its whole group; the CPU's decoder names it, or decodes what it can.
            logger.debug("nvJPEG failed on a group: %s", error)
            for index, _ in found:
                self._put(index, self._on_cpu.decode(index))
            return
        small = [
            resize_bgr(image, (int(self.shapes_ND[index, 0]), int(self.shapes_ND[index, 1])))
            for (index, _), image in zip(found, decoded, strict=True)
        ]
        # One copy for consecutive images, directly to their final memory: one copy each would make the host wait for
        # each, and memory in between would be touched for the first time, which costs more than the copy.
        values, taken = torch.cat([image.reshape(-1) for image in small]), 0
        for indices in _consecutive([index for index, _ in found]):
            begin, end = int(self._begin_N[indices[0]]), int(self._begin_N[indices[-1] + 1])
            torch.from_numpy(self._bytes[begin:end]).copy_(values[taken : taken + end - begin])
            taken += end - begin
        self.num_on_device += len(found)
        self._compared += [index for index, _ in found[: NUM_COMPARED - len(self._compared)]]


def resize_bgr(rgb_CHW: Tensor, hw: tuple[int, int]) -> Tensor:
    """Resize as `flatout.yolo.data.letterbox` for training, on a device: uint8 [3, H, W] to [h, w, 3], BGR; bilinear.

    Within one level of OpenCV, whose weights are multiples of 1/2048.
    """
    if rgb_CHW.shape[1:] != hw:
        resized = F.interpolate(rgb_CHW[None].float(), hw, mode="bilinear", align_corners=False)[0]
        rgb_CHW = resized.round().to(torch.uint8)
    return rgb_CHW.flip(0).permute(1, 2, 0).contiguous()


def _is_plain(content: bytes, size_wh: tuple[int, int]) -> bool:
    """Whether a file is a JPEG that only needs decoding: three channels of 8 bits, upright, with an end marker."""
    try:
        header = header_of(content)
        check_size(header, len(content))
    except DecodeError:
        return False  # the CPU's decoder raises it again, with the file's name
    is_usual = (header.format, header.bits, header.channels, header.orientation) == ("jpeg", 8, 3, 1)
    return is_usual and header.size_wh == size_wh and b"\xff\xd9" in content[-MARKER_BYTES:]


def _consecutive(indices: list[int]) -> list[np.ndarray]:
    """Split ascending numbers where one is missing."""
    return np.split(np.array(indices), np.flatnonzero(np.diff(indices) != 1) + 1)
