"""Augmentation: all random numbers of a batch are drawn, then images and labels follow from them. See docs/augment.md.

`draw.AugmentConfig` holds probabilities and ranges. On the CPU, `source.TrainingSource` and `source.ValidationSource`
give samples made by OpenCV to a feed. On a device, `gpu.input.training_input` and `gpu.input.validation_input` give
whole batches, without OpenCV.

Files:

    c_library       C files of this package, compiled once for this CPU, kept in the cache folder and loaded from there
    draw            Every random decision of a batch, as arrays
    labels          Labels of canvases: gathered from the data set, warped, filtered and made targets
    layout          Geometry of canvases: where every tile lies, how the canvas is warped, and which tiles it shows
    paint           Pixels of a sample in OpenCV: the classic painter, the fast painter, and objects pasted in
    paint_compiled  Pixels of a sample by pixels.c
    paste           Which objects are pasted where, and their labels
    samples         What CPU and device sources share: resized images as store items, draws, letterboxed samples
    source          Samples for training and validation on the CPU: their sources for the feed, and the renderer
    gpu/            Augmentation on the GPU
"""
