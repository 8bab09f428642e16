"""Networks from model YAML: `build_network(load_config("yolov7-tiny"))`.

    config (YAML) --spec.py--> ModelSpec (checked rows, shapes) --network.py--> Network (modules) --> fuse, deploy, info

Files:

    configs              Model configs found by path or by name
    convolution_kernels  Triton kernels of convolutions.py
    convolutions         Convolutions for which cuDNN has no fast kernels, by our own kernels on a GPU
    copies               Upsampling, concatenation and sums of gradients, by our own kernels on a GPU
    deploy               Deploy form and fusing: simpler networks for inference that give the same boxes
    fused                Batch norm with activation, by our own kernels on a GPU, and what all our kernels share
    fused_kernels        Triton kernels of fused.py, pooling.py and copies.py, on channels_last maps
    info                 Descriptions of networks and weights files: layers, parameters, GFLOPS
    layers               The torch modules of model rows and of single-head detection layers
    module_specs         The modules of a model YAML: their arguments, output shapes and parameter counts
    network              Detection networks: a ModelSpec as a torch module, test-time augmentation and ensembles
    pooling              Max-pooling, by our own kernels on a GPU
    spec                 Model configs parsed into a checked ModelSpec
"""
