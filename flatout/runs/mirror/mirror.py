"""`--mirror URL`, as a training sees it: fetched from before it begins, told of every save, waited for at the end."""

import logging

from flatout.engine import Callback, End, Saved
from flatout.runs.folder import Wanted
from flatout.runs.mirror.fetch import STATE_NAME, Fetched, fetch
from flatout.runs.mirror.place import Place
from flatout.runs.mirror.snapshot import Snapshot
from flatout.runs.mirror.uploads import Uploads

logger = logging.getLogger(__name__)

PATIENCE_S = 600.0
"""How long the end of a training waits for a mirror that does not work."""


class Mirror(Callback):
    """Copies of one run under URL/name. Belongs to the first rank."""

    def __init__(self, url: str, name: str, *, patience_s: float = PATIENCE_S) -> None:
        """ConfigError if the URL cannot be used; nothing is asked of the network yet."""
        self._place = Place(url, name)
        self._patience_s = patience_s
        self._uploads: Uploads | None = None

    def fetch(self, wanted: Wanted) -> Fetched | None:
        """Continue here what was begun elsewhere: see `flatout.runs.mirror.fetch`. Waits for the network."""
        return fetch(self._place, wanted)

    def checkpoint(self, saved: Saved) -> None:
        self._offer(Snapshot(saved.path.parent.parent, saved.path))

    def end(self, end: End) -> None:
        """Copy the final files of a finished training, and wait until everything is there."""
        if end.how == "finished":
            for state in end.folder.glob(f"*/{STATE_NAME}"):
                self._offer(Snapshot(end.folder, state))
        if self._uploads is None:
            return
        if self._uploads.finish(self._patience_s):
            logger.info("Mirrored to %s.", self._place.url)
        else:
            logger.warning("%s is not up to date; the files of the run are in %s.", self._place.url, end.folder)

    def _offer(self, snapshot: Snapshot) -> None:
        self._uploads = self._uploads or Uploads(self._place)
        self._uploads.offer(snapshot)
