"""`choose_input` case by case: as docs/fast.md says, and as the code decided before it was one function."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatout.yolo.options import TrainOptions
from flatout.yolo.train.choose_input import (
    Asked,
    Choice,
    Costs,
    Machine,
    Measured,
    choose_input,
    depends_on_measurement,
    describe_rule,
    remark_on_gpu_decode,
)
from tests.yolo.train.input_cases import CASES, GB, GPU, IMAGE_BYTES, Case, costs_of, machine_of

PAGE = Path(__file__).parents[3] / "docs/fast.md"
FAST = TrainOptions(fast=True).asked
ON_GPU = TrainOptions(fast=True, gpu_decode=True).asked


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.row())
def test_the_first_choice_and_its_reason(case: Case) -> None:
    first = case.choices()[0]
    assert (first.what, first.why) == (case.what, case.why)


def test_the_page_shows_these_cases() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `--")]
    assert rows == [case.row() for case in CASES]
    example = next(case for case in CASES if (case.gpu_gb, case.cores) == (8, 2))
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("--fast, choice")]
    assert shown == [f"--fast, choice {number}: {choice}." for number, choice in enumerate(example.choices(), 1)]


# Decisions recorded before there was one function (commit cdcb68b; a few rows at 3ffa6a6, whose code is the same), with
# files and devices replaced: some rows of a grid. The wording of "said" was updated since, and a GPU decodes only on
# request: the rows in which it did now ask for that.

BEFORE = [json.loads(line) for line in (Path(__file__).parent / "decisions_before.jsonl").read_text().splitlines()]
FLAGS: dict[str, dict[str, Any]] = {
    "auto": {"workers": "auto"}, "cache": {"cache_images": True}, "fdl": {"fast_dataloader": True},
    "dev": {"device_augment": True}, "420": {"store_420": True}, "fast": {"fast": True}, "w0": {"workers": 0},
    "nodev": {"no_device_augment": True}, "nofdl": {"no_fast_dataloader": True}, "nogpu": {"no_gpu_decode": True},
    "noscaled": {"no_scaled_decode": True}, "workers": {},
}  # fmt: skip
QUICK = Measured(step_ms=5.0, main_cpu_ms=1.0, decode_ms=4.0, augment_ms=4.0, draw_ms=0.01, render_ms=16 * 0.4096 / 20)
SLOW = replace(QUICK, step_ms=200.0, main_cpu_ms=20.0, decode_ms=2.0, augment_ms=1.0)


@pytest.mark.parametrize("before", BEFORE, ids=lambda before: " ".join(map(str, before["case"])))
def test_decisions_are_those_that_were_made_before(before: dict[str, Any]) -> None:
    words, cores, gpu_gb, set_gb, measured, ranks, epochs, device_refuses = before["case"]
    given = {key: value for word in words.split() for key, value in FLAGS[word].items()}
    asked = TrainOptions(**given, gpu_decode=before.get("nvjpeg", False)).asked
    machine = machine_of(gpu_gb, cores, ranks=ranks)
    costs = costs_of(float(set_gb), {"short": None, "quick": QUICK, "slow": SLOW}[measured], epochs=epochs)
    choices = choose_input(asked, machine, costs)
    left = depends_on_measurement(asked, gpu=machine.has_gpu)
    if "error" in before:
        assert [choice.settings.on_device for choice in choices] == [True], "nothing else to try"
        return
    opened = next(each for each in choices if not (device_refuses and each.settings.on_device))
    assert before == {"case": before["case"], "left": left, "said": before["said"]} | seen_in(opened)
    assert before["said"].startswith(said_of(asked, choices[0], costs) if left else "")


def seen_in(choice: Choice) -> dict[str, Any]:
    settings = choice.settings
    seen: dict[str, Any] = {"workers": settings.workers, "nvjpeg": settings.gpu_decode}
    if settings.on_device:
        seen |= {"where": "device", "format": "4:2:0" if settings.subsampled else "decoded"}
        seen |= {"store": not settings.gpu_decode}
    else:
        seen |= {"where": "workers", "slots": settings.slots}
        seen |= {"store": settings.keep != "off"}
    return seen if settings.gpu_decode else seen | {"shrunk": settings.shrunk}


def said_of(asked: Asked, first: Choice, costs: Costs) -> str:
    if costs.measured is None:
        return describe_rule(asked, first)
    return f"{asked.flag}, measured in X s: {first.what}: {first.img_s:,.0f} img/s expected."


# The list of choices


def test_a_device_that_decodes_comes_before_one_that_does_not_and_before_workers() -> None:
    choices = choose_input(ON_GPU, machine_of(8, 2), costs_of(3, GPU))
    assert [(each.settings.keep, each.settings.gpu_decode) for each in choices] == [
        ("device", True), ("device", False), ("ram", False), ("ram", False), ("off", False)
    ]  # fmt: skip
    instead = choices[2]
    assert instead.why == "fallback if the device cannot augment; all 3.0 GB fit in RAM"
    assert (instead.settings.workers, instead.settings.slots) == (2, None), "as --workers says, within the cores"


def test_device_augment_without_fast_leaves_a_single_choice() -> None:
    asked = TrainOptions(device_augment=True).asked
    assert [each.settings.keep for each in choose_input(asked, machine_of(8, 16), costs_of(3, None))] == ["device"]


@pytest.mark.parametrize("cores", [1, 64])
@pytest.mark.parametrize("nvjpeg", [False, True])
def test_the_gpu_decodes_only_where_it_can_and_on_request(cores: int, nvjpeg: bool) -> None:
    machine, costs = replace(machine_of(8, cores), nvjpeg=nvjpeg), costs_of(3, None)
    assert choose_input(ON_GPU, machine, costs)[0].settings.gpu_decode == nvjpeg
    assert not any(choice.settings.gpu_decode for choice in choose_input(FAST, machine, costs))


@pytest.mark.parametrize(("set_gb", "decodes"), [(3.9, True), (4.1, False)])
def test_the_gpu_decodes_only_what_fits_into_its_memory(set_gb: float, decodes: bool) -> None:
    assert choose_input(ON_GPU, machine_of(8, 2), costs_of(set_gb, None))[0].settings.gpu_decode == decodes


TOO_LARGE = "not all images fit into half of the free GPU memory and half of the free RAM."
HINT = "With only {} cores, --gpu-decode may decode JPEG files sooner; their pixels then differ slightly."


@pytest.mark.parametrize(
    ("asked", "machine", "set_gb", "remark"),
    [
        (FAST, machine_of(8, 2), 3.0, HINT.format(2)),
        (FAST, machine_of(8, 8), 3.0, HINT.format(8)),
        (FAST, machine_of(8, 9), 3.0, ""),
        (FAST, machine_of(8, 2), 4.1, ""),
        (FAST, machine_of(None, 2), 3.0, ""),
        (ON_GPU, machine_of(8, 2), 3.0, ""),
        (ON_GPU, machine_of(8, 64), 3.0, ""),
        (ON_GPU, replace(machine_of(8, 2), nvjpeg=False), 3.0, "that takes an NVIDIA GPU and torchvision."),
        (ON_GPU, machine_of(8, 2), 4.1, TOO_LARGE),
        (ON_GPU, machine_of(None, 2), 3.0, "images are not kept on the GPU."),
    ],
)
def test_the_log_says_if_decoding_on_the_gpu_has_no_effect_or_may_help(
    asked: Asked, machine: Machine, set_gb: float, remark: str
) -> None:
    costs = costs_of(set_gb, None)
    said = remark_on_gpu_decode(asked, machine, costs, choose_input(asked, machine, costs)[0])
    assert said == (f"--gpu-decode has no effect: {remark}" if asked.gpu_decode and remark else remark)


def test_decoding_at_full_size_changes_only_its_own_setting() -> None:
    machine, costs = machine_of(8, 2), costs_of(3, None)
    all_parts = choose_input(FAST, machine, costs)[0].settings
    assert all_parts.shrunk
    asked = TrainOptions(fast=True, no_scaled_decode=True).asked
    assert choose_input(asked, machine, costs)[0].settings == replace(all_parts, shrunk=False)


def test_flags_say_yes_no_or_nothing() -> None:
    assert TrainOptions().asked == Asked()
    assert TrainOptions(fast=True).asked == Asked(
        fast=True, device_augment=None, fast_dataloader=None, scaled_decode=None
    )
    given = TrainOptions(fast=True, device_augment=True, no_fast_dataloader=True, no_scaled_decode=True).asked
    assert (given.device_augment, given.fast_dataloader, given.scaled_decode) == (True, False, False)
    assert TrainOptions(fast=True, gpu_decode=True).asked.gpu_decode


# Predicted speeds

ROOMY = Machine(cores=16, ram_free_bytes=100 << 30, gpu_free_bytes=60 << 30)
LONG = Costs(
    batch_size=64,
    num_pictures=(10 << 30) // IMAGE_BYTES,
    decoded_bytes=10 << 30,
    epochs=100,
    measured=Measured(step_ms=50, main_cpu_ms=20, decode_ms=2.0, augment_ms=2.0, draw_ms=0.05, render_ms=1.0),
)
ON_CPU = replace(FAST, device_augment=False)


def measured(**changes: float) -> Costs:
    assert LONG.measured is not None
    return replace(LONG, measured=replace(LONG.measured, **changes))


def test_workers_are_added_up_to_the_knee() -> None:
    # 64 images x (2 x 6 % + 2) ms = 136 ms of a core for a step of 50 ms.
    settings = choose_input(ON_CPU, ROOMY, LONG)[0].settings
    assert (settings.keep, settings.workers, settings.slots) == ("ram", 3, 5)


def test_two_cores_that_also_train_get_at_most_one_worker() -> None:
    choice = choose_input(ON_CPU, replace(ROOMY, cores=2), measured(step_ms=400, main_cpu_ms=780))[0]
    assert choice.settings.workers <= 1


@pytest.mark.parametrize(
    ("room_gb", "allowed", "halved"), [(60, True, False), (60, False, False), (12, True, True), (12, False, False)]
)
def test_colours_are_subsampled_only_if_allowed_and_if_that_saves_copies_over_the_bus(room_gb, allowed, halved):
    """10 GiB of images of 4 MiB: half of 12 GiB holds them as 4:2:0; else 40 % of a batch would cross the bus."""
    costs = replace(measured(step_ms=5, augment_ms=8.0), num_pictures=(10 << 30) // (4 << 20))
    machine = replace(ROOMY, gpu_free_bytes=room_gb << 30)
    settings = choose_input(replace(FAST, store_420=allowed), machine, costs)[0].settings
    assert (settings.keep, settings.subsampled) == ("device", halved)


@pytest.mark.parametrize(("asked", "keep"), [(Asked(workers="auto"), "off"),
                                             (Asked(workers="auto", cache_images=True), "ram")])  # fmt: skip
def test_a_location_given_by_the_command_is_kept(asked: Asked, keep: str) -> None:
    assert {choice.settings.keep for choice in choose_input(asked, ROOMY, replace(LONG, epochs=1))} == {keep}


@pytest.mark.parametrize("cores", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("most", [0, 1, 3, 100])
def test_workers_never_exceed_the_cores_or_what_was_asked_for(cores: int, most: int) -> None:
    machine = replace(ROOMY, cores=cores)
    for choice in choose_input(replace(ON_CPU, workers=most), machine, measured(step_ms=1)):
        assert choice.settings.workers <= min(cores, most)


def test_a_step_without_launches_is_too_short_for_augmentation_on_the_cpu() -> None:
    """16 samples x 8 ms in four workers: enough for a step of 35 ms, not for the 6 ms of its kernels alone."""
    costs = replace(measured(decode_ms=4.0, augment_ms=4.0, step_ms=6.0, main_cpu_ms=2.0), batch_size=16)
    assert choose_input(replace(FAST, workers=4), ROOMY, costs)[0].settings.on_device


@pytest.mark.parametrize("step_ms", [1, 5, 20, 100])
@pytest.mark.parametrize("cores", [1, 2, 8])
def test_no_other_choice_is_predicted_to_be_much_faster(step_ms: float, cores: int) -> None:
    choices = choose_input(FAST, replace(ROOMY, cores=cores), measured(step_ms=step_ms))
    assert choices[0].img_s is not None
    assert 1.03 * choices[0].img_s >= max(choice.img_s or 0.0 for choice in choices)


def test_deciding_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, flatout.yolo.train.choose_input; print({'torch', 'numpy'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"


def test_gigabytes_are_those_of_the_cases() -> None:
    assert machine_of(8, 2).gpu_budget_bytes == 4 * GB and machine_of(None, 2).gpu_budget_bytes == 0
