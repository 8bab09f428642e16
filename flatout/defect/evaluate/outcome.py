"""What an evaluation found, and the numbers that come of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from flatout.defect.evaluate.detections import Located, recall_at, recall_at_false_positives
from flatout.defect.evaluate.ranking import Ranking

RANKS = (30, 50, 150, 500)
FALSE_POSITIVES = (0.1, 1.0)
"""Per image, at which the recall of defects is told."""
DEFAULT_THRESHOLD = 0.5


@dataclass(frozen=True)
class ImageRow:
    """One line of the table of images."""

    name: str
    is_defective: bool | None
    """None: nobody knows."""
    peak: float
    """Largest probability, the image's own score."""
    num_defects: int
    num_found: int
    """Of its defects, those with a detection on them."""
    num_detections: int


@dataclass(frozen=True)
class Outcome:
    """Numbers over all images. What cannot be told, because a class or all truth is missing, is None."""

    pixels: Ranking
    images: Ranking
    rows: list[ImageRow]
    located: list[Located] = field(default_factory=list)
    hits: list[tuple[float, int | None]] = field(default_factory=list)
    """Every detection: score and the number of the defect it lies on."""
    num_judged: int = 0
    seconds: float = 0.0
    chosen_threshold: float | None = None
    """What was set beforehand; else the one that suits these images best."""

    @property
    def num_defects(self) -> int:
        return sum(row.num_defects for row in self.rows)

    @property
    def fitness(self) -> float:
        """Pixel average precision: AUROC is near 1 for anything, with a pixel in two thousand positive."""
        return self.pixels.average_precision or 0.0

    @property
    def threshold(self) -> float:
        if self.chosen_threshold is not None:
            return self.chosen_threshold
        best = self.pixels.best_f1()
        return DEFAULT_THRESHOLD if best is None else best[1]

    def scores(self) -> dict[str, float | None]:
        best = self.pixels.best_f1()
        scores: dict[str, float | None] = {
            "pixel_AUROC": self.pixels.auroc,
            "pixel_AP": self.pixels.average_precision,
            "pixel_best_F1": None if best is None else best[0],
            "pixel_IoU": self.pixels.iou_at(self.threshold) if best is not None else None,
            "threshold": self.threshold,
            "image_AUROC": self.images.auroc,
        }
        for per_image in FALSE_POSITIVES:
            scores[f"recall@{per_image:g}FP"] = recall_at_false_positives(
                self.hits, num_defects=self.num_defects, num_images=self.num_judged, per_image=per_image
            )
        return scores

    def recalls(self) -> Mapping[int, float]:
        """Recall@K over the images whose name tells where their defect is."""
        return recall_at(self.located, RANKS)

    def __str__(self) -> str:
        shown = [f"{name} {'n/a' if value is None else f'{value:.4f}'}" for name, value in self.scores().items()]
        shown += [f"recall@{num} {value:.3f}" for num, value in self.recalls().items()]
        return "  ".join(shown)
