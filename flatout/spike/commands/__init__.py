"""The commands of `flatout spike`, one file each: `main(argv)` parses, calls the library, prints.

Files:

    arguments  What the commands of `flatout spike` ask for alike
    cache      flatout spike cache: voxels as files
    check      flatout spike check: configuration, data, one sample, loader, network
    demo       flatout spike demo: simulate a moving scene, train on it, show before and after
    demo_data  flatout spike demo-data: simulate a small data set
    predict    flatout spike predict: deblur a folder of frames
    prepare    flatout spike prepare: the unified tree
    test       flatout spike test: score weights
    train      flatout spike train: train a deblurring network
"""
