"""Every plot of every job: batches with their boxes, curves, matrices, statistics. OpenCV and NumPy only.

arrays, results.txt -> a file that people look at

Files:

    boxes       Boxes with their names on a picture
    canvas      A white sheet to plot on, and pairs of axes on it
    evaluation  Charts of an evaluation that need no images: four curves and the confusion matrix
    evolution   evolve.png: the fitness of every generation
    results     results.png: how losses and scores went over the epochs, from results.txt or results.csv
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.charts.boxes import MOST_IMAGES, plot_batch, plot_boxes, plot_detections
    from flatout.charts.canvas import (
        FAINT,
        INK,
        MUTED,
        PAPER,
        Axes,
        Canvas,
        Frame,
        colour_of,
        shortened,
        shortened_file,
        ticks,
        write,
        write_image,
    )
    from flatout.charts.evaluation import (
        ClassCurves,
        as_shown,
        plot_confusion,
        plot_curves,
        plot_label_statistics,
        shade,
    )
    from flatout.charts.evolution import plot_evolution
    from flatout.charts.results import plot_columns, plot_results

__getattr__, __dir__ = face(__name__)
