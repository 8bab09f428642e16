"""A detection data set that draws itself: six kinds of textured shapes before cluttered grounds.

    outlines, surfaces -> stamp (one object) --+
    what is behind ----------------------------+-> scene (picture, boxes) -> files (a data set)

Every picture is a function of (seed, number), so the set is the same everywhere and nothing has to be fetched.

Files:

    files  The set on disk: pictures, labels, a data YAML, and a note by which a later call knows its own files
    scene  One picture of the set: objects of all kinds and sizes before a ground, and where they are
"""
