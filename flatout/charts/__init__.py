"""Every plot of every job: batches with their boxes, curves, matrices, statistics. OpenCV and NumPy only.

arrays, results.txt -> a file that people look at

Files:

    axes              A pair of axes on a sheet
    boxes             Boxes with their names on a picture
    evaluation        Charts of an evaluation that need no images: four curves and the confusion matrix
    evolution         evolve.png: the fitness of every generation
    label_statistics  What the labels of a data set are like
    results           results.png: how losses and scores went over the epochs, from results.txt or results.csv
    sheet             A white sheet to draw charts on
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.charts.axes import Axes, Place, ticks
    from flatout.charts.boxes import MOST_IMAGES, draw_batch, draw_boxes, draw_detections
    from flatout.charts.evaluation import ClassCurves, as_shown, draw_confusion, draw_curves, shade
    from flatout.charts.evolution import evolve_png
    from flatout.charts.label_statistics import draw_label_statistics
    from flatout.charts.results import results_png, table_png
    from flatout.charts.sheet import (
        FAINT,
        INK,
        MUTED,
        PAPER,
        Sheet,
        colour_of,
        shortened,
        shortened_file,
        write,
        write_picture,
    )

__getattr__, __dir__ = face(__name__)
