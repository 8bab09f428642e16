"""Hyp files are read strictly, report all mistakes at once, and become configs of the loss and the augmentation."""

from dataclasses import asdict

import pytest

from flatout.errors import ConfigError
from flatout.yolo.augment.draw import AugmentConfig
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.hyp import load_hyp
from flatout.yolo.loss import LossConfig
from tests.yolo.recipes import recipe

P5 = shipped_folder("data") / "hyp.scratch.p5.yaml"


def changed(tmp_path, *, without: str = "", extra: str = ""):
    lines = [line for line in P5.read_text().splitlines() if not (without and line.startswith(f"{without}:"))]
    file = tmp_path / "hyp.yaml"
    file.write_text("\n".join([*lines, extra]))
    return file


def test_the_defaults_of_losses_and_augmentation_are_those_of_the_p5_recipe():
    hyp = load_hyp(P5)
    assert hyp.augment() == AugmentConfig()
    assert hyp.loss() == LossConfig()
    assert hyp.loss(label_smoothing=0.1).label_smoothing == 0.1


def test_ota_is_on_unless_the_file_turns_it_off(tmp_path):
    assert load_hyp(changed(tmp_path, without="loss_ota")).ota
    assert not load_hyp(changed(tmp_path, without="loss_ota", extra="loss_ota: 0")).ota
    assert not load_hyp(changed(tmp_path, without="loss_ota", extra="loss_ota: 2")).ota


def test_optional_keys_are_read(tmp_path):
    hyp = load_hyp(changed(tmp_path, extra="warmup_iters: 12\nanchors: 3\ngamma: 0.3"))
    assert (hyp.warmup_iters, hyp.anchors, hyp.augment().gamma) == (12, 3, 0.3)
    assert (load_hyp(P5).warmup_iters, load_hyp(P5).anchors, load_hyp(P5).augment().gamma) == (None, None, 0.0)


def test_every_missing_unknown_and_wrong_key_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        load_hyp(changed(tmp_path, without="mosaic", extra="mozaic: 1.0\nwarmup_iters: soon"))
    assert "mosaic: missing key - add it" in str(error.value)
    assert "mozaic: unknown key (1.0) - did you mean 'mosaic'?" in str(error.value)
    assert "warmup_iters: wrong value ('soon') - write a whole number" in str(error.value)


def test_every_value_out_of_range_is_reported_at_once(tmp_path):
    with pytest.raises(ConfigError) as error:
        recipe(lr0=-1.0, momentum=1.0, mosaic=1.5, mixup=-0.1, anchor_t=1.0, warmup_iters=-1)
    for key in ("lr0=-1.0", "momentum=1.0", "mosaic=1.5", "mixup=-0.1", "anchor_t=1.0", "warmup_iters=-1"):
        assert key in str(error.value)


def test_auto_lr_scales_above_64_images_and_warms_up_longer_from_128():
    hyp = recipe()
    assert hyp.for_batch(64) == hyp
    assert asdict(hyp.for_batch(100)) == asdict(hyp) | {"lr0": pytest.approx(0.0125)}
    assert asdict(hyp.for_batch(256)) == asdict(hyp) | {"lr0": pytest.approx(0.02), "warmup_epochs": 5.0}
    assert recipe(warmup_epochs=7.0).for_batch(256).warmup_epochs == 7.0
