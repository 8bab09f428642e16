"""The commands of `flatout spike`: each parses, calls the library and prints its result.

Files:

    arguments    Arguments that several commands of `flatout spike` share
    cache        flatout spike cache: write voxels as files
    check        flatout spike check: check configuration, data, loader and network before training
    demo         flatout spike demo: simulate data, train, and show frames before and after
    demo_data    flatout spike demo-data: simulate a small data set to try things on
    export       flatout spike export: export a network for whole frames as an ONNX file
    predict      flatout spike predict: deblur a folder of frames
    prepare      flatout spike prepare: arrange the files of a data set as training expects them
    reconstruct  flatout spike reconstruct: images from spikes alone
    simulate     flatout spike simulate: make a training set from your own video
    test         flatout spike test: score weights on a split
    train        flatout spike train: train a deblurring network
    view         flatout spike view: show a spike stream as a sheet of images or as a video
"""
