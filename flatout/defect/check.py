"""Check every file of a data set for problems that would spoil a training.

Checked are sizes, planes, value ranges, non-finite values, images without content, misaligned planes, references that
are copies of target, masks that are missing, empty, inverted or of another size, and labels that belong to no image.

Dimension key:  C planes   H W image
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flatout.defect.compare.align import AlignConfig, find_shifts
from flatout.defect.data.decode import read_stored
from flatout.defect.data.find import (
    HARD_NEGATIVES,
    EvaluationImage,
    ImgFormat,
    list_images,
    list_split,
    root_of,
    training_folder,
)
from flatout.defect.data.items import (
    EQUAL_PLANES,
    FAINT,
    MAX_GREY,
    are_equal,
    canonical,
    is_faint,
    mask_of,
    planes_first,
    size_text,
)
from flatout.defect.data.pairs import (
    UNLABELLED,
    holds_pairs,
    labels_without_image,
    list_pair_images,
    read_boxes,
    read_planes,
    unlabelled_among_labelled,
)
from flatout.defect.patches import Grid
from flatout.errors import ConfigError, DataError, counted
from flatout.feed import DecodeError
from flatout.findings import LEVEL_OF, LEVELS, Finding, Severity, is_bad, places, summary
from flatout.images import decoder_messages

FLAT_BELOW = 1.0
"""Standard deviation, in grey levels, below which a plane has no content."""
SHIFT_PX = 1.0
"""Misalignment from which on a plane is reported: it turns every edge into a difference."""
NOISE_SIGMAS = 6
SAME_FIT = 1e-3
"""Relative tolerance within which two correlations count as equal; a shift by one pixel costs coarse patterns at least
0.3 %."""
MOSTLY = 0.5
"""Share of pixels from which on a mask is reported: it is probably inverted."""
CHECKS = 10
"""Number of checks, for the summary line."""


@dataclass(frozen=True)
class CheckReport:
    """All findings, most serious first."""

    findings: list[Finding]
    num_images: int
    shape_hw: tuple[int, int] | None

    @property
    def is_bad(self) -> bool:
        return is_bad(self.findings)

    def lines(self, most: int = 5) -> list[str]:
        """One paragraph per kind of finding, each with the first `most` files."""
        lines = [
            counted(self.num_images, "image")
            + (f", the first of {size_text(self.shape_hw)} px (width x height)" if self.shape_hw else "")
        ]
        for severity, level in LEVEL_OF.items():
            of_level = [finding for finding in self.findings if finding.level == level]
            for kind in dict.fromkeys(finding.topic for finding in of_level):
                own = [finding for finding in of_level if finding.topic == kind]
                lines += [f"{severity:<8} {kind}: {len(own)}", *places(own, most)]
        return [*lines, summary(self.findings, CHECKS)]


def check_data_set(path: str, img_format: ImgFormat, *, patch: int = 128) -> CheckReport:
    """Check every image and mask below a training folder, of a data set, or of pairs; no file is changed."""
    if holds_pairs(path):
        return _check_pairs(path, patch)
    findings: list[Finding] = []
    checker = _Checker(patch)
    root = root_of(path)
    images = list_images(training_folder(path), img_format)
    if (hard := root / "train" / HARD_NEGATIVES).is_dir() and any(hard.iterdir()):
        images += list_images(hard, img_format)
    for image in images:
        findings += checker.image(image)
    for split in ("valid", "test"):
        for entry in list_split(root, split, img_format):
            images.append(entry.path)
            findings += checker.image(entry.path)
            if not entry.is_good:
                findings += checker.mask(entry.path, entry.mask)
    return _report(findings, len(images), checker.shape_hw)


def _check_pairs(path: str, patch: int) -> CheckReport:
    """Check every pair: its files, sizes and values, whether the template can be aligned, and its labels."""
    images, checker = list_pair_images(path), _Checker(patch)
    findings = [finding for image in images for finding in checker.pair(image)]
    findings += [
        _finding("warning", "label unused", label, "no test image has its name, so it is not used")
        for label in labels_without_image(path, images)
    ]
    findings += [
        _finding("warning", "mask missing", path, f"it has {UNLABELLED}") for path in unlabelled_among_labelled(images)
    ]
    return _report(findings, len(images), checker.shape_hw)


def _report(findings: list[Finding], num_images: int, shape_hw: tuple[int, int] | None) -> CheckReport:
    findings.sort(key=lambda finding: -LEVELS.index(finding.level))
    return CheckReport(findings, num_images, shape_hw)


def _finding(severity: Severity, kind: str, where: object, text: str) -> Finding:
    return Finding(kind, text, LEVEL_OF[severity], where=str(where))


class _Checker:
    """Checks images and masks, and compares their size with that of the first image."""

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
            yield _finding("error", "cannot be used", path, " ".join([str(error), *messages[:1]]))
            return
        yield from self._size(path, (planes_CHW.shape[1], planes_CHW.shape[2]))
        yield from _values(path, stored, planes_CHW)
        if _is_flat(planes_CHW).any():
            return
        if are_equal(planes_CHW):
            yield _finding("warning", "equal planes", path, EQUAL_PLANES)
            return
        for plane, name in ((1, "ref1"), (2, "ref2")):
            if np.array_equal(planes_CHW[0], planes_CHW[plane]):
                text = f"{name} is identical to target, so nothing can be learned from it"
                yield _finding("note", "copied plane", path, text)
                continue
            dx, dy = displacement(planes_CHW[0], planes_CHW[plane])
            if max(abs(dx), abs(dy)) >= SHIFT_PX:
                text = f"{name} is shifted by {dx:+.0f} px in x and {dy:+.0f} px in y: align it, or set shift_px"
                yield _finding("warning", "misregistered", path, text)

    def pair(self, image: EvaluationImage) -> Iterator[Finding]:
        """The findings of the inspected image of a pair, of its references and of its labels."""
        where, messages = str(image.path), list[str]()
        try:
            with decoder_messages() as messages:
                planes_CHW = read_planes(image)
        except (OSError, DecodeError) as error:
            text = str(error).removeprefix(f"{where}:").strip()
            yield _finding("error", "cannot be used", where, " ".join([text, *messages[:1]]))
            return
        yield from self._size(image.path, (planes_CHW.shape[1], planes_CHW.shape[2]))
        flat = _is_flat(planes_CHW[: 1 + len(image.references)])
        advice = f": {FAINT}" if is_faint(planes_CHW) else ""
        for plane in np.flatnonzero(flat):
            name = ("test image", "template", "second reference")[plane]
            yield _finding("error", "no content", where, f"its {name} is of one grey level{advice}")
        if not flat.any():
            names = ("template", "second reference")[: len(image.references)]
            for name, reference_HW in zip(names, planes_CHW[1:], strict=False):
                if (farthest := _distance_px(planes_CHW[0], reference_HW)) > AlignConfig.reach_px:
                    text = f"its {name} is off by {farthest:.0f} px or more: align it beforehand, or raise align_px"
                    yield _finding("warning", "misregistered", where, text)
        shape_hw = planes_CHW.shape[1], planes_CHW.shape[2]
        if image.mask is not None:
            yield from self.mask(image.path, image.mask, shape_hw, is_pair=True)
        if image.boxes is not None:
            yield from _boxes(image.boxes, shape_hw)

    def mask(
        self, image: Path, mask: Path | None, shape_hw: tuple[int, int] | None = None, *, is_pair: bool = False
    ) -> Iterator[Finding]:
        """The findings of a mask. `shape_hw`: the size of its image; None: that of the first image."""
        if mask is None:
            text = f"there is no {image.stem}_mask.* in the ground truth"
            yield _finding("warning", "mask missing", image, text)
            return
        messages: list[str] = []
        try:
            with decoder_messages() as messages:
                mask_HW = mask_of(read_stored(mask))
        except (OSError, DecodeError) as error:
            yield _finding("error", "cannot be used", mask, " ".join([str(error), *messages[:1]]))
            return
        of, shape_hw = ("its image", shape_hw) if shape_hw is not None else ("the first image", self.shape_hw)
        if shape_hw is not None and mask_HW.shape != shape_hw:
            text = (
                f"the mask is {size_text(mask_HW.shape)} px (width x height), {of} {size_text(shape_hw)}: save it at "
                "the size of its image"
            )
            yield _finding("error", "size", mask, text)
        elif not mask_HW.any():
            if is_pair:
                yield _finding("note", "mask empty", mask, "it marks no pixel: its image counts as good")
            else:
                yield _finding(
                    "warning", "mask empty", mask, "it marks no pixel, although its image is a defective one"
                )
        elif (share := float(mask_HW.mean())) > MOSTLY:
            text = f"it marks {share:.0%} of the pixels; every value above 0 is a defect. Is it inverted?"
            yield _finding("warning", "mask inverted", mask, text)

    def _size(self, path: Path, shape_hw: tuple[int, int]) -> Iterator[Finding]:
        if self.shape_hw is None:
            self.shape_hw = shape_hw
            try:
                Grid.over(shape_hw, self._patch)
            except ConfigError as error:
                yield _finding("error", "size", path, str(error))
        elif shape_hw != self.shape_hw:
            text = (
                f"it has {size_text(shape_hw)} pixels (width x height), the first image {size_text(self.shape_hw)}: "
                "a training needs images of one size; test, predict and calibrate do not"
            )
            yield _finding("error", "size", path, text)


def _boxes(path: Path, shape_hw: tuple[int, int]) -> Iterator[Finding]:
    try:
        boxes = read_boxes(path)
    except DataError as error:
        yield _finding("error", "cannot be used", path, str(error).removeprefix(f"{path}:").strip())
        return
    height, width = shape_hw
    x1_K, y1_K, x2_K, y2_K = boxes.xyxy_K4.T
    outside_K = (x1_K >= width) | (y1_K >= height) | (x2_K <= 0) | (y2_K <= 0)
    if outside_K.any():
        box = " ".join(f"{value:g}" for value in boxes.xyxy_K4[outside_K][0])
        text = f"the box {box} is outside of its image of {size_text(shape_hw)} (width x height)"
        yield _finding("warning", "box outside", path, text)
    if len(boxes.class_K) and boxes.xyxy_K4.max() <= 1:
        text = "all its boxes lie within one pixel: coordinates are pixels, not shares of the size"
        yield _finding("warning", "box outside", path, text)


def _values(path: Path, stored: np.ndarray, planes_CHW: np.ndarray) -> Iterator[Finding]:
    kept = planes_first(stored)
    low, high = float(kept.min()), float(kept.max())
    if low < 0 or high > MAX_GREY:
        text = f"values {low:g} to {high:g} are rescaled to 0..255, all planes together"
        yield _finding("note", "range", path, text)
    advice = f": {FAINT}" if is_faint(planes_CHW) else ""
    for plane in np.flatnonzero(_is_flat(planes_CHW)):
        name = ("target", "ref1", "ref2")[plane]
        shade = "black" if planes_CHW[plane].max() == 0 else "of one grey level"
        yield _finding("error", "no content", path, f"{name} is entirely {shade}{advice}")


def _is_flat(planes_CHW: np.ndarray) -> np.ndarray:
    return np.asarray(planes_CHW.std(axis=(1, 2)) < FLAT_BELOW)


def _distance_px(target_HW: np.ndarray, reference_HW: np.ndarray) -> float:
    """How far a reference is off, along x or y: as blocks of it are, or all of it if that is beyond their reach."""
    shift_GK2, _ = find_shifts(target_HW, reference_HW)
    of_blocks = float(np.median(np.abs(shift_GK2), (0, 1)).max())
    return max(of_blocks, *map(abs, displacement(target_HW, reference_HW)))


def displacement(target_HW: np.ndarray, ref_HW: np.ndarray) -> tuple[int, int]:
    """Shift (x, y) of a reference against target in whole pixels, from their cross-correlation.

    Periodic patterns correlate equally well at many shifts; among those that noise cannot distinguish from the best,
    the smallest shift is returned.
    """
    target, ref = target_HW - target_HW.mean(), ref_HW - ref_HW.mean()
    fit_HW = np.fft.irfft2(np.fft.rfft2(target) * np.conj(np.fft.rfft2(ref)), s=target_HW.shape) / target.size
    energy, best = float((target**2).mean() + (ref**2).mean()), float(fit_HW.max())
    # The residual at the best fit is taken as noise, which gives the scatter of equally good fits.
    scatter = np.sqrt(max(energy - 2 * best, 0.0) * energy / 2 / target.size)
    good = np.argwhere(fit_HW >= best - NOISE_SIGMAS * scatter - SAME_FIT * best)
    height, width = target_HW.shape
    half = np.array([height // 2, width // 2])
    wrapped = (good + half) % np.array(target_HW.shape) - half
    y, x = wrapped[np.argmin(np.abs(wrapped).sum(axis=1))].tolist()
    return -int(x), -int(y)
