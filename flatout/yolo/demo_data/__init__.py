"""A detection data set that draws itself: six kinds of textured shapes before cluttered grounds.

    shapes (outlines), surfaces (colours) -> stamp (one object) --+
    ground (what is behind) --------------------------------------+-> scene (picture, boxes) -> files (a data set)

Every picture is a function of (seed, number), so the set is the same everywhere and nothing has to be fetched.
"""
