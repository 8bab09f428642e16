"""Networks from model YAML: `build_network(load_config("yolov7-tiny"))`.

config (YAML) -> blueprint (checked rows, shapes) -> Network (modules) -> fuse, deploy, info, augmented
"""
