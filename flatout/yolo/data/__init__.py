"""Detection data sets: from a YAML, folders, COCO JSON or Pascal VOC to checked images and labels. No torch.

Files:

    anchors       How well anchors fit the boxes of a data set, and a search for better ones
    coco          COCO annotation files: reading them as labels, finding those of a split, scaling to resized images
    data_yaml     The data YAML: which images are used to train, validate and test, and the names of the classes
    find          Find the image files of a split and the label file of each
    image_set     A data set after the scan: images, their sizes and all their labels; and sampling weights
    label_cache   The label cache: scan results on disk
    label_text    Parsing label files: YOLO text and Pascal VOC XML to classes, boxes and polygons
    letterbox     Resizing and letterboxing images, rectangular batches, and input sizes that a network accepts
    open_data     Open a data set by its YAML, COCO file or Pascal VOC folder, and scan the images of a split
    open_set      Open the splits of a data set for training and evaluation: scanned, checked and counted
    resized_tree  `flatout yolo resize`: a copy of a data set with smaller images
    scan          Scan the images and labels of a data set in parallel
    check/        `flatout yolo check`: examine every file of a data set and report what would spoil a training
"""
