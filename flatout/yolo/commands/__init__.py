"""The commands of `flatout yolo`, one file each: `main(argv)` parses the arguments, calls the library and prints.

Files:

    audit         `flatout yolo audit`: find labels that are probably wrong, and write corrected copies of label files
    check         `flatout yolo check`: examine every file of a data set and report what would spoil a training
    convert       `flatout yolo convert`: convert weights to safetensors, to the format of flatout, or to deploy form
    convert_data  `flatout yolo convert-data`: write a data set in another label format
    demo          `flatout demo`: detect with the weights that come with flatout, then train from scratch
    demo_data     `flatout yolo demo-data`: generate a small detection data set to experiment with
    detect        `flatout yolo detect` and detect.py: detect objects in images, videos and streams
    export        `flatout yolo export` and export.py: export a network to ONNX and TorchScript
    flags         The flags of train.py, test.py, detect.py and export.py: help texts, parsers
    group         `flatout yolo group`: assign the classes of a data set to several heads
    info          `flatout yolo info`: the layers, size and cost of a network, and the content of a weights file
    replay        `flatout yolo replay`: show what the network saw in any step of a run
    resize        `flatout yolo resize`: a copy of a data set with smaller images
    stages        `flatout yolo stages`: train in several stages, each from the best weights of the previous one
    test          `flatout yolo test` and test.py: evaluate weights
    train         `flatout yolo train`, train.py and train_aux.py: train a detector
"""
