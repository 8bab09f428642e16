"""`flatout yolo check`: examine every file of a data set and report what would spoil a training.

Files:

    facts   What checks work on: facts about a data set, the registry of all checks
    files   Checks of the data YAML, of paths and file names, and of classes, splits and anchors over the whole data set
    images  Checks of decoded images: their size, damage, and copies within and between splits
    labels  Checks of label files and of the boxes in them, and the list of checks that the scan makes by itself
    run     Run every check on a data set
"""
