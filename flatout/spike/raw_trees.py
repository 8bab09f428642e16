"""Where the parts of a sequence lie in the trees that data sets come as.

    A  GoPro-Spike   <rgb>/{train,test}/<seq>/{blur,blur_gamma,sharp}/     <spikes>/{train,test}/<seq>/spike/
    B  regrouped     <rgb>/{train,test}_GT_blurred/<seq>/, {train,test}_GT/<seq>/     spikes as A
    C  S-SDM         <rgb>/{train,test}/{blur_data,sharp_data}/<seq>/      <spikes>/{train,test}/spike_data/<seq>/

X4K1000FPS-Spike keeps one stream per clip, which has to be cut: `x4k.py`.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

PARTS = ("blur", "sharp", "spike")
REASONS = {
    "no_spike_split": "the spike tree has no such split",
    "no_gopro_split": "the RGB tree has no such split",
    "no_gopro_sequence": "the RGB tree has no such sequence",
    "no_blur_or_sharp": "its blurry or sharp frames are missing",
    "no_spike_dir": "its folder 'spike' is missing",
}
"""Why a split or sequence is left out, in the order in which it is looked at."""


class RawTree(NamedTuple):
    """The roots of a data set."""

    rgb: Path
    spikes: Path
    blur_dir: str = "blur"
    """Of layout A: `blur` or `blur_gamma`."""


class Found(NamedTuple):
    """A sequence, or a whole split that cannot be used."""

    sequence: str | None
    reason: str
    """A key of REASONS; empty if all is there."""
    parts: dict[str, Path]
    """Folders by PARTS; empty with a reason."""


class _Where(NamedTuple):
    """Folders of one sequence, whether they exist or not."""

    sequence: Path | None
    """That holds blur and sharp; None where each part has its own tree."""
    blur: Path
    sharp: Path
    spike: Path


def sequences_of(tree: RawTree, split: str) -> Iterator[Found]:
    """By name, as the spike tree has them, each with its folders or with what it lacks."""
    spikes = tree.spikes / split / "spike_data" if _is_grouped(tree, split) else tree.spikes / split
    if not spikes.is_dir():
        yield Found(None, "no_spike_split", {})
        return
    places = _layout(tree, split)
    if places is None:
        yield Found(None, "no_gopro_split", {})
        return
    for folder in sorted(path for path in spikes.iterdir() if path.is_dir()):
        yield _found(folder.name, places(folder))


def _layout(tree: RawTree, split: str) -> Callable[[Path], _Where] | None:
    """From the spike folder of a sequence to the folders of its parts."""
    rgb = tree.rgb / split
    if _is_grouped(tree, split):
        return lambda spikes: _Where(
            None, rgb / "blur_data" / spikes.name, rgb / "sharp_data" / spikes.name, spikes
        )  # fmt: skip
    if rgb.is_dir():
        return lambda spikes: _Where(
            rgb / spikes.name, rgb / spikes.name / tree.blur_dir, rgb / spikes.name / "sharp", spikes / "spike"
        )
    if (tree.rgb / f"{split}_GT").is_dir():
        blurred, sharp = tree.rgb / f"{split}_GT_blurred", tree.rgb / f"{split}_GT"
        return lambda spikes: _Where(None, blurred / spikes.name, sharp / spikes.name, spikes / "spike")
    return None


def _is_grouped(tree: RawTree, split: str) -> bool:
    """Layout C: the parts are above the sequences."""
    return (tree.rgb / split / "blur_data").is_dir()


def _found(name: str, where: _Where) -> Found:
    is_known = where.sequence.is_dir() if where.sequence else where.blur.is_dir() or where.sharp.is_dir()
    if not is_known:
        return Found(name, "no_gopro_sequence", {})
    if not (where.blur.is_dir() and where.sharp.is_dir()):
        return Found(name, "no_blur_or_sharp", {})
    if not where.spike.is_dir():
        return Found(name, "no_spike_dir", {})
    return Found(name, "", dict(zip(PARTS, (where.blur, where.sharp, where.spike), strict=True)))
