"""Reference implementation of the feed: one loop, one sample at a time, without workers and without reading ahead."""

from collections.abc import Iterator

import numpy as np

from flatout.feed import Batch, Plan, Rows, Source
from flatout.feed.source import Out, RowsOut


def plain_batches(source: Source, plan: Plan, epoch: int, start: int = 0) -> Iterator[Batch]:
    """The batches that a feed must yield in one epoch, from step `start` on."""
    epoch_plan = plan.epoch(epoch)
    for number in range(start, epoch_plan.num_steps):
        step = epoch_plan.step(number)
        samples = [
            _read_one(source, plan.seed, epoch, row, position, index, step.shapes)
            for row, (position, index) in enumerate(zip(step.positions, step.indices, strict=True))
        ]
        rows_fields = [name for name, field in source.fields.items() if isinstance(field, Rows)]
        fields = {
            name: np.concatenate([sample[name] for sample in samples])
            if name in rows_fields
            else np.stack([sample[name] for sample in samples])
            for name in source.fields
        }
        counts = {name: np.array([len(sample[name]) for sample in samples], np.int32) for name in rows_fields}
        yield Batch(epoch, number, step.num_valid, step.indices, step.positions, fields, counts)


def _read_one(source, seed, epoch, row, position, index, shapes):
    draws = source.draw(seed, epoch, np.array([position]), np.array([index]))
    out = Out(
        {
            name: RowsOut(name, field, 1)
            if isinstance(field, Rows)
            else np.zeros((1, *shapes.get(name, field.shape)), field.dtype)
            for name, field in source.fields.items()
        },
        first_row=row,
    )
    source.read(np.array([index]), draws, out)
    return {
        name: out[name].taken[0] if isinstance(field, Rows) else out[name][0] for name, field in source.fields.items()
    }
