"""Weights of a detection network: read from any file, kept in files of ours, moved into a network.

legacy .pt, our .pt, .safetensors --read_weights--> Weights --transfer--> network
                                                    Weights --save_weights, save_safetensors--> file
"""

from flatout.yolo.weights.own import save_weights
from flatout.yolo.weights.read import read_weights
from flatout.yolo.weights.safetensors_file import save_safetensors
from flatout.yolo.weights.transfer import Transfer, transfer
from flatout.yolo.weights.weights import State, Weights

__all__ = ["State", "Transfer", "Weights", "read_weights", "save_safetensors", "save_weights", "transfer"]
