"""The commands of `flatout defect`: each parses, calls one library function, and prints its result.

Files:

    check      flatout defect check: look at every file of a data set and say what would spoil a training
    demo       flatout defect demo: a network trained from nothing, on strips that it draws itself
    demo_data  flatout defect demo-data: draw a small data set to try things on
    export     flatout defect export: a network for whole images as an ONNX file
    flags      The command lines of the defect job: words and a YAML file in, options out
    predict    flatout defect predict: heat maps and detections of any images
    test       flatout defect test: heat maps of test images, and how good they are
    train      flatout defect train: train a network on defect-free images
"""
