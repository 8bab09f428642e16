"""Under which name is the result of a file written? Each under its own, and no two under the same."""

from pathlib import PurePath

from flatout.yolo.predict.frames import Origin

WRITABLE = frozenset({".bmp", ".jpg", ".jpeg", ".png", ".tif", ".tiff", ".webp"})
"""Endings of pictures that can be written; other formats become JPEG."""


class OutNames:
    """Gives every file or stream a stem; the second `a` of different folders becomes `a_2`."""

    def __init__(self) -> None:
        self._stem_of: dict[int, str] = {}
        self._taken: set[str] = set()

    def stem(self, origin: Origin) -> str:
        """The same for every frame of a file."""
        if origin.number not in self._stem_of:
            self._stem_of[origin.number] = self._free(origin.stem)
        return self._stem_of[origin.number]

    def frame_stem(self, origin: Origin) -> str:
        """With the number of the frame, where there is one."""
        stem = self.stem(origin)
        return stem if origin.frame is None else f"{stem}_{origin.frame}"

    def picture(self, origin: Origin) -> str:
        """Of the picture with its boxes, with an ending that can be written."""
        suffix = PurePath(origin.path).suffix
        return f"{self.stem(origin)}{suffix if suffix.lower() in WRITABLE else '.jpg'}"

    def video(self, origin: Origin) -> str:
        """Of the video with boxes; streams become .mp4."""
        suffix = ".mp4" if origin.kind == "stream" else PurePath(origin.path).suffix
        return f"{self.stem(origin)}{suffix}"

    def _free(self, stem: str) -> str:
        name, number = stem, 1
        while name in self._taken:
            number += 1
            name = f"{stem}_{number}"
        self._taken.add(name)
        return name
