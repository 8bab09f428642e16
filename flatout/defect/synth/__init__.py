"""Synthetic defects: drawn for whole batches first, then painted, with nothing left to chance in the painting.

Files:

    config  Which defects are drawn, how many, how strong: the recipe of a training's samples
    draw    Every random number of a micro-batch, drawn before a pixel is touched
    paint   Paint drawn defects and lines into patches, and disturb their planes
    pool    The kernels of a run: standard spots, drawn shapes of circuit boards, and points seen through optics
"""
