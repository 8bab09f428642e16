"""Augmentation on the GPU: workers draw parameters, kernels or torch render images that stay on the device.

Files:

    batches        Batches finished on the device: rendered, with objects pasted, labels finished and targets padded
    chroma         Images stored as 4:2:0, in half of the bytes: brightness of every pixel
    input          The input of training and validation from images that stay on the device
    jpeg           JPEG files decoded and resized on the GPU, for a store: nvJPEG
    labels_torch   Deferred labels turned into targets in plain torch, on any device: the twin of labels_triton.py
    labels_triton  Deferred labels turned into targets by one Triton kernel: the bits of labels_torch.py
    paste_torch    Objects pasted over finished images, and polygons filled into masks, in plain torch
    paste_triton   Objects pasted over finished images, and polygons filled into masks, by Triton kernels
    render_torch   Images of a batch rendered from parameters in plain torch, on any device
    render_triton  Images of a batch rendered from parameters by one Triton kernel, directly into the network's input
    source         Sources for the device: workers draw parameters, and make the labels or defer them to the device
"""
