"""Networks from model YAML: `build_network(load_config("yolov7-tiny"))`.

config (YAML) -> blueprint (checked rows, shapes) -> Network (modules) -> fuse, deploy, info, augmented

Files:

    augmented         Boxes from several views of a picture, and from several networks
    configs           Find a model config by path or by name, and read it
    deploy            A training network in its deploy form
    heads             Detection layers
    info              How large is a network, and what does a picture cost? The table and the line that YOLOv7 prints
    layers            The modules of a model row, except detection layers
    module_specs      What each module of a model YAML takes and gives: arguments, output shape, number of parameters
    network           A blueprint as a torch module: rows run in order, each reading the outputs it names
    norm_act          Batch norm and activation in one go while training on a GPU; torch's own modules everywhere else
    norm_act_kernels  Triton kernels of norm_act.py
    parse             Understand a model config, or say which row is wrong and what to write instead
    pooling           Max-pooling: by our kernels for channels_last maps on a GPU
    pooling_kernels   Triton kernels of pooling.py, on channels_last maps
    spec              A model YAML, understood
"""
