"""Plots of all jobs, made with OpenCV and NumPy only: batches with their boxes, curves, matrices, statistics.

    arrays, results.txt, results.csv, evolve.csv -> image files for people

Files:

    boxes       Boxes with class names on images, and batches of such images as one plot
    canvas      A white canvas to plot on, axes on it, and the colours and letters of all charts
    evaluation  Charts without images: confusion matrix, curves of an evaluation
    evolution   evolve.png: the fitness of every generation, over time and by hyper-parameter, from evolve.csv
    results     results.png: losses and scores over the epochs, from results.txt or results.csv
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.charts.boxes import MAX_IMAGES, Boxes, plot_batch, plot_boxes, plot_detections, plot_grid
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
