"""Networks from model YAML: `build_network(load_config("yolov7-tiny"))`.

    config (YAML) --spec.py--> ModelSpec (checked rows, shapes) --network.py--> Network (modules) --> fuse, deploy, info

Files:

    configs              Model configs found by path or by name
    convolution_kernels  Triton kernels of convolutions.py
    convolutions         Convolutions for which cuDNN has no fast kernels, by our own kernels on a GPU
    deploy               Deploy form and fusing: simpler networks for inference that give the same boxes
    fused                Batch norm with activation, pooling, copies and sums, by our own kernels on a GPU
    fused_kernels        Triton kernels of fused.py, on channels_last maps
    info                 Descriptions of networks and weights files: layers, parameters, GFLOPS
    layers               The torch modules of model rows and of single-head detection layers
    module_specs         The modules of a model YAML: their arguments, output shapes and parameter counts
    network              Detection networks: a ModelSpec as a torch module, test-time augmentation and ensembles
    spec                 Model configs parsed into a checked ModelSpec
"""
