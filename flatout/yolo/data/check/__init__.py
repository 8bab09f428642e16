"""flatout yolo check: look at every file of a data set and say what would spoil a training.

Files:

    facts   What checks look at: the data set, and for each split the files, the scan and the decoded pictures
    files   Checks of the YAML, of paths and of names
    images  Checks of decoded pictures: sizes, damage, and pictures that are there more than once
    labels  Checks of label files as a whole, and of boxes over the whole data set
    run     Run every check over a data set
"""
