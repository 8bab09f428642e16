"""Weights of a detection network: read from any file, kept in files of ours, moved into a network.

legacy .pt, our .pt, .safetensors --read_weights--> Weights --transfer--> network
                                                    Weights --save_weights, save_safetensors--> file

Files:

    legacy            What YOLOv7 saved, in its various forms, as Weights
    read              The front door: weights from any file, told apart by content
    safetensors_file  Weights in safetensors files
    weights           What a file of weights holds, whatever its format was
"""

from flatout.yolo.weights.read import read_weights
from flatout.yolo.weights.safetensors_file import save_safetensors
from flatout.yolo.weights.weights import State, Transfer, Weights, save_weights, transfer

__all__ = ["State", "Transfer", "Weights", "read_weights", "save_safetensors", "save_weights", "transfer"]
