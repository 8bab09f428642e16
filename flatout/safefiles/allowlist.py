"""The names a pickle may use, and what each of them means to us.

A name is never imported. It is looked up in a closed table whose functions are ours; a function gets the pickled
arguments and returns data. Names that are not in the table are refused, and the refusal tells the name.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flatout.safefiles.refusal import DAMAGED, Budget, Refusal, quoted
from flatout.safefiles.storages import DTYPES, Storage, Storages

Make = Callable[[tuple[object, ...]], object]
"""What calling a name gives: pickled arguments in, data out. Raises Refusal for arguments it does not expect."""

Family = Callable[[str, str], "Name | None"]
"""Module and name in; a Name if they belong to the family."""

MAX_COPIED = 4 << 20
"""Items and bytes that all functions of a pickle may copy together: one list can be copied a million times."""


@dataclass(frozen=True, slots=True)
class Name:
    """A name of the table, as it lies on the stack of the unpickler."""

    text: str
    make: Make | None = None
    """None for names that only stand for something, such as a dtype."""

    def __call__(self, arguments: tuple[object, ...]) -> object:
        if self.make is None:
            raise Refusal(f"its pickle calls {self.text}, which is no function. {DAMAGED}")
        return self.make(arguments)


class Built:
    """An object that a pickle fills after making it (opcode BUILD)."""

    __slots__ = ()

    def build(self, state: object) -> None:
        raise NotImplementedError

    def plain(self) -> object:
        """What it is as plain data; a Refusal if it is none."""
        raise NotImplementedError


class Vocabulary:
    """A table of names, and families of names that all mean the same kind of placeholder."""

    def __init__(self, names: Mapping[str, Make | None], family: Family | None = None) -> None:
        self._names = {text: Name(text, make) for text, make in names.items()}
        self._family = family

    def look_up(self, module: str, name: str) -> Name:
        # Files written by Python 2 semantics (protocol 2) spell it so.
        text = f"{'builtins' if module == '__builtin__' else module}.{name}"
        found = self._names.get(text) or (self._family and self._family(module, name))
        if not found:
            raise Refusal(
                f"its pickle refers to {quoted(text)}, which weights do not need; nothing of it was run. It was made "
                "for another program, or to run code where it is loaded: do not open it with torch.load. Get the "
                "weights from a source you trust, as safetensors if there is a choice."
            )
        return found


def plain_vocabulary(storages: Storages) -> Vocabulary:
    """The names of our own files: tensors and containers."""
    return Vocabulary(plain_names(storages))


def plain_names(storages: Storages) -> dict[str, Make | None]:
    budget = Budget(MAX_COPIED, "copied items")

    def make_dict(arguments: tuple[object, ...]) -> object:
        # Pickled since Python 3 as an empty one that is filled afterwards.
        return {} if arguments == () else _unexpected("collections.OrderedDict")

    def make_set(arguments: tuple[object, ...]) -> object:
        match arguments:
            case (list(items),):
                # Paid for before it is looked at: the next call may bring the same list again.
                budget.spend(len(items))
                if all(type(item) is str for item in items):
                    return set(items)
        return _unexpected("builtins.set")

    def make_tensor(arguments: tuple[object, ...]) -> object:
        match arguments:
            # Then: requires_grad, backward hooks, and in newer files metadata.
            case (Storage() as storage, int(offset), tuple(size), tuple(stride), *_) if type(offset) is int:
                return storages.view(storage, offset, size, stride)
        return _unexpected("torch._utils._rebuild_tensor_v2")

    return {
        "collections.OrderedDict": make_dict,
        "builtins.set": make_set,
        "torch._utils._rebuild_tensor_v2": make_tensor,
        **dict.fromkeys(DTYPES),
    }


def _unexpected(name: str) -> object:
    raise Refusal(f"its pickle calls {name} with arguments that torch never writes. {DAMAGED}")
