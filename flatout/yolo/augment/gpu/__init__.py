"""Augmentation on the GPU: workers draw numbers, kernels or torch paint pictures that stay on the device.

Files:

    batches        Batches finished on the device
    chroma         Pictures kept at half of their bytes (4:2:0)
    input          The input of training and validation from pictures that stay on the device
    jpeg           JPEG files decoded by the GPU and resized there, for a store
    labels_torch   Open labels made targets, in plain torch, on any device
    labels_triton  Open labels made targets by one Triton kernel
    paste_torch    Objects pasted over finished pictures, in plain torch, one after the other
    paste_triton   Objects pasted over finished pictures by one Triton kernel. The same bits as paste_torch.py
    render_torch   Pictures of a batch from parameters, in plain torch, on any device
    render_triton  Pictures of a batch from parameters by one Triton kernel, straight into the network's input
    source         Samples for the device
"""
