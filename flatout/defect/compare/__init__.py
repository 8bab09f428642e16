"""Comparison of an image with its references: alignment, differences that are no moved edges, and thresholds.

Files:

    align            Registration of a reference to target: a shift per block, to a fraction of a pixel, on the CPU
    align_files      Aligns one image file to another, and plots the shifts that were found
    align_torch      The registration of `align` in torch: for batches, on any device, without a host-device wait
    calibrate        Chooses a threshold by the number of false blobs, on labelled or on good images
    classical        Finds defects without a network: what differs from an aligned reference by more than edges do
    classical_torch  The differences of `classical` in torch: for batches, on any device, without a host-device wait
"""
