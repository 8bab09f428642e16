"""Evaluates a network on a split: PSNR and SSIM of every frame, large frames in tiles; also of the blurry input.

clips --tiles, network--> frames --as 8-bit images--> PSNR and SSIM per frame --> means

Dimension key:  N clips, or frames without L   L frames of a clip   C spike channels   H W frame   n side of a frame
                t side of a tile
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.clock import clock
from flatout.errors import ConfigError
from flatout.spike.config import TestConfig
from flatout.spike.input import ClipFeed
from flatout.spike.model import Clip
from flatout.spike.step import ToClip, to_float_frames

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DeblurEvaluation:
    """Mean scores over all scored frames. The field names are those of tables and JSON files."""

    psnr: float
    ssim: float
    blurry_psnr: float
    """PSNR of the blurry input, which the network has to exceed."""
    blurry_ssim: float
    ref_psnr_rgb: float
    """As the early S-VRT code computes it, over whole clips; not comparable with papers. So are the next two."""
    ref_psnr_y: float
    ref_ssim_y: float
    num_frames: int
    seconds: float

    def __str__(self) -> str:
        speed = self.num_frames / max(self.seconds, 1e-9)
        return (
            f"PSNR {self.psnr:.2f} dB, SSIM {self.ssim:.4f} on {self.num_frames} frames "
            f"(blurry input: {self.blurry_psnr:.2f} dB, {self.blurry_ssim:.4f}), {speed:.1f} frames/s"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class RestoredBatch:
    """A batch with its restored frames, all on the device: [N, L, 3, H, W] in 0..1."""

    indices: Sequence[int]
    """Numbers of the clips."""
    blur: Tensor
    sharp: Tensor
    predicted: Tensor
    score_NL: Tensor
    """Whether each frame is scored."""


BatchObserver = Callable[[RestoredBatch], None]


class Restorer:
    """Restores clips with a network, in tiles if frames are large."""

    def __init__(self, network: nn.Module, to_clip: ToClip, test: TestConfig, amp: torch.dtype) -> None:
        self._network, self._to_clip, self._test, self._amp = network, to_clip, test, amp

    @torch.inference_mode()
    def restore_clip(self, clip: Clip, step: tuple[int, int]) -> Tensor:
        """Sharp frames [N, L, 3, H, W], clamped to 0..1; `step` as for `in_tiles`."""
        device = clip.blur.device.type

        def process(blur: Tensor, spikes: Tensor) -> Tensor:
            with torch.autocast(device, self._amp, enabled=self._amp != torch.float32):
                return self._network(Clip(blur, spikes)).float()  # type: ignore[no-any-return]

        test = self._test
        return in_tiles(
            process, clip.blur, clip.spikes, tile=test.TILE_SIZE, overlap=test.TILE_OVERLAP, step=step
        ).clamp(0, 1)  # fmt: skip

    @torch.inference_mode()
    def restore_all(self, feed: ClipFeed) -> Iterator[RestoredBatch]:
        """Restore every clip of a feed, in order."""
        was_training = self._network.training
        self._network.eval()
        try:
            for batch in feed.batches.epoch(0):
                indices = batch.indices.tolist()
                clip = self._to_clip(batch.fields)
                predicted = self.restore_clip(clip, feed.clips.sequence_of(indices[0]).crop_steps)
                sharp = to_float_frames(batch["sharp"])
                yield RestoredBatch(indices, clip.blur, sharp, predicted, batch["score"].bool())
        finally:
            self._network.train(was_training)


def evaluate(restorer: Restorer, feed: ClipFeed, observers: Sequence[BatchObserver] = ()) -> DeblurEvaluation:
    """Score a network; `observers` are called with every restored batch, and what they raise ends it."""
    began = time.perf_counter()
    frame_scores: list[Tensor] = []
    clip_scores: list[Tensor] = []
    with clock.stage("spike.evaluate"):
        for restored in restorer.restore_all(feed):
            frame_scores.append(_frame_scores(restored))
            clip_scores.append(_clip_scores(restored))
            for observer in observers:
                observer(restored)
    # The only host-device wait, for all scores together.
    psnr, ssim, blurry_psnr, blurry_ssim = torch.cat(frame_scores).cpu().mean(0).tolist()
    ref_psnr_rgb, ref_psnr_y, ref_ssim = torch.cat(clip_scores).cpu().mean(0).tolist()
    return DeblurEvaluation(
        psnr=psnr,
        ssim=ssim,
        blurry_psnr=blurry_psnr,
        blurry_ssim=blurry_ssim,
        ref_psnr_rgb=ref_psnr_rgb,
        ref_psnr_y=ref_psnr_y,
        ref_ssim_y=ref_ssim,
        num_frames=sum(map(len, frame_scores)),
        seconds=time.perf_counter() - began,
    )


def _frame_scores(restored: RestoredBatch) -> Tensor:
    """PSNR and SSIM of restored and of blurry frames, float64 [scored frames, 4]."""
    keep = restored.score_NL.flatten()
    sharp, blur, predicted = (
        each.flatten(0, 1)[keep] for each in (restored.sharp, restored.blur, restored.predicted)
    )  # fmt: skip
    done: list[FrameScores] = [standard_scores(predicted, sharp), standard_scores(blur, sharp)]
    return torch.stack([value for scores in done for value in scores], 1)


def _clip_scores(restored: RestoredBatch) -> Tensor:
    """The scores of the early code, float64 [clips, 3]."""
    rows = [
        torch.stack((ref_psnr(a, b), ref_psnr(ref_luma(a), ref_luma(b)), ref_ssim_y(a, b)))
        for a, b in zip(restored.predicted, restored.sharp, strict=True)
    ]
    return torch.stack(rows).double()


# Scores: PSNR and SSIM as in papers, and as the early code defines them (`ref_*`)

WINDOW, SIGMA = 11, 1.5
"""Side and standard deviation of the window of SSIM, in pixels."""
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
BEST_PSNR = 99.0
"""PSNR of equal images in dB, as in the early code; infinity would be the mean of all frames."""


class FrameScores(NamedTuple):
    """Scores of each frame, float64 [N]."""

    psnr: Tensor
    ssim: Tensor


def standard_scores(predicted_N3HW: Tensor, target_N3HW: Tensor) -> FrameScores:
    """PSNR and SSIM of 8-bit images: values in 0..1 are clamped and rounded first."""
    predicted, target = (_as_bytes(each) for each in (predicted_N3HW, target_N3HW))
    return FrameScores(psnr_of_bytes(predicted, target), ssim_of_bytes(predicted, target))


def psnr_of_bytes(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
    """PSNR per frame over all three channels, of values in 0..255; at most BEST_PSNR."""
    mse_N = (predicted_N3HW - target_N3HW).square().mean(dim=(1, 2, 3))
    return (10 * torch.log10(255.0**2 / mse_N)).clamp(max=BEST_PSNR)


def ssim_of_bytes(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
    """SSIM per frame, the mean over channels and the area where the Gaussian window fits, of values in 0..255."""
    kernel = _gaussian(predicted_N3HW)

    def blurred(x: Tensor) -> Tensor:
        # Two one-dimensional passes instead of a two-dimensional one: the sums are the same.
        rows = F.conv2d(x, kernel.view(1, 1, -1, 1).expand(3, 1, -1, 1), groups=3)
        return F.conv2d(rows, kernel.view(1, 1, 1, -1).expand(3, 1, 1, -1), groups=3)

    a, b = predicted_N3HW, target_N3HW
    mean_a, mean_b = blurred(a), blurred(b)
    var_a, var_b = blurred(a * a) - mean_a**2, blurred(b * b) - mean_b**2
    cov = blurred(a * b) - mean_a * mean_b
    ssim = ((2 * mean_a * mean_b + C1) * (2 * cov + C2)) / ((mean_a**2 + mean_b**2 + C1) * (var_a + var_b + C2))
    return ssim.mean(dim=(1, 2, 3))


def ref_psnr(predicted: Tensor, target: Tensor) -> Tensor:
    """PSNR of a whole tensor with values clamped to 0..1, as in the early code."""
    mse = (predicted.clamp(0, 1) - target.clamp(0, 1)).square().mean()
    return torch.where(mse <= 1e-10, torch.full_like(mse, BEST_PSNR), 10 * torch.log10(1 / mse))


def ref_luma(rgb_N3HW: Tensor) -> Tensor:
    """Luma (Y) of RGB values in 0..1, [N, 1, H, W], as in the early code."""
    weights = torch.tensor([0.257, 0.504, 0.098], dtype=rgb_N3HW.dtype, device=rgb_N3HW.device)
    return (rgb_N3HW.clamp(0, 1) * weights.view(1, 3, 1, 1)).sum(1, keepdim=True) + 16 / 255


def ref_ssim_y(predicted_N3HW: Tensor, target_N3HW: Tensor) -> Tensor:
    """SSIM of the luma as in the early code: uniform window, zero padding, one mean; not comparable with papers."""
    a, b = ref_luma(predicted_N3HW), ref_luma(target_N3HW)

    def mean(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, WINDOW, 1, WINDOW // 2, count_include_pad=True)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    cov = mean(a * b) - mean_a * mean_b
    above = (2 * mean_a * mean_b + 1e-4) * (2 * cov + 9e-4)
    below = (mean_a**2 + mean_b**2 + 1e-4) * (var_a + var_b + 9e-4)
    return (above / (below + 1e-12)).mean()


def _as_bytes(values: Tensor) -> Tensor:
    return (values.clamp(0, 1) * 255).round().double()


def _gaussian(like: Tensor) -> Tensor:
    x = torch.arange(WINDOW, dtype=like.dtype, device=like.device) - WINDOW // 2
    weights = torch.exp(-(x**2) / (2 * SIGMA**2))
    return weights / weights.sum()


# Tiles: large frames are processed in tiles that are blended where they overlap; the border of a frame is not faded


def tile_starts(n: int, tile: int, overlap: int) -> list[int]:
    """First pixel of each tile along an axis; the last tile is shifted back to end with the frame."""
    if not 0 <= overlap < tile:
        raise ConfigError(f"tile overlap {overlap}: it must be at least 0 and smaller than the tile size {tile}.")
    if n <= tile:
        return [0]
    starts = list(range(0, n - tile, tile - overlap))
    return [*starts, n - tile]


def tile_weights(n: int, tile: int, overlap: int) -> list[np.ndarray]:
    """Weights of each tile along an axis, float64 [t]: rising by (i + 1/2) / overlap on sides that have a neighbour."""
    starts = tile_starts(n, tile, overlap)
    length = min(n, tile)
    weights = [np.ones(length) for _ in starts]
    for number, (start, after) in enumerate(pairwise(starts)):
        if shared := start + length - after:
            rising = (np.arange(shared) + 0.5) / shared
            weights[number][length - shared :] *= rising[::-1]
            weights[number + 1][:shared] *= rising
    return weights


ProcessTile = Callable[[Tensor, Tensor], Tensor]


def in_tiles(
    process: ProcessTile, blur: Tensor, spikes: Tensor, *, tile: int, overlap: int, step: tuple[int, int]
) -> Tensor:
    """Apply `process` to [N, L, 3, H, W] and its spikes [N, L, C, H / r, W / r], in tiles if a side exceeds the tile.

    `step`: tiles begin at multiples of it (RGB pixels, per axis), so that they correspond to whole spike pixels.
    """
    height, width = blur.shape[-2:]
    if not tile or (height <= tile and width <= tile):
        return process(blur, spikes)
    total = torch.zeros(blur.shape, device=blur.device)
    weight_sum = torch.zeros(height, width, device=blur.device)
    ratio = (spikes.shape[-2] / height, spikes.shape[-1] / width)
    axes = [_axis(n, tile, overlap, b) for n, b in zip((height, width), step, strict=True)]
    for top, weight_y in axes[0]:
        for left, weight_x in axes[1]:
            bottom, right = top + len(weight_y), left + len(weight_x)
            part = spikes[
                ..., round(top * ratio[0]) : round(bottom * ratio[0]), round(left * ratio[1]) : round(right * ratio[1])
            ]
            weight = torch.from_numpy(np.outer(weight_y, weight_x)).to(total)
            done = process(blur[..., top:bottom, left:right], part)
            total[..., top:bottom, left:right] += done * weight
            weight_sum[top:bottom, left:right] += weight
    return total / weight_sum


def _axis(n: int, tile: int, overlap: int, step: int) -> list[tuple[int, np.ndarray]]:
    """(start, weights) of the tiles of an axis; starts and sizes are multiples of `step` if n is one."""
    tile, overlap = max(step, tile // step * step), overlap // step * step
    return list(zip(tile_starts(n, tile, overlap), tile_weights(n, tile, overlap), strict=True))
