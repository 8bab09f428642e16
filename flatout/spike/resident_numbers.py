"""What workers do when frames live on the GPU: draw, and say which frames, where, and turned how. No torch.

Dimension key:  L frames   C bins
"""

from collections.abc import Mapping

import numpy as np

from flatout.feed import Field, Out, Substituted, Unreadable
from flatout.spike.data import ClipSet
from flatout.spike.frames import FrameItems, Shown
from flatout.spike.source import ClipSource, boxes_of
from flatout.spike.voxels import bin_edges


class NumbersSource:
    """What the device needs to know of a clip; draws exactly as the source of whole clips does."""

    def __init__(self, clips: ClipSet, whole: ClipSource, shown: Shown, *, crop: int) -> None:
        self._clips, self._whole, self._shown, self._crop = clips, whole, shown, crop
        self._files = FrameItems(clips)
        length, channels = clips.clip_length, shown.channels
        self.fields = {
            "items": Field((3 * length,), np.int64),
            "corner": Field((4,), np.int64),
            "spike_hw": Field((2,), np.int64),
            "turn": Field((4,), np.uint8),
            "bin_start": Field((length, channels), np.int64),
            "spike_frames": Field((length, channels), np.float32),
            "score": Field((length,), np.uint8),
        }

    def __len__(self) -> int:
        return len(self._clips)

    def where(self, index: int) -> str:
        return self._clips.name_of(index)

    def draw(self, seed: int, epoch: int, positions: np.ndarray, indices: np.ndarray) -> Mapping[str, np.ndarray]:
        return self._whole.draw(seed, epoch, positions, indices)

    @property
    def num_items(self) -> int:
        return self._whole.num_items

    def where_item(self, item: int) -> str:
        return self._whole.where_item(item)

    def substitute(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], unreadable: Unreadable) -> Substituted:
        return self._whole.substitute(indices, draws, unreadable)

    def read(self, indices: np.ndarray, draws: Mapping[str, np.ndarray], out: Out) -> None:
        for row, index in enumerate(draws["clip"].tolist()):
            turn = draws["turn"][row]
            frames = self._clips.windows_NL[index][:: -1 if turn[0] else 1]
            facts = self._clips.sequence_of(index)
            rgb, spike = boxes_of(facts, draws["origin"][row].tolist(), self._crop)
            out["items"][row] = self._files.of_frames(frames)
            out["corner"][row] = rgb.top, rgb.left, spike.top, spike.left
            out["spike_hw"][row] = facts.spike_hw
            out["turn"][row] = turn
            for place, frame in enumerate(frames.tolist()):
                count = self._clips.frames[frame].num_spike_frames - sum(self._shown.trim)
                edges = bin_edges(count, self._shown.channels)
                order = slice(None, None, -1 if turn[0] else 1)
                out["bin_start"][row, place] = edges[:-1][order] + self._shown.trim[0]
                out["spike_frames"][row, place] = np.diff(edges)[order]
            out["score"][row] = self._clips.score_NL[index]
