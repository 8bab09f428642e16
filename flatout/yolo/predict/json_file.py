"""Detections as one COCO JSON list, written as they come: a night of video does not pile up in memory."""

import json
import os
from pathlib import Path
from typing import Any, TextIO

from flatout.engine.checkpoint.atomic import write_error


class JsonFile:
    """A list that grows record by record, and gets its name when it is complete. `close()` may be called twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._part = path.with_suffix(".json.part")
        self._file: TextIO | None = None
        self._count = 0
        self._closed = False

    def add(self, records: list[dict[str, Any]]) -> None:
        for record in records:
            self._write(f"{',' if self._count else '['}\n{json.dumps(record)}")
            self._count += 1

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._write("\n]\n" if self._count else "[]\n")
        if self._file is not None:
            self._file.close()
        os.replace(self._part, self.path)

    def _write(self, text: str) -> None:
        try:
            if self._file is None:
                self._file = self._part.open("w")
            self._file.write(text)
        except OSError as error:
            raise write_error(error, self._part, len(text)) from error
