"""Weights of a detection network: read from any file, kept in files of ours, moved into a network.

legacy .pt, our .pt, .safetensors --read_weights--> Weights --transfer--> network
                                                    Weights --save_weights, save_safetensors--> file

Files:

    files    Weights in safetensors files: the state for inference, with the model config and class names as metadata
    legacy   What YOLOv7 saved, in its various forms, as Weights
    weights  What a file of weights holds, whatever its format was
"""

from flatout.yolo.weights.files import read_weights, save_safetensors
from flatout.yolo.weights.weights import State, Transfer, Weights, save_weights, transfer

__all__ = ["State", "Transfer", "Weights", "read_weights", "save_safetensors", "save_weights", "transfer"]
