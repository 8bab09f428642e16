"""Turn objects out of a file into a tree that is safe to walk, copy and print.

The unpickler may return cycles, and a dozen lists that stand for a billion. A tree of separate containers, under a
budget, is what the rest of the program gets.
"""

from collections.abc import Iterable

from torch import Tensor

from flatout.engine.checkpoint.refusal import DAMAGED, SUSPECT, Budget, Refusal, quoted
from flatout.engine.checkpoint.vocabulary import Built, Name

MAX_DEPTH = 64
MAX_VALUES = 500_000
MAX_OVERLAP = 4
"""How many times the memory of its storages a set of tensors may name; tied weights share theirs."""


class PlainReader:
    """Copies objects of one file into plain trees; all of them together stay within the budget."""

    def __init__(self) -> None:
        self._budget = Budget(MAX_VALUES, "values")
        self._tensors: list[Tensor] = []

    def plain(self, value: object, where: str) -> object:
        """None, bool, int, float, str, bytes, list, tuple and dict as they are; tensors detached, memory shared.

        `where` names the value in a Refusal, such as "config".
        """
        self._tensors.clear()
        copied = self._copy(value, where, depth=0)
        _check_overlap(self._tensors, where)
        return copied

    def _copy(self, value: object, where: str, depth: int) -> object:
        self._budget.spend(1)
        if depth > MAX_DEPTH:
            raise Refusal(f"its {where} is nested deeper than {MAX_DEPTH} levels or contains itself. {SUSPECT}")
        if isinstance(value, str | bytes):
            # A long text that is repeated costs nothing here, but everywhere it is printed.
            self._budget.spend(len(value) // 16)
            return _printable(value, where)
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, Tensor):
            self._tensors.append(value)
            return value.detach()
        if isinstance(value, dict):
            # Keys count as well; the unpickler lets only plain ones through.
            return {self._copy(key, where, depth): self._copy(item, where, depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copy(item, where, depth + 1) for item in value)
        if isinstance(value, Built):
            return self._copy(value.plain(), where, depth + 1)
        kind = value.text if isinstance(value, Name) else type(value).__name__
        raise Refusal(f"its {where} holds a {quoted(kind)}, which is no plain data. {DAMAGED}")


def _printable(value: str | bytes, where: str) -> str | bytes:
    try:
        if isinstance(value, str):
            value.encode()
    except UnicodeEncodeError:
        raise Refusal(f"its {where} holds half of a surrogate pair, which nobody can print. {DAMAGED}") from None
    return value


def _check_overlap(tensors: Iterable[Tensor], where: str) -> None:
    """Refuse tensors that share memory so often that copying them would need many times the file's size."""
    storage_bytes: dict[int, int] = {}
    view_bytes = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        storage_bytes[storage.data_ptr()] = storage.nbytes()
        view_bytes += tensor.nbytes
    if view_bytes > MAX_OVERLAP * sum(storage_bytes.values()):
        raise Refusal(f"the tensors of its {where} share their memory over and over. {SUSPECT}")
