"""Look at all pictures and labels of a data set, in parallel: a feed of chunks, each of which becomes a small table."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from flatout.feed import Feed, FeedConfig, Plan, Rows, SampleSource
from flatout.feed.progress import Advance, progress
from flatout.images import Header
from flatout.yolo.data.find import Pair
from flatout.yolo.data.label_text import Problem
from flatout.yolo.data.scan_picture import NOTHING, Scanned, scan_picture
from flatout.yolo.data.scan_table import ScanTable, join, table_of, unpack

CHUNK = 128
BYTES_EXPECTED = 1024
"""Per picture, of its part of a table; more is never lost, see Rows."""
WORTH_WORKERS = 3000
"""Pictures that one process looks at while the workers would start, some tenths of a second."""


@dataclass(frozen=True, kw_only=True)
class ScanConfig:
    """How a scan runs and judges."""

    strict: bool = False
    """All label rules of YOLOv7: one bad line drops the picture."""
    workers: int | str = "cpu*1.0"
    """Processes, as for the feed. Few pictures are looked at without any."""
    progress: bool = True
    names: tuple[str, ...] = ()
    """Of the classes, for label files that name them (Pascal VOC)."""


class Chunks(SampleSource):
    """Some pictures at a time, as the bytes of their table."""

    def __init__(self, pairs: Sequence[Pair], config: ScanConfig, chunk: int) -> None:
        self.fields = {"table": Rows(1, np.uint8, expected=BYTES_EXPECTED * chunk)}
        self._pairs = pairs
        self._config = config
        self._chunk = chunk

    def __len__(self) -> int:
        return -(-len(self._pairs) // self._chunk)

    def where(self, index: int) -> str:
        return self._pairs[index * self._chunk].image

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        pairs = self._pairs[index * self._chunk : (index + 1) * self._chunk]
        table = table_of([scan_picture(*pair, strict=self._config.strict, names=self._config.names) for pair in pairs])
        return {"table": np.frombuffer(table.pack(), np.uint8)[:, None]}


def scan(pairs: Sequence[Pair], config: ScanConfig) -> ScanTable:
    """The table of all pictures, in their order, whatever is in the files."""
    if not pairs:
        return table_of([])
    workers = config.workers if len(pairs) >= WORTH_WORKERS else 0
    with progress("scanning", len(pairs), shown=config.progress) as advance:
        tables = _scan_chunks(pairs, config, CHUNK, workers, advance)
        for number, table in enumerate(tables):
            if table is None:  # a file in it ends whoever reads it
                tables[number] = _one_by_one(pairs[number * CHUNK : (number + 1) * CHUNK], config)
    return join(table for table in tables if table is not None)


def _one_by_one(pairs: Sequence[Pair], config: ScanConfig) -> ScanTable:
    """Of pictures among which one kills its worker."""
    killer = Scanned(
        "unreadable_image",
        "",
        Header("unknown"),
        NOTHING,
        [Problem("image-corrupt", 0, "looking at it ended the process")],
    )
    tables = _scan_chunks(pairs, config, 1, 1, lambda done, nbytes: None)
    return join(table_of([killer]) if table is None else table for table in tables)


def _scan_chunks(
    pairs: Sequence[Pair], config: ScanConfig, chunk: int, workers: int | str, advance: Advance
) -> list[ScanTable | None]:
    """A table per chunk; None for one that nobody survives."""
    source = Chunks(pairs, config, chunk)
    plan = Plan(num_samples=len(source), batch_size=min(8, len(source)), shuffle=False, last="short")
    tables: list[ScanTable | None] = [None] * len(source)
    nbytes = 0
    with Feed(source, plan, FeedConfig(workers=workers, epochs=1, bad_share=1.0)) as feed:
        for batch in feed:
            ends = np.cumsum(batch.counts["table"]).tolist()
            pieces = np.split(batch["table"].reshape(-1), ends[:-1])
            for row, (index, piece) in enumerate(zip(batch.positions.tolist(), pieces, strict=True)):
                if batch.indices[row] == index:
                    tables[index] = unpack(piece.tobytes())
                    nbytes += len(piece)
            advance(min((int(batch.positions[-1]) + 1) * chunk, len(pairs)), nbytes)
    return tables
