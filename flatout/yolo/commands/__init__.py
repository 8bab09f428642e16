"""The commands of `flatout yolo`, one file each: `main(argv)` parses, calls the library, prints.

Files:

    check      flatout yolo check: look at every file of a data set and say what would spoil a training
    convert    flatout yolo convert: weights to safetensors, to a file of ours, to deploy form
    demo       `flatout demo`: detection with the weights that come with flatout, then a training from nothing
    demo_data  flatout yolo demo-data: draw a small detection data set to try things on
    detect     flatout yolo detect and detect.py: find objects in pictures, videos and streams
    export     flatout yolo export and export.py: a network as a file for other programs
    flags      The command lines of train.py and test.py: words in, options out
    group      flatout yolo group: share the classes of a data set out to several heads
    info       flatout yolo info: the layers, size and cost of a network, and what a file of weights holds
    resize     flatout yolo resize: a copy of a data set with smaller pictures
    stages     flatout yolo stages: several trainings as one job, each from the best weights of the one before
    test       flatout yolo test and test.py: evaluate weights
    train      flatout yolo train, train.py and train_aux.py: train a detector
"""
