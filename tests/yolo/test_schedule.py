"""Properties of the YOLOv7 schedule beyond the golden rows."""

import pytest
import torch

from flatout.yolo.model.configs import load_config
from flatout.yolo.model.network import build_network
from flatout.yolo.train.prepare import parameter_groups
from flatout.yolo.train.step import YoloSchedule, draw_size, sizes_from
from flatout.yolo.weights.legacy import parameter_groups as names_of_groups
from tests.yolo.recipes import recipe


def schedule(*, epochs=6, steps_per_epoch=50, total_batch=16, linear=False, adam=False, **hyp):
    return YoloSchedule(
        recipe(**hyp), epochs=epochs, steps_per_epoch=steps_per_epoch, total_batch=total_batch, linear=linear, adam=adam
    )


def test_warmup_never_ends_before_a_thousand_iterations_unless_the_hyp_file_says_so():
    assert schedule(warmup_epochs=3.0).num_warmup == 1000
    assert schedule(warmup_epochs=3.0, steps_per_epoch=500).num_warmup == 1500
    assert schedule(warmup_iters=20).num_warmup == 20


def test_without_warmup_the_first_iteration_learns_at_full_rate():
    settings = schedule(warmup_iters=0, total_batch=64)(0, 0)
    assert settings.lrs == (0.01, 0.01, 0.01)
    assert settings.momentum == 0.937
    assert settings.step_optimizer


def test_a_learning_rate_lags_one_epoch_behind_once_warmup_is_over():
    short = schedule(warmup_iters=60)
    reached = short(1, 10).lrs[0]  # iteration 60, the last of warm-up
    assert short(1, 49).lrs[0] == reached
    assert short(2, 0).lrs[0] == reached  # epoch 2 takes the factor of epoch 1
    assert short(3, 0).lrs[0] < reached


def test_weights_warm_up_from_zero_and_biases_from_a_higher_rate():
    long = schedule(steps_per_epoch=2000)
    weights, _, biases = zip(*(long(0, step).lrs for step in range(0, 2000, 100)), strict=True)
    assert weights[0] == 0.0 and list(weights) == sorted(weights)
    assert biases[0] == 0.1 and list(biases) == sorted(biases, reverse=True)


def test_gradients_are_accumulated_over_more_and_more_iterations_during_warmup():
    long = schedule(steps_per_epoch=4000, total_batch=8)
    counts = [long.accumulate(iteration) for iteration in range(0, 12001, 10)]
    assert (counts[0], counts[-1]) == (1, 8)
    assert counts == sorted(counts)


def test_adam_keeps_its_own_momentum():
    assert schedule(adam=True)(0, 5).momentum is None


@pytest.mark.parametrize("linear", [False, True])
def test_a_single_epoch_has_a_schedule_too(linear):
    assert schedule(epochs=1, linear=linear, warmup_iters=0)(0, 49).lrs[0] == pytest.approx(0.01)


def test_a_linear_decay_ends_at_lrf():
    line = schedule(epochs=5, linear=True, warmup_iters=0, lrf=0.2)
    assert line(4, 0).lrs[0] == pytest.approx(0.01 * (0.25 * 0.8 + 0.2))  # the factor of epoch 3


def test_groups_come_in_the_order_of_a_yolov7_optimizer_state():
    with torch.device("meta"):
        network = build_network(load_config("yolov7-tiny"))
    name_of = {id(value): name for name, value in network.named_parameters()}
    got = [[name_of[id(value)] for value in group] for group in parameter_groups(network)]
    assert got == [list(names) for names in names_of_groups(network.state_dict())]
    # Multiplicative implicit vectors before additive ones, after every batch norm.
    assert [".im." in name for name in got[0][-6:]] == [True] * 3 + [False] * 3


def test_frozen_parameters_stay_in_their_groups():
    with torch.device("meta"):
        network = build_network(load_config("yolov7-tiny"))
    before = [len(group) for group in parameter_groups(network)]
    network.requires_grad_(False)
    assert [len(group) for group in parameter_groups(network)] == before


def test_sizes_of_multi_scale_are_a_function_of_the_step_and_cover_the_range():
    sizes = [draw_size(320, 32, seed=3, epoch=1, step=step) for step in range(300)]
    assert sizes == [draw_size(320, 32, seed=3, epoch=1, step=step) for step in range(300)]
    assert set(sizes) == set(range(160, 481, 32))
    assert sizes != [draw_size(320, 32, seed=3, epoch=2, step=step) for step in range(300)]
    assert len(sizes_from(320, 32)) == 11 * 32  # every size equally likely
