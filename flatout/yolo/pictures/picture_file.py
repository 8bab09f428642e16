"""A picture to a file, whole or not at all."""

import os
import tempfile
from pathlib import Path

import cv2
import numpy as np

JPEG_QUALITY = 92


def write_picture(path: Path, image_HWC: np.ndarray) -> Path:
    """uint8 [H, W, 3], BGR; the name's ending says the format. OSError where nothing can be written."""
    options = [cv2.IMWRITE_JPEG_QUALITY, JPEG_QUALITY] if path.suffix in (".jpg", ".jpeg") else []
    content = cv2.imencode(path.suffix, image_HWC, options)[1].tobytes()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part", delete=False) as file:
        try:
            file.write(content)
        except OSError:
            os.unlink(file.name)
            raise
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    return path
