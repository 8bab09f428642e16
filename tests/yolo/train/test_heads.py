"""`train()` with several heads: from options to weights that load anywhere, resumed, transferred, class-aware."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from flatout.errors import ConfigError, MissingFileError
from flatout.yolo.evaluate.evaluate import test as evaluate
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.load_network import load_network
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.info import describe_weights
from flatout.yolo.model.network import build_network
from flatout.yolo.multihead.layer import MultiHeadDetectAttention
from flatout.yolo.multihead.training import chosen_heads, read_head_params
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.train import train
from flatout.yolo.train.recipe import new_network, wanted_heads
from flatout.yolo.train.step import DetectionLoss
from flatout.yolo.weights import read_weights
from tests.yolo.head_batches import make_groups
from tests.yolo.train.fixed_batches import FixedBatches, random_batch
from tests.yolo.train.small_training import loss_config, make_loop, tiny_hyp

pytestmark = pytest.mark.usefixtures("one_thread")
GROUPS = make_groups([[5, 0], [2], [1, 4, 3]], [1.0, 0.5, 2.0])
NAMES = ["ring", "cross", "star", "triangle", "ball", "box"]


class Opened(Exception):
    """Training has come to its input; the argument is what it asks of it."""


@pytest.fixture
def heads(options: TrainOptions, tmp_path: Path) -> TrainOptions:
    """A training with three heads for six classes."""
    file = tmp_path / "heads.yaml"
    file.write_text(yaml.safe_dump(GROUPS.plain()))
    return replace(options, heads=3, head_config=str(file), epochs=1)


def test_the_weights_of_a_run_contain_their_heads(heads):
    result = train(heads)
    best = result.folder / "weights/best.pt"
    network = load_network(best).network
    assert network.head.groups == GROUPS
    assert describe_weights(best).network.head == "MultiHeadDetect"
    row = (result.folder / "results.txt").read_text().split()
    assert all(float(loss) > 0 for loss in row[-3:]), "the losses of the validation are computed"
    evaluated = evaluate(
        TestOptions(weights=(str(best),), data=heads.data, img_size=64, device="cpu", workers=0, project=heads.project)
    )
    assert [line.split()[0] for line in evaluated.text.splitlines()][1:3] == ["all", "ring"]


def test_a_run_that_was_cut_ends_as_a_whole_one_does(heads):
    heads = replace(heads, notest=True)
    whole = train(replace(heads, name="whole"))
    train(replace(heads, name="cut", stop_after=2))
    again = train(replace(heads, name="cut"))
    one, other = (read_weights(each.folder / "weights/last.pt").for_inference() for each in (whole, again))
    assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []


def test_transferred_weights_contain_everything_but_the_heads(heads, tmp_path, caplog):
    single = train(replace(heads, heads=0, head_config="", stop_after=1, name="single"))
    weights = single.folder / "weights/last.pt"
    for cfg in (heads.cfg, ""):
        caplog.clear()
        with caplog.at_level(logging.INFO, "flatout"):
            options = replace(heads, cfg=cfg, weights=str(weights), transfer_weights=True)
            start = new_network(options, tiny_hyp(), NAMES)
        assert "Transferred 332/350 items" in caplog.text
        assert start.weights is None, "neither momentum nor epochs are taken over"
        trained = read_weights(weights).for_training()
        own = start.network.state_dict()
        for key in ("model.0.conv.weight", "model.77.anchors", "model.77.anchor_grid"):
            torch.testing.assert_close(own[key], trained[key].float())


@pytest.mark.parametrize("loss_ota", [0, 1])
def test_all_heads_learn(loss_ota):
    torch.manual_seed(0)
    groups = make_groups([[2, 0], [1]])
    network = build_network(load_config("yolov7-tiny-1b4h") | {"nc": 3, "width_multiple": 0.125}, heads=groups)
    before = {key: value.clone() for key, value in network.named_parameters() if ".heads." in key}
    hyp, batch = tiny_hyp(loss_ota=loss_ota), random_batch(1, batch_size=64, size=64, num_classes=3)
    loss = DetectionLoss(network.head, loss_config(network, hyp, 64), ota=hyp.ota)
    images, kind = batch["images"] / 255, loss.kind(0)
    start = float(loss(kind, network(images), batch["targets"]).items[3])
    loop, _ = make_loop(network, hyp, FixedBatches([batch] * 30), num_steps=30, batch_size=64, size=64)
    loop.run()
    with torch.no_grad():
        assert float(loss(kind, network(images), batch["targets"]).items[3]) < 0.8 * start
    own = dict(network.named_parameters())
    assert all((own[key] - value).abs().max() > 1e-4 for key, value in before.items())


def test_heads_without_a_file_are_blocks_of_classes_and_may_have_attention(options):
    network = new_network(replace(options, heads=2, head_attention=True), tiny_hyp(), NAMES).network
    assert isinstance(network.head, MultiHeadDetectAttention)
    assert [group.classes for group in network.head.groups.heads] == [(0, 1, 2), (3, 4, 5)]


def test_the_file_says_how_many_heads_there_are(heads, caplog):
    choice = chosen_heads(wanted_heads(replace(heads, heads=4)), num_classes=6)
    assert choice.groups == GROUPS
    assert "--heads 4 is ignored: " in caplog.text and "has 3 heads." in caplog.text
    assert chosen_heads(wanted_heads(replace(heads, heads=0)), num_classes=6).groups == GROUPS
    assert chosen_heads(wanted_heads(TrainOptions()), num_classes=6) is None


def test_impossible_heads_are_refused(heads):
    with pytest.raises(ConfigError, match=r"--head-config .*: assigns 6 classes, but the data set has 5"):
        chosen_heads(wanted_heads(heads), num_classes=5)
    with pytest.raises(ConfigError, match="--heads 7: there are only 6 classes"):
        chosen_heads(wanted_heads(replace(heads, head_config="", heads=7)), num_classes=6)
    with pytest.raises(ConfigError, match=r"--head-config nowhere\.yaml: no such file"):
        chosen_heads(wanted_heads(replace(heads, head_config="nowhere.yaml")), num_classes=6)


def test_mosaics_are_rotated_by_head(heads, tmp_path, monkeypatch):
    def stop(images, config, *_):
        raise Opened(config)

    monkeypatch.setattr("flatout.yolo.train.recipe.open_input", stop)
    params = {f"head_{head}": dict.fromkeys(("flipud", "fliplr", "mixup"), 0.1) for head in range(3)}
    for head, one in enumerate(params.values()):
        one |= {"degrees": 10.0 * head, "shear": float(head)}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    with pytest.raises(Opened) as opened:
        train(replace(heads, class_aware_aug=True, head_params=str(tmp_path / "params.yaml")))
    config = opened.value.args[0]
    assert config.class_aware.degrees_H.tolist() == [0, 10, 20]
    assert config.class_aware.shear_H.tolist() == [0, 1, 2]
    assert config.class_aware.count_NH.shape == (70, 3) and config.class_aware.count_NH.sum(0).all()


def test_class_aware_augmentation_of_a_single_head_is_only_a_warning(options, caplog):
    result = train(replace(options, class_aware_aug=True, epochs=1, stop_after=1))
    assert not result.finished
    assert "--class-aware-aug: the network has one head" in caplog.text


def test_the_shipped_head_parameters_are_those_of_the_search():
    params = read_head_params(shipped_folder("data") / "hyp.head_params.yaml", num_heads=4)
    assert np.allclose([one.degrees for one in params], [2.4246, 0.0796, 0.8416, 0.0677])
    assert np.allclose([one.shear for one in params], [0.1397, 1.6101, 0.1311, 3.0063])


def test_missing_head_parameters_are_named(tmp_path):
    file = tmp_path / "params.yaml"
    file.write_text("head_0: {degrees: 1, shear: 1, flipud: 0, fliplr: 0}\n")
    with pytest.raises(ValueError, match=r"head_0\.mixup is missing"):
        read_head_params(file, num_heads=1)
    with pytest.raises(ValueError, match=r"head_0\.mixup is missing|head_1 is missing"):
        read_head_params(file, num_heads=2)
    file.write_text("head_0: {degrees: much, shear: 1, flipud: 0, fliplr: 0, mixup: 0}\n")
    with pytest.raises(ValueError, match=r"head_0\.degrees='much' must be a number"):
        read_head_params(file, num_heads=1)
    with pytest.raises(FileNotFoundError):
        read_head_params(tmp_path / "none.yaml", num_heads=1)
    assert issubclass(MissingFileError, ConfigError)
