"""The tuner takes what is fastest, no more of the machine than that needs, and remembers it for the same facts only."""

import json
import threading
from dataclasses import replace

import pytest

from flatout.profiler.tuning import Costs, Tunings, choose, fingerprint, measuring_budget_s

GPU = Costs(
    images=64,
    step_ms=50,
    main_cpu_ms=20,
    decode_ms=2.0,
    augment_ms=2.0,
    draw_ms=0.05,
    cores=16,
    decoded_bytes=10 << 30,
    ram_free_bytes=100 << 30,
    device_free_bytes=60 << 30,
    render_ms=1.0,
    epochs=100,
)


def test_a_gpu_with_room_keeps_and_augments_the_pictures():
    choice = choose(GPU)
    assert (choice.keep, choice.augment_on_device) == ("device", True)
    assert choice.workers <= 2
    assert choice.step_ms == pytest.approx(51, rel=0.03)


def test_without_a_renderer_workers_are_added_up_to_the_knee():
    choice = choose(replace(GPU, render_ms=None))
    # 64 images x (2 x 6 % + 2) ms = 136 ms of a core for a step of 50 ms.
    assert (choice.keep, choice.workers) == ("ram", 3)
    assert choice.step_ms == pytest.approx(50)


def test_pictures_that_do_not_fit_are_decoded_each_time():
    choice = choose(replace(GPU, render_ms=None, ram_free_bytes=1 << 30, device_free_bytes=0))
    assert (choice.keep, choice.workers) == ("off", 6)


def test_a_store_is_not_built_for_one_epoch():
    assert choose(replace(GPU, epochs=1)).keep == "off"


def test_two_cores_that_train_get_no_crowd_of_workers():
    choice = choose(replace(GPU, step_ms=400, main_cpu_ms=780, cores=2, device_free_bytes=0, render_ms=None))
    assert choice.workers <= 1


@pytest.mark.parametrize(
    ("room", "allowed", "form"),
    [
        (60 << 30, True, "decoded"),
        (60 << 30, False, "decoded"),
        (12 << 30, True, "4:2:0"),
        (12 << 30, False, "decoded"),
    ],
)
def test_colours_are_halved_only_where_that_is_allowed_and_saves_the_way_over_the_bus(room, allowed, form):
    """10 GiB of pictures of 4 MiB: half of 12 GiB holds them as 4:2:0, and 40 % of a batch would cross the bus else."""
    costs = replace(GPU, step_ms=5, augment_ms=8.0, device_free_bytes=room, picture_bytes=4 << 20)
    choice = choose(replace(costs, may_subsample=allowed))
    assert (choice.keep, choice.format) == ("device", form)


@pytest.mark.parametrize("place", ["off", "ram"])
def test_a_place_that_is_given_is_kept_to(place):
    choice = choose(replace(GPU, place=place, epochs=1))
    assert (choice.keep, choice.augment_on_device) == (place, False)
    assert choice.format == {"off": "files", "ram": "decoded"}[place]


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 64])
def test_workers_never_exceed_the_cores(cores):
    starved = replace(GPU, step_ms=1, cores=cores, device_free_bytes=0, render_ms=None)
    assert choose(starved).workers <= cores


@pytest.mark.parametrize("most", [0, 1, 3])
def test_workers_never_exceed_what_was_asked_for(most):
    assert choose(replace(GPU, step_ms=1, device_free_bytes=0, render_ms=None, most_workers=most)).workers <= most


def test_a_step_without_launches_is_too_short_for_pictures_made_by_the_cpu():
    """16 pictures x 8 ms in four workers: enough for a step of 35 ms, not for the 6 ms of its kernels alone."""
    small = replace(GPU, images=16, decode_ms=4.0, augment_ms=4.0, most_workers=4, draw_ms=0.05)
    assert choose(replace(small, step_ms=6.0, main_cpu_ms=2.0)).augment_on_device


def test_no_other_way_is_predicted_to_be_much_faster():
    for step_ms in (1, 5, 20, 100):
        for cores in (1, 2, 8):
            costs = replace(GPU, step_ms=step_ms, cores=cores)
            best = min(
                choose(replace(costs, cores=fewer, render_ms=render, device_free_bytes=room)).step_ms
                for fewer in range(1, cores + 1)
                for render in (1.0, None)
                for room in (0, 60 << 30)
            )
            assert choose(costs).step_ms <= 1.03 * best


def test_measuring_takes_a_twentieth_of_the_run_and_never_over_a_minute():
    assert measuring_budget_s(100) == 5
    assert measuring_budget_s(1e6) == 60


def test_a_choice_is_remembered_for_the_same_facts_only(tmp_path):
    tunings, facts, choice = Tunings(tmp_path / "cache" / "tunings.json"), {"GPU": "H200", "data": "abc"}, choose(GPU)
    assert tunings.recall(facts) is None
    tunings.remember(facts, choice)
    assert tunings.recall(facts) == choice
    assert tunings.recall({**facts, "data": "abd"}) is None
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


@pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 3}'])
def test_a_damaged_memory_is_no_memory(tmp_path, content):
    facts = {"data": "x"}
    (tmp_path / "t.json").write_text(content.replace("x", fingerprint(facts)))
    tunings = Tunings(tmp_path / "t.json")
    assert tunings.recall(facts) is None
    tunings.remember(facts, choose(GPU))
    assert tunings.recall(facts) == choose(GPU)


@pytest.mark.parametrize(
    "wrong",
    [
        {"workers": "many"},
        {"workers": -3},
        {"slots": 1e9},
        {"keep": "tape"},
        {"keep": "ram", "augment_on_device": True},
        {"format": None},
        {"step_ms": "fast"},
        {"more": 1},
    ],
)
def test_a_choice_that_nobody_would_make_is_not_remembered(tmp_path, wrong):
    file, facts = tmp_path / "t.json", {"data": "x"}
    Tunings(file).remember(facts, choose(GPU))
    content = json.loads(file.read_text())
    content[fingerprint(facts)]["choice"] |= wrong
    file.write_text(json.dumps(content))
    assert Tunings(file).recall(facts) is None


def test_trainings_of_equal_process_numbers_do_not_write_into_one_file(tmp_path):
    """Containers that share a home: every process there may be number 1."""
    file = tmp_path / "t.json"
    writers = [
        threading.Thread(target=lambda name=name: [Tunings(file).remember({"x": name}, choose(GPU)) for _ in range(20)])
        for name in "abcd"
    ]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert not file.exists() or json.loads(file.read_text())
    for writer in writers:
        writer.join()
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
