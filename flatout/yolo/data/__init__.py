"""Detection data sets: from a YAML and labels in one of ten formats to checked images and labels. No torch.

Files:

    anchors         How well anchors fit the boxes of a data set, and a search for better ones
    coco            COCO annotation files: finding those of a split, and scaling them to resized images
    converted_set   `flatout yolo convert-data`: a data set in another label format
    data_yaml       The data YAML: which images are used to train, validate and test, and the names of the classes
    file_records    The state of files, and a record of each of them, made by the workers of a feed
    find            Find the image files of a split and the label file of each
    image_set       A data set after the scan: images, their sizes and all their labels as a few flat arrays
    label_cache     The label cache: scan results on disk
    label_text      Parsing label files of YOLO text to classes, boxes and polygons
    letterbox       Resizing and letterboxing images, batches of one shape, and the input sizes that a network accepts
    open_data       Open a data set by its YAML, annotation file or folder
    open_set        Open the splits of a data set for training and evaluation: scanned, checked and counted
    output_folder   The folder that `resize` and `convert-data` write a data set to: settings, lock and files
    recorded_files  train_files.csv of a run folder: the training images in their order, so that a change can be named
    resized_tree    `flatout yolo resize`: a copy of a data set with smaller images, and the same labels, names and ids
    scan            Scan the images and labels of a data set in parallel: read headers and labels
    tile_set        A training set of tiles: every image is cut by a grid, each tile is an image with its own labels
    formats/        Label formats: one file each that reads it, and writes it where `convert-data` can
    check/          `flatout yolo check`: examine every file of a data set and report what would spoil a training
"""
