"""What works with one head works with several: one compiled graph, device augmentation, the profiler."""

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from flatout.__main__ import main
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import train
from tests.yolo.head_batches import make_groups
from tests.yolo.model.test_network import narrow, random_images

pytestmark = pytest.mark.usefixtures("one_thread")
GROUPS = make_groups([[5, 0], [2], [1, 4, 3]], [1.0, 0.5, 2.0])


@pytest.fixture
def heads(options: TrainOptions, tmp_path: Path) -> TrainOptions:
    """A training with three heads for six classes."""
    file = tmp_path / "heads.yaml"
    file.write_text(yaml.safe_dump(GROUPS.plain()))
    return replace(options, heads=3, head_config=str(file), epochs=1, batch_size=8)


@pytest.mark.parametrize(("name", "training"), [("yolov7-tiny-1b4h", True), ("yolov7-tiny-1b4h-attn", False)])
def test_a_whole_network_is_one_graph(name, training):
    network = narrow(name, nc=8).train(training)
    torch.compiler.reset()
    x = random_images(side_px=64)
    # Both in their first training step: batch norms update their statistics.
    compiled = torch.compile(copy.deepcopy(network), fullgraph=True, backend="eager")
    expected, found = network(x), compiled(x)
    if not training:
        torch.testing.assert_close(found.decoded, expected.decoded, rtol=0, atol=0)
        expected, found = expected.raw, found.raw
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_images_are_augmented_on_the_device_by_head(heads, tmp_path):
    one = dict.fromkeys(("flipud", "fliplr", "mixup"), 0.1)
    params = {f"head_{head}": one | {"degrees": 10.0 * head, "shear": float(head)} for head in range(3)}
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    switches = {"device_augment": True, "class_aware_aug": True, "head_params": str(tmp_path / "params.yaml")}
    result = train(replace(heads, **switches, stop_after=2, notest=True))
    assert not result.finished and (result.folder / "weights/last.pt").is_file()


@pytest.mark.slow
def test_a_training_with_heads_is_profiled(heads, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hyp = str(shipped_folder("data") / "hyp.scratch.tiny.noota.yaml")
    flags = ["--data", heads.data, "--cfg", heads.cfg, "--weights", "", "--hyp", hyp]
    flags += ["--heads", "3", "--head-config", heads.head_config]
    flags += ["--img", "32", "--batch", "2", "--device", "cpu", "--workers", "0", "--noautoanchor"]
    assert main(["profile", "yolo", "--steps", "3", *flags]) == 0
    assert "Verdict:" in capsys.readouterr().out
    content = json.loads((tmp_path / "profile/profile.json").read_text())
    stages = {stage for lane in content["measurement"]["lanes"] for stage in lane["stage_ms"]}
    assert {"forward", "loss", "backward"} <= stages
