"""How good is a network on a split? Every frame is scored exactly once, beside the blurry input's own score.

clips --tiles, network--> frames --as 8-bit pictures--> PSNR, SSIM per frame --> means
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatout.profiler import clock
from flatout.spike.clip_feed import ClipFeed
from flatout.spike.config import TestConfig
from flatout.spike.device_clip import ToClip, pictures
from flatout.spike.metrics import Scores, ref_luma, ref_psnr, ref_ssim_y, standard_scores
from flatout.spike.model import Clip
from flatout.spike.tiles import in_tiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Means over all scored frames."""

    psnr: float
    ssim: float
    blurry_psnr: float
    """Of the input as it is: what the network has to beat."""
    blurry_ssim: float
    ref_psnr_rgb: float
    """As the early S-VRT code computes it, over whole clips; not comparable with papers."""
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

    def plain(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Restored:
    """A batch with its result, all on the device: [N, L, 3, H, W] in 0..1."""

    indices: Sequence[int]
    """Which clips."""
    blur: Tensor
    sharp: Tensor
    predicted: Tensor
    score_NL: Tensor


Watcher = Callable[[Restored], None]


class Restore:
    """Runs a network over clips, in tiles where they are large."""

    def __init__(self, network: nn.Module, to_clip: ToClip, test: TestConfig, amp: torch.dtype) -> None:
        self._network, self._to_clip, self._test, self._amp = network, to_clip, test, amp

    @torch.inference_mode()
    def clip(self, clip: Clip, step: tuple[int, int]) -> Tensor:
        """Sharp frames [N, L, 3, H, W], clamped to 0..1."""
        device = clip.blur.device.type

        def work(blur: Tensor, spikes: Tensor) -> Tensor:
            with torch.autocast(device, self._amp, enabled=self._amp != torch.float32):
                return self._network(Clip(blur, spikes)).float()  # type: ignore[no-any-return]

        test = self._test
        return in_tiles(
            work, clip.blur, clip.spikes, tile=test.TILE_SIZE, overlap=test.TILE_OVERLAP, step=step
        ).clamp(0, 1)  # fmt: skip

    @torch.inference_mode()
    def over(self, feed: ClipFeed) -> Iterator[Restored]:
        """Every clip of a feed, in order."""
        was_training = self._network.training
        self._network.eval()
        for batch in feed.batches.epoch(0):
            indices = batch.indices.tolist()
            clip = self._to_clip(batch.fields)
            predicted = self.clip(clip, feed.clips.sequence_of(indices[0]).steps)
            yield Restored(indices, clip.blur, pictures(batch["sharp"]), predicted, batch["score"].bool())
        self._network.train(was_training)


def evaluate(restore: Restore, feed: ClipFeed, watchers: Sequence[Watcher] = ()) -> Evaluation:
    """Score a network; `watchers` see every batch with its result, and may raise to stop."""
    began = time.perf_counter()
    frame_scores: list[Tensor] = []
    clip_scores: list[Tensor] = []
    with clock.stage("spike.evaluate"):
        for restored in restore.over(feed):
            frame_scores.append(_frame_scores(restored))
            clip_scores.append(_clip_scores(restored))
            for watch in watchers:
                watch(restored)
    # Host-device wait: once, for all scores.
    psnr, ssim, blurry_psnr, blurry_ssim = torch.cat(frame_scores).cpu().mean(0).tolist()
    ref_psnr_rgb, ref_psnr_y, ref_ssim = torch.cat(clip_scores).cpu().mean(0).tolist()
    return Evaluation(
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


def _frame_scores(restored: Restored) -> Tensor:
    """float64 [scored frames, 4]."""
    keep = restored.score_NL.flatten()
    sharp, blur, predicted = (
        each.flatten(0, 1)[keep] for each in (restored.sharp, restored.blur, restored.predicted)
    )  # fmt: skip
    done: list[Scores] = [standard_scores(predicted, sharp), standard_scores(blur, sharp)]
    return torch.stack([value for scores in done for value in scores], 1)


def _clip_scores(restored: Restored) -> Tensor:
    """float64 [clips, 3]."""
    rows = [
        torch.stack((ref_psnr(a, b), ref_psnr(ref_luma(a), ref_luma(b)), ref_ssim_y(a, b)))
        for a, b in zip(restored.predicted, restored.sharp, strict=True)
    ]
    return torch.stack(rows).double()
