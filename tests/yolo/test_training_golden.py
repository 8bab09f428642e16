"""Schedules, parameter groups, moving averages and result lines against the numbers of real YOLOv7 trainings."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from flatout.engine.optim import MovingAverage, decay_at
from flatout.yolo.loss import LossConfig
from flatout.yolo.metrics import YOLOV7_RESULTS, fitness
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.train.prepare import parameter_groups
from flatout.yolo.train.step import (
    YoloSchedule,
    accumulate_for,
    scaled_shape,
    scaled_weight_decay,
    size_of_draw,
    sizes_from,
)
from flatout.yolo.train.validate import results_line
from tests.golden_cases import golden_cases
from tests.yolo.recipes import recipe


def near(expected: Any) -> Any:
    return pytest.approx(expected, rel=1e-12, abs=1e-15)


def check_schedule(record: dict[str, Any]) -> None:
    steps_per_epoch, total_batch = record["nb"], record["total_batch_size"]
    hyp = recipe(**record["hyp"])
    schedule = YoloSchedule(
        hyp,
        epochs=record["epochs"],
        steps_per_epoch=steps_per_epoch,
        total_batch=total_batch,
        linear=record["linear"],
        adam=record["adam"],
    )
    if "warmup_iters" in record:
        assert schedule.num_warmup == record["warmup_iters"]
    if "scaled_weight_decay" in record:
        assert scaled_weight_decay(hyp.weight_decay, total_batch=total_batch) == near(record["scaled_weight_decay"])
    for iteration, epoch, *lrs, momentum, accumulate, steps in record.get("rows", []):
        settings = schedule(epoch, iteration - epoch * steps_per_epoch)
        assert list(settings.lrs) == near(lrs), iteration
        assert settings.momentum == (None if record["adam"] else near(momentum)), iteration
        assert (schedule.accumulate(iteration), settings.step_optimizer) == (accumulate, steps), iteration
    if "optimizer_steps" in record:
        epochs = range(record["start_epoch"], record["epochs"])
        taken = sum(schedule(epoch, step).step_optimizer for epoch in epochs for step in range(steps_per_epoch))
        assert taken == record["optimizer_steps"]


def check_loss_gains(record: dict[str, Any]) -> None:
    scaled = LossConfig(**record["base"]).scaled(
        num_layers=record["nl"], num_classes=record["nc"], image_size_px=record["imgsz"]
    )
    assert {name: getattr(scaled, name) for name in record["scaled"]} == near(record["scaled"])


def check_accumulate(record: dict[str, Any]) -> None:
    total_batch = record["total_batch_size"]
    assert accumulate_for(total_batch) == record["accumulate"]
    assert scaled_weight_decay(0.0005, total_batch=total_batch) == near(record["weight_decay"])


def check_multi_scale(record: dict[str, Any]) -> None:
    grid, draws = record["gs"], sizes_from(record["imgsz"], record["gs"])
    assert (draws.start, draws.stop) == (record["draw_low"], record["draw_high_exclusive"])
    sizes = [size_of_draw(draw, grid) for draw in draws]
    if "sizes" in record:
        assert sorted(set(sizes)) == record["sizes"]
    if "draws_per_size" in record:
        assert {str(size): sizes.count(size) for size in set(sizes)} == record["draws_per_size"]
    for example in record.get("examples", []):
        assert size_of_draw(example["draw"], grid) == example["sz"]
        assert list(scaled_shape(*example["in_hw"], size=example["sz"], grid=grid)) == example["out_hw"]


def check_results_line(record: dict[str, Any]) -> None:
    example = record["example"]
    line = results_line(
        epoch=example["epoch"],
        epochs=example["epochs"],
        memory_gb=example["mem_gb"],
        mean_losses=example["mean_losses"],
        num_targets=example["last_batch_targets"],
        width_px=example["last_batch_width"],
        scores=dict(zip(YOLOV7_RESULTS, example["results"], strict=True)),
    )
    assert f"{line}\n" == record["line"]


def check_fitness(record: dict[str, Any]) -> None:
    assert fitness(map50=record["results"][2], map50_95=record["results"][3]) == near(record["fitness"])


def check_decay(record: dict[str, float]) -> None:
    assert {update: decay_at(int(update)) for update in record} == near(record)


def check_moving_average(record: dict[str, Any]) -> None:
    initial = record["initial"]
    num_out = len(initial["0.bias"])
    network = nn.Sequential(nn.Conv2d(len(initial["0.weight"]) // num_out, num_out, 1), nn.BatchNorm2d(num_out))
    state = network.double().state_dict()
    network.load_state_dict({key: torch.tensor(initial[key]).reshape(value.shape) for key, value in state.items()})
    average = MovingAverage(network)
    for update, expected in enumerate(record["after_each_update"]):
        change(network, update)
        average.update()
        got = {key: value.flatten().tolist() for key, value in average.network.state_dict().items()}
        assert got.keys() == expected.keys()
        assert all(got[key] == near(expected[key]) for key in expected), update


@torch.no_grad()
def change(network: nn.Sequential, update: int) -> None:
    """Change the network by the `rule` of the golden file."""
    for parameter in network.parameters():
        parameter.add_(0.1 * (update + 1))
    norm = network[1]
    assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None and norm.num_batches_tracked is not None
    norm.running_mean.add_(1)
    norm.num_batches_tracked.add_(1)


def check_groups(record: tuple[str, dict[str, Any]]) -> None:
    name, expected = record
    with torch.device("meta"):
        network = build_network(load_config(name))
    groups = parameter_groups(network)
    grouped = [id(value) for group in groups for value in group]
    got = dict(zip(("no_decay", "decay", "bias"), map(len, groups), strict=True)) | {
        "n_elem": [sum(value.numel() for value in group) for group in groups],
        "duplicates": len(grouped) - len(set(grouped)),
        "parameters_in_no_group": len({id(value) for value in network.parameters()} - set(grouped)),
        "n_params": sum(value.numel() for value in network.parameters()),
        "stride": list(network.spec.head.strides),
    }
    assert {key: got[key] for key in expected} == expected


CHECKS = {
    "schedule": check_schedule,
    "loss_gain_scaling": check_loss_gains,
    "accumulate_and_weight_decay": check_accumulate,
    "multi_scale": check_multi_scale,
    "results_txt": check_results_line,
    "fitness": check_fitness,
    "ema.decay_at": check_decay,
    "ema.toy": check_moving_average,
    "param_groups": check_groups,
}


def records(path: Path):
    for section, content in json.loads(path.read_text()).items():
        match section:
            case "ema":
                yield from ((f"ema.{part}", (f"ema.{part}", record)) for part, record in content.items())
            case "param_groups":
                yield from ((f"{section} {name}", (section, (name, record))) for name, record in content.items())
            case _ if isinstance(content, list):
                yield from ((f"{section} {number}", (section, record)) for number, record in enumerate(content))
            case _:
                yield section, (section, content)


@pytest.mark.parametrize("case", golden_cases("yolov7-data/training.json", records))
def test_training_follows_the_golden_numbers(case):
    section, record = case
    assert section in CHECKS, f"unknown section {section!r}"
    CHECKS[section](record)
