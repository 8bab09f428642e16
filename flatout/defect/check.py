"""What would spoil a training, in every file of a data set.

sizes, planes, ranges, values that are no numbers, pictures without content, planes that do not lie on each other,
references that are copies of target, masks that are missing, empty or of another size
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from flatout.defect.patches import Grid
from flatout.defect.strips.canonical import TOP, canonical, planes_first
from flatout.defect.strips.decode import read_stored
from flatout.defect.strips.find import HARD_NEGATIVES, ImgFormat, list_images, list_judged, root_of, training_folder
from flatout.defect.strips.items import read_mask
from flatout.errors import ConfigError, DataError, counted
from flatout.feed.source import DecodeError
from flatout.images import decoder_messages

Severity = Literal["error", "warning", "note"]
FLAT_BELOW = 1.0
"""Grey levels of standard deviation below which a plane shows nothing."""
SHIFT_PX = 1.0
"""A larger misregistration turns every edge into a difference."""
NOISE_SIGMAS = 6
SAME_FIT = 1e-3
"""Share by which a fit may be worse than the best and still be as good; a pixel costs coarse patterns 0.3 % or more."""
CHECKS = 9


@dataclass(frozen=True)
class Finding:
    """Something about one file."""

    severity: Severity
    kind: str
    where: str
    text: str


@dataclass(frozen=True)
class Report:
    """Everything that was found, worst first."""

    findings: list[Finding]
    num_images: int
    shape_hw: tuple[int, int] | None

    @property
    def is_bad(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def lines(self, most: int = 5) -> list[str]:
        """A paragraph per kind, each with the first places."""
        counts = Counter((finding.severity, finding.kind) for finding in self.findings)
        lines = [
            counted(self.num_images, "image")
            + (f" of {self.shape_hw[0]} x {self.shape_hw[1]}" if self.shape_hw else "")
        ]
        for (severity, kind), count in counts.items():
            lines.append(f"{severity:<8} {kind}: {count}")
            places = [each for each in self.findings if (each.severity, each.kind) == (severity, kind)]
            lines += [f"           {each.where}: {each.text}" for each in places[:most]]
            lines += [f"           ... and {count - most} more"] if count > most else []
        totals = Counter(finding.severity for finding in self.findings)
        told = ", ".join(
            counted(totals[severity], severity) for severity in ("error", "warning", "note") if totals[severity]
        )
        return [*lines, f"{CHECKS} checks: {told or 'nothing found'}"]


def check_data_set(path: str, img_format: ImgFormat, *, patch: int = 128) -> Report:
    """Look at every image and mask below a training folder or root; nothing is changed."""
    findings: list[Finding] = []
    checker = _Checker(patch)
    root = root_of(path)
    images = list_images(training_folder(path), img_format)
    if (hard := root / "train" / HARD_NEGATIVES).is_dir() and any(hard.iterdir()):
        images += list_images(hard, img_format)
    for image in images:
        findings += checker.image(image)
    for split in ("valid", "test"):
        for judged in list_judged(root, split, img_format):
            images.append(judged.path)
            findings += checker.image(judged.path)
            if not judged.is_good:
                findings += checker.mask(judged.path, judged.mask)
    order = {"error": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: order[finding.severity])
    return Report(findings, len(images), checker.shape_hw)


class _Checker:
    """Knows what the first image was like."""

    def __init__(self, patch: int) -> None:
        self._patch = patch
        self.shape_hw: tuple[int, int] | None = None

    def image(self, path: Path) -> Iterator[Finding]:
        messages: list[str] = []
        try:
            with decoder_messages() as messages:
                stored = read_stored(path)
            planes_CHW = canonical(stored)
        except (OSError, DecodeError) as error:
            yield Finding("error", "cannot be used", str(path), " ".join([str(error), *messages[:1]]))
            return
        yield from self._size(path, (planes_CHW.shape[1], planes_CHW.shape[2]))
        yield from _values(path, stored, planes_CHW)
        if _is_flat(planes_CHW).any():
            return
        for plane, name in ((1, "ref1"), (2, "ref2")):
            if np.array_equal(planes_CHW[0], planes_CHW[plane]):
                yield Finding(
                    "note", "copied plane", str(path), f"{name} equals target: nothing can be learned from it"
                )
                continue
            dx, dy = displacement(planes_CHW[0], planes_CHW[plane])
            if max(abs(dx), abs(dy)) >= SHIFT_PX:
                text = f"{name} lies {dx:+.0f} px in x and {dy:+.0f} px in y from target: align it, or set shift_px"
                yield Finding("warning", "misregistered", str(path), text)

    def mask(self, image: Path, mask: Path | None) -> Iterator[Finding]:
        if mask is None:
            yield Finding("warning", "mask missing", str(image), f"no {image.stem}_mask.* in the ground truth")
            return
        messages: list[str] = []
        try:
            with decoder_messages() as messages:
                mask_HW = read_mask(mask)
        except (OSError, DecodeError) as error:
            yield Finding("error", "cannot be used", str(mask), " ".join([str(error), *messages[:1]]))
            return
        if self.shape_hw is not None and mask_HW.shape != self.shape_hw:
            yield Finding("error", "size", str(mask), f"the mask measures {mask_HW.shape[0]} x {mask_HW.shape[1]}")
        elif not mask_HW.any():
            yield Finding("warning", "mask empty", str(mask), "it marks nothing, but lies among defective images")

    def _size(self, path: Path, shape_hw: tuple[int, int]) -> Iterator[Finding]:
        if self.shape_hw is None:
            self.shape_hw = shape_hw
            try:
                Grid.over(shape_hw, self._patch)
            except ConfigError as error:
                yield Finding("error", "size", str(path), str(error))
        elif shape_hw != self.shape_hw:
            text = f"it measures {shape_hw[0]} x {shape_hw[1]}, the first image {self.shape_hw[0]} x {self.shape_hw[1]}"
            yield Finding("error", "size", str(path), text)


def _values(path: Path, stored: np.ndarray, planes_CHW: np.ndarray) -> Iterator[Finding]:
    kept = planes_first(stored)
    low, high = float(kept.min()), float(kept.max())
    if low < 0 or high > TOP:
        yield Finding(
            "note", "range", str(path), f"values {low:g} to {high:g} are stretched to 0 to 255, as all planes are"
        )
    for plane in np.flatnonzero(_is_flat(planes_CHW)):
        name = ("target", "ref1", "ref2")[plane]
        shade = "black" if planes_CHW[plane].max() == 0 else "of one shade"
        yield Finding("error", "no content", str(path), f"{name} is all {shade}")


def _is_flat(planes_CHW: np.ndarray) -> np.ndarray:
    return np.asarray(planes_CHW.std(axis=(1, 2)) < FLAT_BELOW)


def displacement(target_HW: np.ndarray, ref_HW: np.ndarray) -> tuple[int, int]:
    """How far (x, y) a reference lies from target, to the pixel, by their correlation.

    Periodic patterns have many fits; the nearest of those that noise cannot tell from the best counts.
    """
    target, ref = target_HW - target_HW.mean(), ref_HW - ref_HW.mean()
    fit_HW = np.fft.irfft2(np.fft.rfft2(target) * np.conj(np.fft.rfft2(ref)), s=target_HW.shape) / target.size
    energy, best = float((target**2).mean() + (ref**2).mean()), float(fit_HW.max())
    # What is left at the best fit is taken for noise: so far do fits that are equally good scatter.
    scatter = np.sqrt(max(energy - 2 * best, 0.0) * energy / 2 / target.size)
    good = np.argwhere(fit_HW >= best - NOISE_SIGMAS * scatter - SAME_FIT * best)
    height, width = target_HW.shape
    half = np.array([height // 2, width // 2])
    wrapped = (good + half) % np.array(target_HW.shape) - half
    y, x = wrapped[np.argmin(np.abs(wrapped).sum(axis=1))].tolist()
    return -int(x), -int(y)


def refuse_bad(report: Report) -> int:
    """The exit code of a check."""
    return DataError.exit_code if report.is_bad else 0
