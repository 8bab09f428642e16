"""flatout yolo check: look at every file of a data set and say what would spoil a training.

Files:

    classes       Checks of classes, splits and anchors over the whole data set
    decode_check  Every picture read and decoded, in worker processes
    facts         What checks look at: the data set, and for each split the files, the scan and the decoded pictures
    files         Checks of the YAML, of paths and of names
    from_scan     Checks that the scan makes on its way through pictures and label lines
    images        Checks of decoded pictures: sizes, damage, and pictures that are there more than once
    labels        Checks of label files as a whole, and of boxes over the whole data set
    run           Run every check over a data set
"""
