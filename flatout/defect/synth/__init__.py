"""Synthetic defects: parameters are drawn for whole batches, then painted without further randomness.

Files:

    config  Settings of sample synthesis: which defects, how many, how strong
    draw    Draws all random parameters of a micro-batch before any pixel is touched
    paint   Paints defects and lines into patches, and crops patches with disturbed planes
    pool    Kernels, the shapes of defects: Gaussian spots, circuit-board shapes, optical diffraction patterns
"""
