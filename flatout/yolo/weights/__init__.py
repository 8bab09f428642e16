"""Weights of a detection network: read from files of several formats, saved in ours, transferred to a network.

    legacy .pt, our .pt, .safetensors --read_weights--> Weights --transfer--> network
                                                        Weights --save_weights, save_safetensors--> file

Files:

    files    Weights read from a file of any format, and safetensors files
    legacy   YOLOv7's pickled checkpoints as Weights, read without running anything in them
    weights  The Weights of a network, their checks, our own file format, and the transfer to a network
"""

from flatout.yolo.weights.files import read_weights, save_safetensors
from flatout.yolo.weights.weights import State, Transfer, Weights, save_weights, transfer

__all__ = ["State", "Transfer", "Weights", "read_weights", "save_safetensors", "save_weights", "transfer"]
