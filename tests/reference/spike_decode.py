"""Decodes spike streams as SpikeCV does: with the index of the byte and the mask of the bit of every pixel."""

import numpy as np


def decode_by_index(content: bytes, height: int, width: int) -> np.ndarray:
    """Spikes uint8 [T, H, W] in image orientation, from a packed stream whose rows are stored bottom-up."""
    stream = np.frombuffer(content, np.uint8)
    frame_bytes = height * width // 8
    pixel = np.arange(height * width).reshape(height, width)
    byte, mask = pixel // 8, np.left_shift(1, pixel % 8)
    num_frames = len(stream) // frame_bytes
    spikes = np.zeros((num_frames, height, width), np.uint8)
    for frame in range(num_frames):
        chunk = stream[frame * frame_bytes : (frame + 1) * frame_bytes]
        spikes[frame] = np.flipud((chunk[byte] & mask) == mask)
    return spikes
