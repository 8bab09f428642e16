"""Notes: small JSON files for other processes, which may be missing, damaged or half written."""

import json
from pathlib import Path
from typing import Any


def read_note(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is none that can be read."""
    try:
        note = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return note if isinstance(note, dict) else {}
