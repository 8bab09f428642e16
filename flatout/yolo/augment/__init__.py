"""Augmentation: all random numbers of a batch are drawn, then pictures and labels follow. See docs/augment.md.

`config.AugmentConfig` says how much; `source.TrainingSource` and `source.ValidationSource` give samples made by OpenCV
to a feed; `gpu.input.training_input` and `gpu.input.validation_input` give batches made on a device, without it.

Files:

    c_library       A C file of ours, compiled once for this CPU and kept in the cache folder
    draw            Every random decision of a batch, as arrays
    labels          Labels on the canvases of sheets: gathered from the data set for a whole micro-batch, in pixels
    layout          Where every tile of every sheet lies, and how the sheet is then warped
    paint           Pixels of a sample in OpenCV: the plain way, the fast way, and objects pasted in
    paint_compiled  Pixels of a sample by pixels.c
    paste           Where objects are pasted into a finished picture: twenty attempts, from large to small
    samples         Pictures of a data set, decoded and resized: what a store keeps, and what sources read
    source          Samples for training and validation, as the feed reads them
    gpu/            Augmentation on the GPU
"""
