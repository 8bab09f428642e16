"""A generated detection data set: textured shapes of six classes on cluttered backgrounds.

    shapes, surfaces -> patch (one object) --+
    background ------------------------------+-> scene (image, boxes) -> files (a data set)

Every image is a function of (seed, split, number), so the set is the same everywhere and nothing has to be downloaded.

Files:

    files  The demo data set on disk: images, labels, a data YAML
    scene  One scene of the demo data set: objects of all classes and sizes on a cluttered background
"""
