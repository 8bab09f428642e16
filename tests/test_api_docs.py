"""The examples in docs/api.md and the notebooks run, block by block."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
import torch
import yaml

from flatout.spike.demo_data import DemoConfig, write_demo_data
from tests.defect.small_runs import small_data
from tests.test_docs import DOCS
from tests.yolo.predict.small_sources import NAMES, make_image, weights_file, write_video
from tests.yolo.small_sets import files_of, label_files_of
from tests.yolo.test_load import narrow_config

EXAMPLES = DOCS.parent / "examples"
PAGE = (DOCS / "api.md").read_text()
TINY_SPIKE = {
    "DATA": {"CROP_SIZE": 16, "NUM_VOXEL_BINS": 4, "CLIP_LEN": 2, "USE_RAM_CACHE": False},
    "DATALOADER": {"TRAIN_WORKERS": 0, "VAL_WORKERS": 0},
    "MODEL": {"WIDTH": 4},
    "LOG": {"TENSORBOARD": False},
    "TEST": {"NUM_WORKERS": 0, "TILE_SIZE": 0},
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def blocks(heading: str) -> list[str]:
    """Python blocks below a heading of the page."""
    section = PAGE[PAGE.index(f"## {heading}\n") :].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def run(codes: list[str], names: dict[str, object]) -> dict[str, object]:
    for code in codes:
        exec(compile(code, "example", "exec"), names)
    return names


def test_every_block_is_run_below():
    headings = (
        "Detect",
        "Results",
        "Other tools",
        "Tracking",
        "Train, evaluate, export",
        "Smaller copies of a data set",
        "What the network saw",
        "Wrong labels",
        "Defects and spikes",
    )
    assert sum(len(blocks(heading)) for heading in headings) == PAGE.count("```python")


@pytest.fixture
def photos(tmp_path: Path) -> None:
    """Weights, two photographs and a video."""
    weights_file(tmp_path / "best.pt")
    (tmp_path / "photos").mkdir()
    for number, name in enumerate("ab"):
        cv2.imwrite(f"photos/{name}.jpg", make_image(number + 1, (96, 96)))
    write_video(tmp_path / "clip.mp4", 3)


@pytest.mark.usefixtures("photos")
def test_detecting(capsys):
    names = run([*blocks("Detect"), *blocks("Results")], {})
    assert "photos/a.jpg" in capsys.readouterr().out and Path("found.jpg").is_file()
    assert len(names["records"]) == len(names["whole_pixels"]) == len(names["crops"])


@pytest.mark.usefixtures("photos")
def test_other_tools():
    for package in ("pandas", "supervision"):
        pytest.importorskip(package, reason="needs the extras `pandas` and `track`")
    names = run([blocks("Detect")[0], *blocks("Other tools")], {})
    assert len(names["table"]) == len(names["detections"]) == len(names["result"])


@pytest.mark.usefixtures("photos")
def test_tracking():
    pytest.importorskip("trackers", reason="needs the extra `track`")
    names = run([*blocks("Detect")[:2], *blocks("Tracking")], {})
    assert (names["result"].ids > 0).any()


@pytest.mark.usefixtures("photos")
def test_training_evaluating_and_exporting(tmp_path, capsys):
    label_files_of(files_of(tmp_path / "images/val", 4), tmp_path / "labels/val")
    text = yaml.safe_dump({"train": "images/val", "val": "images/val", "names": NAMES})
    (tmp_path / "bolts.yaml").write_text(text)
    narrow_config(tmp_path, "yolov7-tiny").rename(tmp_path / "yolov7-tiny.yaml")  # a local file takes precedence
    headings = ("Train, evaluate, export", "What the network saw", "Wrong labels")
    run(["import flatout.yolo", *(block for heading in headings for block in blocks(heading))], {})
    printed = capsys.readouterr().out
    assert "runs/train/bolts" in printed and "runs/train/bolts/audit" in printed
    assert list((tmp_path / "runs/train/bolts/weights").glob("best*torchscript*"))


def test_smaller_copies(tmp_path, capsys):
    label_files_of(files_of(tmp_path / "images/val", 4), tmp_path / "labels/val")
    text = yaml.safe_dump({"train": "images/val", "val": "images/val", "names": NAMES})
    (tmp_path / "bolts.yaml").write_text(text)
    run(["import flatout.yolo", *blocks("Smaller copies of a data set")], {})
    assert "bolts64/bolts64.yaml" in capsys.readouterr().out


def test_defects(tmp_path, capsys):
    small_data(tmp_path / "strips")
    run(blocks("Defects and spikes")[:1], {})
    assert "pixel_AP" in capsys.readouterr().out


def test_spikes(tmp_path, capsys):
    demo = write_demo_data(
        tmp_path / "demo", DemoConfig(train=2, test=1, frames=6, width=64, height=32, spike_frames=80)
    )
    config = yaml.safe_load(demo.read_text())
    for section, keys in TINY_SPIKE.items():
        config[section] = {**(config.get(section) or {}), **keys}
    (tmp_path / "spike.yaml").write_text(yaml.safe_dump(config))
    (sequence,) = (tmp_path / "demo/test").iterdir()
    (tmp_path / "clip").symlink_to(sequence)
    run(blocks("Defects and spikes")[1:], {})
    assert "PSNR" in capsys.readouterr().out and len(list((tmp_path / "sharp").glob("*.png"))) == 6


def cells(name: str) -> list[str]:
    """Code of a notebook, which holds no outputs."""
    content = json.loads((EXAMPLES / name).read_text())
    assert content["nbformat"] == 4
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    return ["".join(cell["source"]) for cell in code]


def test_all_notebooks_are_run_here():
    assert {path.name for path in EXAMPLES.glob("*.ipynb")} == {"train_and_predict.ipynb", "why_is_it_slow.ipynb"}


def test_the_notebook_that_trains_and_predicts(tmp_path, capsys):
    narrow_config(tmp_path, "yolov7-tiny").rename(tmp_path / "yolov7-tiny.yaml")
    codes = cells("train_and_predict.ipynb")
    numbers = "images, epochs, size = 480, 6, 160"
    assert sum(numbers in code for code in codes) == 1  # replaced by smaller numbers
    names = run([code.replace(numbers, "images, epochs, size = 8, 1, 64") for code in codes], {})
    assert Path("found.jpg").is_file() and len(names["results"]) == 2
    assert "mAP@.5" in capsys.readouterr().out


def test_the_notebook_about_a_slow_loop(capsys):
    names = run(cells("why_is_it_slow.ipynb"), {})
    assert names["after"] > names["before"]
    assert Path("profile/profile.html").is_file() and "img/s before" in capsys.readouterr().out
