"""Slots, queue and scratch: published tasks are claimed once, in order, and nothing overlaps."""

import os
from dataclasses import replace

import numpy as np
import pytest

from flatout.errors import DataError
from flatout.feed.batch import RowsBuffer, gather_rows, hand_over
from flatout.feed.plan import Step
from flatout.feed.ring import DEADLY, UNREADABLE, Ring, RingSpec, Task, pack
from flatout.feed.source import Field, Fields, Rows

FIELDS: Fields = {
    "image": Field((2, 3), np.uint16),
    "boxes": Rows(4, np.float32, expected=2),
    "label": Field((), np.int64),
    "marks": Rows(1, np.uint8, expected=1),
}


SPEC = RingSpec(fields=FIELDS, batch_size=10, micro_batch=4, num_slots=3, num_workers=2, num_items=8)


@pytest.fixture
def ring():
    ring = Ring.create(SPEC, shared_by_processes=True)
    yield ring
    ring.close()


def step_of(num_rows: int, **shapes) -> Step:
    return Step(1, 2, np.arange(num_rows), np.arange(num_rows) + 100, num_rows, shapes)


def test_packed_arrays_do_not_overlap_and_each_starts_a_cache_line():
    layout = pack([("a", np.uint8, (3,)), ("b", np.int64, (9,)), ("c", np.float32, (2, 2))])
    memory = np.zeros(layout.nbytes, np.uint8)
    views = layout.views(memory)
    for number, view in enumerate(views.values(), start=1):
        view[...] = number
    assert {name: set(view.ravel().tolist()) for name, view in views.items()} == {"a": {1}, "b": {2}, "c": {3}}
    assert all(offset % 64 == 0 for offset, _, _ in layout.parts.values())


def test_fields_of_different_slots_do_not_overlap(ring):
    for number, slot in enumerate(ring.slots):
        slot.open_for(step_of(10), 3)
        slot.field("image")[:] = number
        slot.field("label")[:] = -number
        slot.counts["boxes"][:] = number
    for number, slot in enumerate(ring.slots):
        assert set(slot.field("image").ravel().tolist()) == {number}
        assert set(slot.field("label").tolist()) == {-number}
        assert set(slot.counts["boxes"].tolist()) == {number}
        assert slot.positions.tolist() == list(range(100, 110))


def test_a_smaller_step_gives_a_smaller_array_without_gaps(ring):
    ring.slots[0].open_for(step_of(7, image=(1, 3)), 2)
    image = ring.slots[0].field("image")
    assert image.shape == (7, 1, 3)
    assert image.flags.c_contiguous


def test_a_step_larger_than_the_field_is_refused(ring):
    with pytest.raises(DataError, match=r"'image' the shape \(3, 3\).*at most \(2, 3\)"):
        ring.slots[0].open_for(step_of(7, image=(3, 3)), 2)


def test_tasks_are_claimed_once_and_in_order(ring):
    tasks = [Task(0, 0, 4), Task(0, 4, 8), Task(0, 8, 10)]
    assert ring.publish(tasks) == [0, 1, 2]
    claimed = [ring.claim(worker) for worker in (0, 1, 0, 1)]
    assert claimed == [(0, tasks[0]), (1, tasks[1]), (2, tasks[2]), None]
    assert ring.publish([Task(1, 0, 4, singly=True)]) == [3]
    assert ring.claim(1) == (3, Task(1, 0, 4, singly=True))


def test_tasks_of_a_lane_are_claimed_by_its_worker_alone():
    ring = Ring.create(replace(SPEC, num_lanes=2), shared_by_processes=False)
    first, second, third = Task(0, 0, 4), Task(0, 4, 8), Task(1, 0, 4)
    tickets = [*ring.publish([first], lane=1), *ring.publish([second], lane=0), *ring.publish([third], lane=1)]
    assert len(set(tickets)) == 3
    assert [ring.lane_of(ticket) for ticket in tickets] == [1, 0, 1]
    assert ring.num_unclaimed() == [1, 2]
    assert ring.claim(0) == (tickets[1], second)
    assert ring.claim(0) is None
    assert ring.claim(1) == (tickets[0], first)
    assert [ring.claim_of(worker).ticket for worker in (0, 1)] == [tickets[1], tickets[0]]
    assert ring.withdraw_unclaimed() == {tickets[2]}
    assert ring.claim(1) is None
    ring.close()


def test_the_task_table_is_reused(ring):
    for round_ in range(40):
        tickets = ring.publish([Task(round_ % 3, 0, 4), Task(round_ % 3, 4, 8)])
        assert [ring.claim(0)[0], ring.claim(0)[0]] == tickets


def test_withdrawn_tasks_are_not_claimed(ring):
    ring.publish([Task(0, 0, 4), Task(0, 4, 8), Task(0, 8, 10)])
    ring.claim(0)
    assert ring.withdraw_unclaimed() == {1, 2}
    assert ring.claim(1) is None
    assert ring.publish([Task(1, 0, 4)]) == [3]
    assert ring.claim(1) == (3, Task(1, 0, 4))


def test_a_claim_has_the_ticket_and_the_item(ring):
    assert ring.claim_of(0) is None
    ring.publish([Task(0, 0, 4)])
    ring.claim(0)
    assert ring.claim_of(0).item == -1
    ring.note_item(0, 17)
    assert (ring.claim_of(0).ticket, ring.claim_of(0).item) == (0, 17)
    ring.release(0)
    assert ring.claim_of(0) is None


def test_a_worker_that_died_between_the_two_writes_of_a_claim_has_claimed_nothing(ring):
    ring.publish([Task(0, 0, 4)])
    ring._cells[0] = (0, 0, -1)  # the cell is written, the queue has not advanced
    assert ring.claim_of(0) is None
    assert ring.claim(1) == (0, Task(0, 0, 4))


def test_a_lock_is_released_when_its_holder_dies(ring):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        ring._lock.__enter__()
        os.write(writer, b"x")
        os.kill(os.getpid(), 9)
    os.read(reader, 1)
    os.waitpid(pid, 0)
    ring.publish([Task(0, 0, 4)])  # would otherwise block forever
    assert ring.claim(0) is not None
    os.close(reader)
    os.close(writer)


def test_rows_are_gathered_in_batch_order_in_whatever_order_workers_finish(ring):
    rng = np.random.default_rng(0)
    ring.slots[1].open_for(step_of(10), 3)
    boxes = [rng.random((n, 4), dtype=np.float32) for n in (0, 2, 1, 0, 3, 1, 0, 0, 2, 1)]
    marks = [rng.integers(0, 9, (n, 1)).astype(np.uint8) for n in (1, 0, 0, 2, 0, 1, 5, 0, 0, 1)]
    for begin, end in [(8, 10), (0, 4), (4, 8)]:
        taken = {"boxes": boxes[begin:end], "marks": marks[begin:end]}
        assert hand_over(ring, Task(1, begin, end), taken) == 0
    rows = gather_rows(ring, 1, RowsBuffer())
    np.testing.assert_array_equal(rows["boxes"], np.concatenate(boxes))
    np.testing.assert_array_equal(rows["marks"], np.concatenate(marks))
    assert ring.slots[1].counts["boxes"].tolist() == [len(each) for each in boxes]


def test_rows_that_do_not_fit_report_the_bytes_they_need_and_go_to_a_spill(ring):
    ring.slots[0].open_for(step_of(4), 3)
    crowd = {"boxes": [np.ones((5000, 4), np.float32)] * 4, "marks": [np.zeros((0, 1), np.uint8)] * 4}
    needed = hand_over(ring, Task(0, 0, 4), crowd)
    assert needed >= 4 * 5000 * 16
    spill = Task(0, 0, 4, spill_offset=ring.arena.grow(needed), spill_bytes=needed)
    assert hand_over(ring, spill, crowd) == 0
    assert gather_rows(ring, 0, RowsBuffer())["boxes"].shape == (20_000, 4)


def test_discarded_memory_is_returned_to_the_system(ring):
    before = ring.arena.reserved_bytes
    offset = ring.arena.grow(8 << 20)
    assert ring.arena.reserved_bytes - before == 8 << 20
    ring.arena.discard(offset)
    assert ring.arena.reserved_bytes == before


def test_an_item_that_killed_workers_stays_deadly_whatever_else_is_found(ring):
    assert ring.bad_items() is None
    ring.mark(3, UNREADABLE)
    ring.mark(5, DEADLY)
    ring.mark(5, UNREADABLE)
    assert np.flatnonzero(ring.bad_items()).tolist() == [3, 5]
    assert ring.deadly_items() == [5]


def test_finishing_the_last_task_of_a_slot_returns_true(ring):
    ring.slots[0].open_for(step_of(10), 3)
    tasks = [Task(0, 0, 4), Task(0, 4, 8), Task(0, 8, 10)]
    assert [ring.finish(task) for task in (tasks[2], tasks[0], tasks[1])] == [False, False, True]
    ring.slots[0].open_for(step_of(4), 1)
    assert not ring.is_done(tasks[0])
    assert ring.finish(tasks[0])
