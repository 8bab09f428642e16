"""Augmentation: all random numbers of a batch are drawn, then images and labels follow from them. See docs/augment.md.

`draw.AugmentConfig` holds probabilities and ranges. On the CPU, `source.TrainingSource` and `source.ValidationSource`
give samples made by OpenCV to a feed. On a device, `gpu.input.training_input` and `gpu.input.validation_input` give
whole batches, without OpenCV.

Files:

    c_library       C files of this package, compiled once for this CPU, kept in the cache folder and loaded from there
    draw            Every random decision of a batch, as arrays: which tiles, where, how warped, coloured, mixed
    labels          Labels of canvases: gathered from the data set, warped, filtered and made targets
    layout          Geometry of canvases: where every tile lies, how the canvas is warped
    paint           Pixels of a sample in OpenCV: the classic painter, the fast painter, and objects pasted in
    paint_compiled  Pixels of a sample by pixels.c: the bytes of `paint.Classic`
    paste           Which objects are pasted where, and their labels: into a finished image
    samples         What CPU and device sources share: resized images as store items, draws of training samples
    source          Samples for training and validation on the CPU: their sources for the feed
    gpu/            Augmentation on the GPU: workers draw parameters
"""
