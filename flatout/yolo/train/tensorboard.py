"""Scalars for TensorBoard: see flatout.engine.tensorboard."""

from flatout.engine.tensorboard import TensorBoard

__all__ = ["TensorBoard"]
