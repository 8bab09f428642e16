"""Networks from model YAML: `build_network(load_config("yolov7-tiny"))`.

config (YAML) -> blueprint (checked rows, shapes) -> Network (modules) -> fuse, deploy, info, augmented

Files:

    configs        Find a model config by path or by name, and read it
    deploy         A training network in its deploy form
    fused          Batch norm and activation in one go while training on a GPU; torch's own modules everywhere else
    fused_kernels  Triton kernels of fused.py: batch norm with its activation, and max-pooling
    info           How large is a network, and what does a picture cost? The table and the line that YOLOv7 prints
    layers         The modules of a model row, except detection layers
    module_specs   What each module of a model YAML takes and gives: arguments, output shape, number of parameters
    network        A blueprint as a torch module: rows run in order, each reading the outputs it names
    spec           A model YAML, understood
"""
