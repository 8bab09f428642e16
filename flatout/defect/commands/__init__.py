"""The commands of `flatout defect`: each parses, calls one library function and prints its result.

Files:

    align      flatout defect align: align a reference to an image and show the shifts that were found
    calibrate  flatout defect calibrate: choose the threshold by the number of false blobs
    check      flatout defect check: check every file of a data set before training
    demo       flatout defect demo: generate strips, train on them and show the results
    demo_data  flatout defect demo-data: generate a small data set to try things on
    export     flatout defect export: export a network for whole images as an ONNX file
    flags      Command-line parsing of the defect job: arguments and a YAML file to options
    predict    flatout defect predict: compute heat maps and detections of any images
    test       flatout defect test: compute heat maps of test images and score them
    train      flatout defect train: train a network on defect-free images
"""
