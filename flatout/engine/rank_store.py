"""The key-value store through which ranks meet, for a few words beside their sums of gradients."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist


class Store(Protocol):
    """What is used of torch's key-value stores."""

    def set(self, key: str, value: str, /) -> None: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...
    def check(self, keys: list[str], /) -> bool: ...
    def get(self, key: str, /) -> bytes: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...
    def set_timeout(self, timeout: timedelta, /) -> None: ...


def store_of_launcher(environ: Mapping[str, str], *, timeout_s: float = 60) -> Store:
    """A connection of its own to the store through which the ranks meet; keys of an earlier attempt do not count."""
    store = dist.TCPStore(  # type: ignore[attr-defined]
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
    )
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefixed: Store = dist.PrefixStore(f"flatout/{attempt}", store)  # type: ignore[attr-defined]
    return prefixed
