"""Text in pictures, with OpenCV's own letters, which are ASCII."""

import unicodedata

import cv2
import numpy as np

from flatout.yolo.pictures.palette import Colour

FONT = cv2.FONT_HERSHEY_SIMPLEX
_UNIT_PX = 21
"""Height of a capital letter at scale 1."""


def plain(text: str) -> str:
    """ASCII: accents are dropped, anything else becomes a question mark."""
    letters = (letter for letter in unicodedata.normalize("NFKD", text) if not unicodedata.combining(letter))
    return "".join(letters).encode("ascii", "replace").decode()


def measure(text: str, height_px: float, weight: int = 1) -> tuple[int, int]:
    """Width and height of the capitals of a text whose capitals are `height_px` high."""
    (width, height), _ = cv2.getTextSize(plain(text), FONT, height_px / _UNIT_PX, weight)
    return width, height


def write(
    image: np.ndarray, text: str, left: int, baseline: int, height_px: float, colour: Colour, weight: int = 1
) -> None:
    """Letters of a given height and line width, in place."""
    cv2.putText(image, plain(text), (left, baseline), FONT, height_px / _UNIT_PX, colour, weight, cv2.LINE_AA)


def shortened(text: str, most: int) -> str:
    """At most so many letters; the end goes."""
    return text if len(text) <= most else f"{text[: most - 2].rstrip()}.."


def shortened_file(name: str, most: int) -> str:
    """At most so many letters; the beginning goes, because numbers stand at the end."""
    return name if len(name) <= most else f"..{name[len(name) - most + 2 :]}"
