"""Detection data sets: from YAML, folders, COCO JSON or VOC to checked labels and decoded pictures. No torch here.

Files:

    anchors       Do the anchors fit the boxes, and which ones would?
    coco          COCO: one JSON file of boxes and polygons for all pictures, classes by name
    data_yaml     The data YAML: which pictures train, validate and test, and what their classes are called
    find          Which files are the pictures of a split, and where are their labels?
    image_set     A data set after the scan: pictures, their sizes and all their labels, as a few flat arrays
    label_cache   Scanned pictures and labels on disk
    label_text    Label text -> classes
    letterbox     Sizes and shapes
    open_data     A data set by its YAML, COCO file or VOC folder, and all pictures of a split with their labels
    open_set      From a data YAML to the pictures of a split, checked and counted
    resized_tree  A copy of a data set with smaller pictures, for `flatout yolo resize`
    scan          Look at all pictures and labels of a data set, in parallel
    check/        flatout yolo check: look at every file of a data set and say what would spoil a training
"""
