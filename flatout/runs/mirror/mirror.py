"""`--mirror URL`: fetches a run before training, uploads every checkpoint in the background, and waits at the end.

    offer(snapshot) --replaces a waiting one--> thread: upload new objects -> manifest -> prune

Only the newest snapshot is uploaded. Failures are logged and retried; training never waits for an upload.
"""

import hashlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from flatout.engine import Callback, End, Saved
from flatout.runs.folder import RunRequest
from flatout.runs.mirror import snapshot as manifests
from flatout.runs.mirror.fetch import STATE_NAME, Fetched, fetch
from flatout.runs.mirror.remote_folder import RemoteError, RemoteFolder
from flatout.runs.mirror.snapshot import OBJECTS, Manifest, MirroredFile, Snapshot

logger = logging.getLogger(__name__)

KEPT = 2
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0
LINE_INTERVAL_S = 5.0


class TakenOver(Exception):
    """Another process writes to the same mirror."""


class Uploads:
    """A thread that uploads snapshots. `finish` waits for it and may be called twice."""

    def __init__(self, remote: RemoteFolder, *, first_wait_s: float = FIRST_WAIT_S) -> None:
        self._remote, self._first_wait_s = remote, first_wait_s
        self._writer = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
        self._changed = threading.Condition()
        self._waiting: Snapshot | None = None
        self._busy = self._ended = False
        self._activity = ""
        self.newest: Manifest | None = None
        """The last manifest that this process wrote."""
        self._digests: dict[tuple[int, ...], str] = {}
        self._error: str | None = None
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)
        self._thread.start()

    def offer(self, snapshot: Snapshot) -> None:
        """Queue a snapshot; returns immediately. An older one that is still waiting is dropped."""
        with self._changed:
            old, self._waiting = (snapshot, None) if self._ended else (self._waiting, snapshot)
            self._changed.notify_all()
        if old is not None:
            old.close()

    def finish(self, patience_s: float) -> bool:
        """Wait until everything is uploaded, logging every few seconds; returns whether it is."""
        end_s, logged_s = time.monotonic() + patience_s, time.monotonic()
        with self._changed:
            while (self._waiting is not None or self._busy) and not self._ended and time.monotonic() < end_s:
                self._changed.wait(0.2)
                if time.monotonic() - logged_s >= LINE_INTERVAL_S:
                    logged_s = time.monotonic()
                    logger.info("Waiting for the mirror: %s.", self._error or self._activity or "starting")
            is_done = self._waiting is None and not self._busy and not self._ended
            self._ended = True
            self._changed.notify_all()
        return is_done

    # The thread

    def _work(self) -> None:
        while (snapshot := self._next()) is not None:
            try:
                self._copy_with_retries(snapshot)
            except TakenOver as error:
                self._give_up(str(error))
            except Exception as error:  # of any type: `finish` must not wait for a thread that has died
                self._give_up(f"{self._remote.url}: {type(error).__name__}: {error}.")
                logger.debug("mirroring failed here:", exc_info=error)
            finally:
                snapshot.close()
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()

    def _next(self) -> Snapshot | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None or self._ended)
            snapshot, self._waiting = self._waiting, None
            self._busy = snapshot is not None and not self._ended
        if snapshot is not None and not self._busy:
            snapshot.close()
        return snapshot if self._busy else None

    def _give_up(self, why: str) -> None:
        logger.error("%s No further checkpoints are copied there.", why)
        with self._changed:
            self._ended = True

    def _copy_with_retries(self, snapshot: Snapshot) -> None:
        """Retry until it succeeds, a newer snapshot is offered, or `finish` has given up waiting."""
        wait_s = self._first_wait_s
        while True:
            try:
                self._copy(snapshot)
            except (RemoteError, OSError) as error:
                self._warn(str(error), wait_s)
            else:
                if self._error is not None:
                    logger.info("The mirror works again: %s is up to date.", self._remote.url)
                self._error = None
                return
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is not None or self._ended, wait_s):
                    return
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _warn(self, error: str, wait_s: float) -> None:
        if self._error is None:
            logger.warning("%s Training goes on; the copy is retried, first in %.0f s.", error, wait_s)
        self._error = error

    # One checkpoint

    def _copy(self, snapshot: Snapshot) -> None:
        number = self._next_number()
        known = {} if self.newest is None else {file.sha256: file for file in self.newest.files.values()}
        files = {}
        # Digests are reused: the best weights are often the same as last time.
        self._digests = {
            held.identity: self._digests.get(held.identity) or held.sha256() for held in snapshot.held.values()
        }
        for name, held in snapshot.held.items():
            files[name] = MirroredFile(self._digests[held.identity], held.nbytes)
            self._activity = f"copying {name}, {held.nbytes / 1e6:.1f} MB, to {self._remote.url}"
            self._put(files[name], known, partial(self._remote.upload, held.path))
        for name, content in snapshot.small.items():
            files[name] = MirroredFile(hashlib.sha256(content).hexdigest(), len(content))
            self._put(files[name], known, partial(self._remote.write, content))
        self._publish(
            Manifest(
                number=number,
                writer=self._writer,
                config=snapshot.config,
                position=snapshot.position,
                finished=snapshot.finished,
                files=files,
            )
        )

    def _put(self, file: MirroredFile, known: dict[str, MirroredFile], put: Callable[[str], None]) -> None:
        if file.sha256 not in known:
            put(file.key)
            known[file.sha256] = file

    def _next_number(self) -> int:
        """One more than the newest number; TakenOver if another process has written it since our last one."""
        newest = max(manifests.numbers(self._remote), default=0)
        if self.newest is not None and newest > self.newest.number:
            raise TakenOver(
                f"{self._remote.url}: another training has written checkpoint {newest} there. Two trainings must not "
                "share a mirror: give one of them another --name or --mirror."
            )
        return newest + 1

    def _publish(self, manifest: Manifest) -> None:
        """Write the manifest last, which makes the checkpoint valid. Then remove old ones, manifests first."""
        manifests.write(self._remote, manifest)
        self.newest = manifest
        logger.debug("mirrored checkpoint %d (%s)", manifest.number, manifest.where())
        with suppress(RemoteError):
            self._prune()

    def _prune(self) -> None:
        numbers = manifests.numbers(self._remote)
        kept = [manifests.read(self._remote, number) for number in numbers[-KEPT:]]
        for number in numbers[:-KEPT]:
            self._remote.remove(manifests.key_of(number))
        needed = {file.sha256 for manifest in kept for file in manifest.files.values()}
        for name in self._remote.keys(OBJECTS):
            if name not in needed:
                self._remote.remove(f"{OBJECTS}/{name}")


PATIENCE_S = 600.0
"""How long the end of a training waits for the mirror."""


class Mirror(Callback):
    """The mirror of one run under URL/name. Used by the first rank only."""

    def __init__(self, url: str, name: str, *, patience_s: float = PATIENCE_S) -> None:
        """ConfigError if the URL cannot be used. Does not access the network yet."""
        self._remote = RemoteFolder(url, name)
        self._patience_s = patience_s
        self._uploads: Uploads | None = None

    def fetch(self, request: RunRequest) -> Fetched | None:
        """Fetch what another machine has trained; see `flatout.runs.mirror.fetch`. Waits for the network."""
        return fetch(self._remote, request)

    def checkpoint(self, saved: Saved) -> None:
        self._offer(Snapshot(saved.path.parent.parent, saved.path))

    def end(self, end: End) -> None:
        """Copy the final files of a finished training, and wait until everything is uploaded."""
        if end.how == "finished":
            for state in end.folder.glob(f"*/{STATE_NAME}"):
                self._offer(Snapshot(end.folder, state))
        if self._uploads is None:
            return
        if self._uploads.finish(self._patience_s):
            logger.info("Mirrored to %s.", self._remote.url)
        else:
            logger.warning("The mirror %s is not up to date; all files are in %s.", self._remote.url, end.folder)

    def _offer(self, snapshot: Snapshot) -> None:
        self._uploads = self._uploads or Uploads(self._remote)
        self._uploads.offer(snapshot)
