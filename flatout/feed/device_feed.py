"""Batches that are rendered on the device: workers draw numbers, the pixels never leave the device.

    worker: draw + small fields -> slot -> copy stream: copy, stage, render -> out A | B -> training step

The same feed, order, randomness and resume as on the host: a renderer gets sources and explicit
parameters and has no randomness of its own, so what it makes follows from (seed, epoch, step).
"""

import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flatout.clock import clock
from flatout.errors import ConfigError, ResourceError
from flatout.feed.batch import Batch
from flatout.feed.device import DeviceBatches
from flatout.feed.device_store import Brought, DeviceStore, Sources
from flatout.feed.feed import Feed
from flatout.feed.streamed_items import CHUNKS, NUMBERS


class Render(Protocol):
    """Fills `out` from `sources` and `params` on the current stream, without a host-device wait."""

    def __call__(self, sources: Sources, params: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None: ...


class Output(NamedTuple):
    """A tensor that is rendered; `outputs` of a feed may also be plain tuples of the first two or of all three."""

    shape: tuple[int, ...]
    """Per sample; the largest one where steps differ."""
    dtype: torch.dtype
    channels_last: bool = False
    """[C, H, W] per sample, with the channels of a pixel side by side in memory."""


class DeviceFeed(DeviceBatches):
    """A feed of parameters, rendered one batch ahead of the step.

    The feed's source has a field of item numbers, int [B] or [B, n]; its other fields arrive as
    `params`. A batch holds them and the rendered `outputs`, by name. Where the store does not keep
    all items, the source brings the others along (`DeviceStore.bringing`).
    """

    def __init__(
        self,
        feed: Feed,
        store: DeviceStore,
        render: Render,
        outputs: Mapping[str, Output | tuple[tuple[int, ...], torch.dtype]],
        *,
        items: str = "items",
    ) -> None:
        super().__init__(feed, store.device)
        if items not in feed.source.fields:
            raise ConfigError(f"The source has no field '{items}' that says which items a sample is made of.")
        if clash := sorted(set(outputs) & set(feed.source.fields)):
            raise ConfigError(f"Output '{clash[0]}' has the name of a field of the source: rename one of them.")
        if store.num_away and NUMBERS not in feed.source.fields:
            raise ResourceError(
                f"{store.num_away} of {len(store)} items fit neither on {store.device} nor into half of the free RAM, "
                "and the source does not bring them. Use a larger budget, smaller items or fewer of them."
            )
        self._store = store
        self._render = render
        self._items = items
        self._outputs = {name: Output(*output) for name, output in outputs.items()}
        # Two sets, filled in turn: one is trained on while the other is rendered.
        self._memory = [
            {
                name: torch.empty(feed.plan.batch_size * math.prod(shape), dtype=dtype, device=store.device)
                for name, (shape, dtype, _) in self._outputs.items()
            }
            for _ in range(2)
        ]

    def shape_of(self, name: str, batch: Batch) -> tuple[int, ...]:
        """Per-sample shape of an output in this batch, no larger than promised; for classes that vary it."""
        return self._outputs[name].shape

    def _finish(self, turn: int, batch: Batch, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        sources = self._store.sources_of(batch[self._items], tensors[self._items], self._brought(batch, tensors))
        out = {
            name: _shaped(memory, (len(batch), *self.shape_of(name, batch)), self._outputs[name].channels_last)
            for name, memory in self._memory[turn % 2].items()
        }
        with clock.stage("render"):
            self._render(sources, tensors, out)
        return tensors | out

    def _brought(self, batch: Batch, tensors: Mapping[str, Tensor]) -> Brought | None:
        """The items that came with this batch."""
        return Brought(batch[NUMBERS][:, 0], tensors[CHUNKS]) if NUMBERS in batch.fields else None


def _shaped(memory: Tensor, shape: tuple[int, ...], channels_last: bool) -> Tensor:
    """The first part of flat memory as a tensor without gaps."""
    part = memory[: math.prod(shape)]
    if not channels_last:
        return part.view(shape)
    num, channels, height, width = shape
    return part.view(num, height, width, channels).permute(0, 3, 1, 2)
