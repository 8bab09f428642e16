"""results.png of any job, from the columns of its results.csv."""

from pathlib import Path

import cv2
import numpy as np

from flatout.charts import plot_columns
from flatout.charts.results import LEFT, WIDTH


def plot(folder: Path, text: str, names: tuple[str, ...]) -> np.ndarray | None:
    (folder / "results.csv").write_text(text)
    path = plot_columns(folder / "results.csv", names, folder / "results.png")
    return None if path is None else cv2.imread(str(path))


def test_there_is_a_panel_for_every_column_that_has_values(tmp_path: Path):
    rows = "epoch,loss,psnr,ssim\n0,0.1,20.5,\n1,0.01,21.5,\n"
    two, one = plot(tmp_path, rows, ("loss", "psnr", "ssim", "missing")), plot(tmp_path, rows, ("psnr",))
    assert two is not None and one is not None
    assert two.shape[0] == one.shape[0] and two.shape[1] > 1.5 * one.shape[1]


def test_a_loss_is_plotted_as_a_logarithm(tmp_path: Path):
    """A loss that falls by a decade per epoch is a straight line: its middle is half way down."""
    image = plot(tmp_path, "epoch,loss\n0,1\n1,0.1\n2,0.01\n", ("loss",))
    assert image is not None
    zoom = image.shape[1] / (LEFT + WIDTH + 24)
    coloured = np.ptp(image.astype(int), axis=2) > 60
    ys = [np.flatnonzero(coloured[:, round((LEFT + share * WIDTH) * zoom)]).mean() for share in (0.01, 0.5, 0.99)]
    assert ys[0] < ys[1] < ys[2] and abs(ys[1] - (ys[0] + ys[2]) / 2) < 4


def test_nothing_is_plotted_without_values(tmp_path: Path):
    assert plot(tmp_path, "epoch,loss,psnr\n", ("loss", "psnr")) is None
    assert plot(tmp_path, "epoch,loss,psnr\n0,0.1,\n", ("psnr",)) is None
    assert not (tmp_path / "results.png").exists()
