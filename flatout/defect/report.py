"""The result of a test as one HTML page: scores, missed defects, false blobs and the worst images; works offline.

    images --add--> the most telling ones, as small pictures --page--> HTML with its pictures inside

Only pictures that are shown are kept, so that a report of many images takes no more memory than one of a few.

Dimension key:  C planes   H W image
"""

import base64
from collections.abc import Callable, Mapping
from functools import partial
from html import escape
from pathlib import Path

import numpy as np

from flatout.defect.evaluate.blobs import Blob, BlobImage, Region
from flatout.defect.evaluate.evaluate import EvaluatedImage
from flatout.defect.plots import grey, overlay
from flatout.errors import counted

MAX_CROPS, MAX_IMAGES = 24, 12
"""Crops per section, and whole images, that are shown."""
MAX_CROPS_OF_IMAGE = 4
"""Crops of one image per section, so that one bad image does not fill the page."""
MIN_CROP_PX, MAX_CROP_PX = 48, 256
"""Least side of a crop; one that is larger than the second is reduced to it."""
BOX_DISTANCE = 4
"""Pixels between a defect and the box around it."""
SHORT_SIDE_PX, LONG_SIDE_PX = 420, 900
"""Size to which whole images are reduced: the first for squares, the second for the long side of a strip."""
_FOUND, _MISSED, _FALSE = (148, 165, 18), (77, 72, 229), (21, 107, 247)
"""Colours of boxes in BGR, those of the page."""

MEANINGS = {
    "pixel_AUROC": "a defective pixel outranks a good one; near 1 for any network, since few pixels are defective",
    "pixel_AP": "average precision of pixels",
    "pixel_AUPRO": "overlap per defect up to 30 % false positive pixels; every defect counts equally",
    "pixel_best_F1": "upper bound of F1: its threshold is chosen on these images",
    "pixel_IoU": "intersection over union of pixels at the threshold",
    "threshold": "heat at or above which a pixel counts as defect",
    "image_AUROC": "a defective image outranks a good one, by its highest heat",
    "pixel_F1": "F1 of pixels at the threshold",
    "image_F1": "F1 of the verdicts: an image fails if any of its pixels reaches the threshold",
    "blob_AP": "average precision of blobs, ranked by their highest heat",
    "blob_recall": "share of defects that a blob hits",
    "false_blobs_per_image": "blobs that hit no defect, per labelled image",
    "recall@0.1FP": "share of defects found with at most one false detection in ten images",
    "recall@1FP": "share of defects found with at most one false detection per image",
}
"""Score -> what it says."""
HEAD_SCORES = {
    "pixel_AUPRO": "AU-PRO",
    "image_AUROC": "image AUROC",
    "image_F1": "F1 of verdicts",
    "blob_recall": "of the defects found",
    "false_blobs_per_image": "false blobs per image",
}
"""Scores at the head of the page, with their names there."""


class Report:
    """Collects pictures while images are processed. Nothing is written before `page` is."""

    def __init__(self, threshold: float) -> None:
        """`threshold`: that of the blobs, which the colours of heat maps are relative to."""
        self._threshold = threshold
        self._missed, self._false, self._found = (_Best(MAX_CROPS) for _ in range(3))
        self._worst = _Best(MAX_IMAGES)
        self._images: list[BlobImage] = []

    def add(self, name: str, evaluated: EvaluatedImage, found: BlobImage) -> None:
        """Take the pictures of an image that are among those to be shown."""
        self._images.append(found)
        for missed in found.missed[:MAX_CROPS_OF_IMAGE]:
            make = partial(_crops_card, "missed", name, evaluated, missed, self._threshold)
            self._missed.offer((missed.area_px,), make)
        best, kind = (self._false, "false") if found.is_labelled else (self._found, "found")
        blobs = sorted(found.false_blobs if found.is_labelled else found.blobs, key=_rank, reverse=True)
        for blob in blobs[:MAX_CROPS_OF_IMAGE]:
            best.offer(_rank(blob), partial(_crops_card, kind, name, evaluated, blob, self._threshold))
        if num_wrong := len(found.missed) + len(found.false_blobs):
            self._worst.offer((num_wrong,), partial(_image_card, name, evaluated, found))

    def page(self, scores: Mapping[str, float | None], *, title: str) -> str:
        """The complete HTML document."""
        css = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
        parts = [f"<h1>{escape(title)}</h1>", self._summary(scores)]
        if any(image.is_labelled for image in self._images):
            parts += [self._missed_section(), self._false_section(), self._worst_section(), _table(scores)]
        if any(not image.is_labelled for image in self._images):
            parts.append(self._found_section())
        return (
            f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
            f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{css}</style></head>'
            f"<body><main>{''.join(parts)}</main></body></html>\n"
        )

    def _summary(self, scores: Mapping[str, float | None]) -> str:
        num_failed = sum(image.verdict == "fail" for image in self._images)
        figures = [(f"{num_failed} of {len(self._images)}", "images fail")]
        for name, label in HEAD_SCORES.items():
            if (value := scores.get(name)) is not None:
                figures.append((f"{value:.1%}" if name == "blob_recall" else f"{value:.3f}", label))
        blocks = "".join(f"<div><b>{value}</b><span>{label}</span></div>" for value, label in figures)
        threshold = scores["threshold"]
        return (
            f'<div class="numbers">{blocks}</div><p class="soft">At a threshold of {threshold:.4g}. An image fails if '
            "it has a blob: connected pixels whose heat reaches the threshold. images.csv and blobs.csv list all.</p>"
        )

    def _missed_section(self) -> str:
        num = sum(len(image.missed) for image in self._images)
        of = counted(sum(image.num_defects for image in self._images), "labelled defect")
        return _section(f"Missed: {num} of {of}", "Largest first.", self._missed, num)

    def _false_section(self) -> str:
        num = sum(len(image.false_blobs) for image in self._images)
        return _section(f"False: {counted(num, 'blob')} on no defect", "Highest heat first.", self._false, num)

    def _worst_section(self) -> str:
        num = sum(bool(image.missed or image.false_blobs) for image in self._images)
        colours = (("found", "found defect"), ("missed", "missed defect"), ("false", "false blob"))
        key = "".join(f'<span><i style="--colour:var(--{name})"></i>{text}</span>' for name, text in colours)
        title = f"Worst: {counted(num, 'image')} with a missed defect or a false blob"
        return _section(
            title, "Most mistakes first.", self._worst, num, key=f'<div class="key">{key}</div>', kind=" wide"
        )

    def _found_section(self) -> str:
        num = sum(len(image.blobs) for image in self._images if not image.is_labelled)
        return _section(
            f"Found: {counted(num, 'blob')} in images without a label", "Highest heat first.", self._found, num
        )


class _Best:
    """The highest of what is offered, each made only if it is among them."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: list[tuple[tuple[float, ...], str]] = []

    def offer(self, rank: tuple[float, ...], make: Callable[[], str]) -> None:
        if len(self._kept) == self._limit and rank <= self._kept[-1][0]:
            return
        self._kept = sorted([*self._kept, (rank, make())], key=lambda entry: entry[0], reverse=True)[: self._limit]

    @property
    def cards(self) -> list[str]:
        return [card for _, card in self._kept]


def _rank(blob: Blob) -> tuple[float, ...]:
    return blob.score, blob.area_px


def _section(title: str, order: str, best: _Best, num: int, *, key: str = "", kind: str = "") -> str:
    """A section with the best of `num` cards."""
    if not best.cards:
        return f'<section><h2>{title}</h2><p class="soft">Nothing to show.</p></section>'
    left_out = num - len(best.cards)
    more = f" {left_out:,} more {'is' if left_out == 1 else 'are'} not shown." if left_out else ""
    return (
        f'<section><h2>{title}</h2><p class="soft">{order}{more}</p>{key}'
        f'<div class="cards{kind}">{"".join(best.cards)}</div></section>'
    )


def _table(scores: Mapping[str, float | None]) -> str:
    rows = "".join(
        f"<tr><td>{escape(name)}</td><td>{'n/a' if value is None else f'{value:.4f}'}</td>"
        f"<td>{escape(_meaning(name))}</td></tr>"
        for name, value in scores.items()
    )
    return f"<section><h2>All scores</h2><table>{rows}</table></section>"


def _meaning(name: str) -> str:
    if name.startswith("recall@") and name not in MEANINGS:
        return "share of the defects whose position is in the file name that are among this many best detections"
    return MEANINGS.get(name.partition("[")[0], "")


# Cards: a picture with its caption


def _crops_card(kind: str, name: str, evaluated: EvaluatedImage, found: Blob | Region, threshold: float) -> str:
    x1, y1, x2, y2 = found[:4]
    highest = found.score if isinstance(found, Blob) else float(evaluated.heat_HW[y1:y2, x1:x2].max())
    rows, columns = crop_around((x1, y1, x2, y2), (evaluated.heat_HW.shape[0], evaluated.heat_HW.shape[1]))
    target, ref1 = (grey(plane_HW[rows, columns]) for plane_HW in evaluated.planes_CHW[:2])
    mask_HW = None if evaluated.mask_HW is None else evaluated.mask_HW[rows, columns]
    heat_HW = evaluated.heat_HW[rows, columns]
    heat = overlay(evaluated.planes_CHW[0][rows, columns], heat_HW, mask_HW, threshold=threshold)
    crops = "".join(
        f'<div><img alt="{label}" src="{_data_uri(_reduced(crop, MAX_CROP_PX))}">{label}</div>'
        for label, crop in (("target", target), ("ref1", ref1), ("heat", heat))
    )
    text = f"x {x1} to {x2 - 1}, y {y1} to {y2 - 1}; {found.area_px} px, heat up to {highest:.3f}"
    return (
        f'<figure class="{kind}"><div class="crops">{crops}</div>'
        f"<figcaption>{escape(name)}<br><span>{text}</span></figcaption></figure>"
    )


def _image_card(name: str, evaluated: EvaluatedImage, found: BlobImage) -> str:
    height, width = evaluated.heat_HW.shape
    is_strip = max(height, width) > 2 * min(height, width)
    picture = _whole_image(evaluated.planes_CHW[0], found, LONG_SIDE_PX if is_strip else SHORT_SIDE_PX)
    is_turned = is_strip and height > width
    if is_turned:
        picture = np.rot90(picture)
    facts = [
        f"{counted(found.num_defects, 'defect')}, {len(found.missed)} missed",
        counted(len(found.false_blobs), "false blob"),
        f"verdict: {found.verdict}",
        *(["turned left"] if is_turned else []),
    ]
    return (
        f'<figure><img alt="{escape(name)}" src="{_data_uri(picture)}">'
        f"<figcaption>{escape(name)}<br><span>{'; '.join(facts)}</span></figcaption></figure>"
    )


# Pictures


def crop_around(box_xyxy: tuple[int, int, int, int], shape_hw: tuple[int, int]) -> tuple[slice, slice]:
    """Rows and columns of a square around a box, twice as large as it and inside the image as far as possible."""
    x1, y1, x2, y2 = box_xyxy
    side = max(MIN_CROP_PX, 2 * max(x2 - x1, y2 - y1))

    def span(center: int, length: int) -> slice:
        begin = max(0, min(center - side // 2, length - side))
        return slice(begin, min(length, begin + side))

    return span((y1 + y2) // 2, shape_hw[0]), span((x1 + x2) // 2, shape_hw[1])


def _whole_image(target_HW: np.ndarray, found: BlobImage, max_px: int) -> np.ndarray:
    """Target with boxes around blobs and missed defects, uint8 BGR [H, W, 3], at most `max_px` long."""
    import cv2

    picture = _reduced(grey(target_HW), max_px)
    scale = picture.shape[0] / target_HW.shape[0]
    marks = [(blob[:4], _FOUND if blob.hits else _FALSE) for blob in found.blobs]
    marks += [(missed[:4], _MISSED) for missed in found.missed]
    for (x1, y1, x2, y2), colour in marks:
        corners = (x1 - BOX_DISTANCE, y1 - BOX_DISTANCE), (x2 + BOX_DISTANCE, y2 + BOX_DISTANCE)
        low, high = (tuple(round(value * scale) for value in corner) for corner in corners)
        cv2.rectangle(picture, low, high, colour, 2)
    return picture


def _reduced(picture: np.ndarray, max_px: int) -> np.ndarray:
    import cv2

    scale = max_px / max(picture.shape[:2])
    if scale >= 1:
        return np.ascontiguousarray(picture)
    return np.asarray(cv2.resize(picture, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA))


def _data_uri(picture: np.ndarray) -> str:
    """A picture as the text of a link that contains it: PNG if it is small, since JPEG blurs single pixels."""
    import cv2

    kind = "png" if max(picture.shape[:2]) <= MAX_CROP_PX else "jpeg"
    content = cv2.imencode(f".{kind}", picture)[1].tobytes()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
