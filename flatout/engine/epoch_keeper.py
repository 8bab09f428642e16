"""What the ends of epochs have in common: the best score so far, the records, and what of both is saved."""

from collections.abc import Mapping
from typing import Any, Protocol

from flatout.engine.records import Records

NOTHING_YET = float("-inf")


class Files(Protocol):
    """Where a job puts its weights."""

    @property
    def about(self) -> Mapping[str, Any]:
        """How the network is built."""

    def flush(self) -> None:
        """Write what is due beside a generation that was just saved."""


class EpochKeeper:
    """State of a job's epoch ends, saved with the training. Jobs add their own `__call__` and scores."""

    def __init__(self, *, records: Records | None, files: Files, run: Mapping[str, Any]) -> None:
        """`records` None: not the first rank. `run`: what a saved file says about the run."""
        self._records, self._kept_files, self._run = records, files, dict(run)
        self.best_score, self.best_epoch, self.epoch = NOTHING_YET, -1, -1

    def takes(self, epoch: int, score: float | None) -> bool:
        """Whether this epoch is the best so far, and remembers it then; of epochs without a score, the newest is."""
        if score is not None and score <= self.best_score:
            return False
        self.best_epoch = epoch
        if score is not None:
            self.best_score = score
        return True

    def own_state(self) -> dict[str, object]:
        """What a job saves beside this."""
        return {}

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """What `own_state` gave."""

    def sections(self) -> dict[str, dict[str, object]]:
        """As a job gives them to the loop."""
        state: dict[str, object] = {
            "best_score": self.best_score,
            "best_epoch": self.best_epoch,
            "epoch": self.epoch,
            "records": self._records.state_dict() if self._records is not None else {"bytes": {}},
        }
        about = dict(self._kept_files.about) | {"kind": "full"}
        return {"weights": about, "run": self._run, "job": state | self.own_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best_score, self.best_epoch, self.epoch = state["best_score"], state["best_epoch"], state["epoch"]
        self.load_own_state(state)
        if self._records is not None:
            self._records.load_state_dict(state["records"])

    def flush(self) -> None:
        self._kept_files.flush()
