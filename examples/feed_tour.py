"""What the feed promises, shown in half a minute: python examples/feed_tour.py

The same batches with any number of workers, with a worker killed on the way, and after a resume in mid-epoch. Every
way through the epoch ends in a fingerprint over all of its bytes; they must be equal.
"""

import hashlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from itertools import islice

import cv2
import numpy as np
from numpy.typing import ArrayLike

from flatout import Batch, Feed, FeedConfig, Field, Plan, Rows, SampleSource
from flatout.clock import clock

SIZE = 320


class Discs(SampleSource):
    """Pictures of discs, drawn when they are asked for, brightened and mirrored at random."""

    fields = {"image": Field((3, SIZE, SIZE)), "boxes": Rows(4, np.float32, expected=4)}

    def __init__(self, num_pictures: int) -> None:
        self.num_pictures = num_pictures

    def __len__(self) -> int:
        return self.num_pictures

    def sample(self, index: int, rng: np.random.Generator) -> Mapping[str, ArrayLike]:
        with clock.stage("draw"):
            image, boxes = self.draw_picture(np.random.default_rng(index))
        with clock.stage("augment"):
            image = cv2.convertScaleAbs(image, alpha=rng.uniform(0.7, 1.3))
            if rng.random() < 0.5:
                image = image[:, ::-1]
                boxes[:, [0, 2]] = SIZE - boxes[:, [2, 0]]
        return {"image": image[:, :, ::-1].transpose(2, 0, 1), "boxes": boxes}

    def draw_picture(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """BGR pixels, and boxes [n, 4]: x1, y1, x2, y2."""
        noise = rng.normal(0, 18, (SIZE // 4, SIZE // 4, 3)).astype(np.float32)
        image = np.clip(rng.integers(90, 200, 3) + cv2.resize(noise, (SIZE, SIZE)), 0, 255).astype(np.uint8)
        boxes = []
        for _ in range(rng.integers(1, 6)):
            radius = int(rng.integers(12, 45))
            x, y = rng.integers(radius, SIZE - radius, 2).tolist()
            cv2.circle(image, (x, y), radius, rng.integers(0, 256, 3).tolist(), -1, cv2.LINE_AA)
            boxes.append((x - radius, y - radius, x + radius, y + radius))
        return image, np.array(boxes, np.float32)


def fingerprint(batches: Iterable[Batch]) -> str:
    """Short hash over every byte of some batches."""
    total = hashlib.sha256()
    for batch in batches:
        for array in (batch.indices, *batch.fields.values()):
            total.update(array.tobytes())
    return total.hexdigest()[:12]


def with_workers(source: Discs, plan: Plan, workers: int) -> str:
    with Feed(source, plan, FeedConfig(workers=workers)) as feed:
        begin_s = time.perf_counter()
        batches = iter(feed)
        # A batch is a view that the next one overwrites: whoever keeps it copies it.
        first = next(batches).copy()
        first_ms = 1e3 * (time.perf_counter() - begin_s)
        print_of_epoch = fingerprint([first, *(batch.copy() for batch in batches)])
        reading = feed.meter.read()
    print(f"  {workers} workers: first batch after {first_ms:4.0f} ms, {reading.samples_per_s:5.0f} img/s")
    return print_of_epoch


def with_a_killed_worker(source: Discs, plan: Plan) -> str:
    with Feed(source, plan, FeedConfig(workers=2)) as feed:
        seen = []
        for batch in feed:
            seen.append(batch.copy())
            if batch.step == 1:
                os.kill(feed.worker_pids[0], signal.SIGKILL)
    print("  a worker was killed after batch 1, and replaced")
    return fingerprint(seen)


def resumed(source: Discs, plan: Plan) -> str:
    with Feed(source, plan, FeedConfig(workers=2)) as feed:
        seen = [batch.copy() for batch in islice(feed, 2)]
        state = feed.state_dict()
    with Feed(source, plan, FeedConfig(workers=1)) as feed:
        feed.load_state_dict(state)
        seen += [batch.copy() for batch in feed]
    print("  stopped after 2 batches, resumed with another number of workers")
    return fingerprint(seen)


def main(num_pictures: int = 512) -> None:
    source = Discs(num_pictures)
    plan = Plan(num_samples=len(source), batch_size=min(64, num_pictures // 4), seed=1)
    print(f"An epoch of {len(source)} pictures of {SIZE} px in batches of {plan.batch_size}:")
    prints = {with_workers(source, plan, workers) for workers in (0, 1, 2, 4)}
    prints |= {with_a_killed_worker(source, plan), resumed(source, plan)}
    assert len(prints) == 1, "an epoch depended on how it was read"
    print(f"The same bytes every time: {prints.pop()}")


if __name__ == "__main__":
    main()
