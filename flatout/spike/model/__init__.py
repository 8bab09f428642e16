"""The deblurring network: frames and spikes of a clip in, sharp frames out."""

from flatout.spike.model.network import Clip, DeblurNet

__all__ = ["Clip", "DeblurNet"]
