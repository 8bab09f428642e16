"""The GPU path: frames and packed spikes live on the device, which crops, turns, unpacks and counts.

    worker: draw -> numbers of frames, origins, flips (a few hundred bytes) -> slot -> device: gather -> batch

Plain torch, the same bytes as `source.py` makes on the CPU (tests compare them), and nothing waits for the device.

Dimension key:  N clips   L frames   C bins   S side of a crop   h w crop of spikes   P = h * w   T spike frames
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from flatout.errors import ConfigError
from flatout.feed.device_feed import Output
from flatout.feed.device_store import Sources
from flatout.spike.data import ClipSet
from flatout.spike.frames import Shown
from flatout.spike.source import ClipSource
from flatout.spike.voxels import bin_edges


class Render:
    """Fills `blur`, `sharp` and `spikes` of a batch from what is resident."""

    def __init__(self, clips: ClipSet, whole: ClipSource, shown: Shown, *, crop: int) -> None:
        first = clips.sequences[0]
        if clips.precomputed or shown.kind != "voxel" or first.layout.format == "bytes":
            raise ConfigError(
                "DEVICE_RESIDENT bins streams on the device: use SPIKE_REPR: voxel, live, packed or uint8."
            )
        if any(crop % step for each in clips.sequences for step in each.steps):
            raise ConfigError(f"DEVICE_RESIDENT needs exact crops: CROP_SIZE={crop} is no multiple of {first.steps}.")
        self._crop, self._layout, self._length = crop, first.layout, clips.clip_length
        longest = max(each.num_spike_frames for each in clips.frames) - sum(shown.trim)
        self._most_per_bin = int(np.diff(bin_edges(longest, shown.channels)).max())
        fields = whole.fields
        if fields["spikes"].dtype != np.uint8:
            raise ConfigError("DEVICE_RESIDENT counts in bytes: use more NUM_VOXEL_BINS for streams as long as these.")
        self.outputs = {name: Output(fields[name].shape, torch.uint8) for name in ("blur", "sharp", "spikes")}

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        length = self._length
        y, x = turned_places(params["turn"], self._crop, self._crop)
        for part, name in enumerate(("blur", "sharp")):
            here = slice(part * length, (part + 1) * length)
            self._cut(sources, here, params["corner"], y, x, out[name])
        self.count(sources, params, out["spikes"])

    def _cut(self, sources: Sources, here: slice, corner_N4: Tensor, y: Tensor, x: Tensor, out: Tensor) -> None:
        """Gather [N, L, S, S, 3] bytes."""
        width_NL = sources.shapes[:, here, 1]
        rows, columns = y + corner_N4[:, 0, None, None], x + corner_N4[:, 1, None, None]
        pixel = rows[:, None] * width_NL[..., None, None] + columns[:, None]
        first = sources.offsets[:, here, None, None] + 3 * pixel
        out.copy_(sources.data[first[..., None] + torch.arange(3, device=first.device)])

    def count(self, sources: Sources, params: Mapping[str, Tensor], out: Tensor) -> None:
        """Sum the spikes of each bin, one spike frame of every bin at a time: no atomics, the same bits every time."""
        num, length, channels, height, width = out.shape
        here = slice(2 * length, 3 * length)
        y, x = turned_places(params["turn"], height, width)
        rows, columns = y + params["corner"][:, 2, None, None], x + params["corner"][:, 3, None, None]
        if self._layout.flipud:
            rows = params["spike_hw"][:, 0, None, None] - 1 - rows
        pixel_N1P = (rows * params["spike_hw"][:, 1, None, None] + columns).view(num, 1, 1, -1)
        packed = self._layout.format == "packed"
        byte = sources.offsets[:, here, None, None] + (pixel_N1P >> 3 if packed else pixel_N1P)
        bit = (pixel_N1P & 7).to(torch.uint8)
        frame_bytes = sources.shapes[:, here, 2, None, None]
        start, count = params["bin_start"][..., None], params["spike_frames"][..., None]
        total = torch.zeros(num, length, channels, height * width, dtype=torch.uint8, device=out.device)
        for number in range(self._most_per_bin):
            inside = number < count
            # A frame outside of its bin is read at the bin's start, which exists, and then not counted.
            frame = torch.where(inside, start + number, torch.zeros_like(start))
            values = sources.data[byte + frame * frame_bytes]
            total += (values >> bit & 1 if packed else values) * inside
        out.copy_(total.view(out.shape))


def turned_places(turn_N4: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """Row and column of the untouched crop that each pixel of the turned one comes from, int64 [N, S, S]."""
    y = torch.arange(height, device=turn_N4.device).view(1, -1, 1).expand(len(turn_N4), height, width)
    x = torch.arange(width, device=turn_N4.device).view(1, 1, -1).expand(len(turn_N4), height, width)
    hflip, vflip, rot90 = (turn_N4[:, place, None, None].bool() for place in (1, 2, 3))
    y, x = torch.where(rot90, x, y), torch.where(rot90, width - 1 - y, x)
    return torch.where(vflip, height - 1 - y, y), torch.where(hflip, width - 1 - x, x)
