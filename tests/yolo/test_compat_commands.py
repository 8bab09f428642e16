"""Run the commands that users of YOLOv7 type: in real processes, on a small substitute for COCO, for a few steps."""

import shutil
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import cv2
import pytest
import torch

from flatout.yolo.commands import flags
from flatout.yolo.predict.files import is_video_name
from tests.golden_cases import golden_cases
from tests.yolo.predict.small_sources import make_image, write_video
from tests.yolo.script_runs import Ended, Scripts
from tests.yolo.stand_in import write_fake_coco
from tests.yolo.typed_commands import BUILT, Typed, commands

FEW_EPOCHS = 3
"""One short training of a small network of each kind runs to its end; all others are stopped after a step."""
SMALL_NETWORK = "tiny"
HAS_GPU = torch.cuda.is_available()


@pytest.fixture(scope="module")
def scripts(tmp_path_factory) -> Iterator[Scripts]:
    folder = tmp_path_factory.mktemp("checkout")
    write_fake_coco(folder / "coco320", size=320, num_images={"train2017": 4, "val2017": 2})
    write_fake_coco(folder / "coco640", size=640, num_images={"train2017": 1, "val2017": 1})
    write_fake_coco(folder / "coco", size=640, num_images={"train2017": 1, "val2017": 1}, lists=True)
    with Scripts(folder) as scripts:
        yield scripts


COMMANDS = golden_cases("yolov7-data/commands.json", commands)


@pytest.mark.slow
@pytest.mark.parametrize("typed", COMMANDS)
def test_a_command_of_yolov7_runs(typed: Typed, scripts: Scripts):
    if not typed.script:
        pytest.skip(
            f"{typed.id}: executes the text of train.py; test_commands.py shows that the parser gives the same result"
        )
    if "--help" in typed.words:
        ended = scripts.run_text(typed.text)
        assert ended.code == 0 and f"--{typed.searched_for()} " in ended.output
    elif BUILT[typed.script] == "train":
        run_training(typed, scripts)
    elif BUILT[typed.script] == "detect":
        run_detect(typed, scripts)
    elif BUILT[typed.script] == "export":
        run_export(typed, scripts)
    else:
        run_test(typed, scripts)


def run_training(typed: Typed, scripts: Scripts) -> None:
    options = flags.train_parser().parse_args(typed.words)
    wants_gpu = options.device not in ("", "cpu")
    small = SMALL_NETWORK in options.cfg
    if not HAS_GPU and not wants_gpu:
        skip_what_takes_long_on_a_cpu(typed, small=small)
    if options.weights.startswith("runs/") and (HAS_GPU or not wants_gpu):
        provide(scripts, Path(options.weights))
    kind = ("whole", options.fast_dataloader, options.nosave)
    whole = small and options.epochs <= FEW_EPOCHS and not typed.env and is_first(*kind)
    ended = scripts.run(typed.script, typed.words, dict(typed.env) | ({} if whole else {"FLATOUT_STOP_AFTER": "1"}))
    if wants_gpu and not HAS_GPU:
        return check_refusal(ended)
    assert ended.code == 0, ended.output
    return check_training(typed, scripts.folder / options.project, options, ended, whole=whole)


def skip_what_takes_long_on_a_cpu(typed: Typed, *, small: bool) -> None:
    if "USE_COMPILE" in typed.env:
        pytest.skip(f"{typed.id}: compiling takes minutes on a CPU")
    if not small and not is_first("large network"):
        pytest.skip(f"{typed.id}: a step of this network takes long on a CPU, and a command like it has run")


def check_training(typed: Typed, project: Path, options: Namespace, ended: Ended, *, whole: bool) -> None:
    if "DIAGNOSE_COMPILE" in typed.env:
        assert "DYNAMO EXPLANATION REPORT" in ended.output
        return
    assert ("Model compiled successfully" in ended.output) == ("USE_COMPILE" in typed.env)
    run = newest_run(project, options.name)
    assert (run / "weights/last.pt").is_file()
    assert (run / "opt.yaml").is_file() and (run / "hyp.yaml").is_file()
    if whole:
        assert len((run / "results.txt").read_text().splitlines()) == options.epochs
    else:
        assert "Stopped after 1 step" in ended.output


def run_test(typed: Typed, scripts: Scripts) -> None:
    options = flags.test_parser().parse_args(typed.words)
    for weights in options.weights:
        provide(scripts, Path(weights))
    ended = scripts.run(typed.script, typed.words, typed.env)
    if options.device not in ("", "cpu") and not HAS_GPU:
        return check_refusal(ended)
    assert ended.code == 0, ended.output
    header = next(line for line in ended.output.splitlines() if "mAP@.5:.95" in line)
    assert header.split()[3:7] == ["P", "R", "mAP@.5", "mAP@.5:.95"]
    assert any(line.split()[:1] == ["all"] for line in ended.output.splitlines())
    return None


def run_detect(typed: Typed, scripts: Scripts) -> None:
    options = flags.detect_parser().parse_args(typed.words)
    for weights in options.weights:
        provide(scripts, Path(weights))
    source = scripts.folder / options.source
    (write_video(source, 2) if is_video_name(options.source) else cv2.imwrite(str(source), make_image(0, (640, 480))))
    ended = scripts.run(typed.script, typed.words, typed.env)
    assert ended.code == 0, ended.output
    assert (newest_run(scripts.folder / options.project, options.name) / source.name).is_file()
    assert f" {options.source}: " in ended.output and "Results saved to runs/detect/exp" in ended.output


def run_export(typed: Typed, scripts: Scripts) -> None:
    options = flags.export_parser().parse_args(typed.words)
    provide(scripts, Path(options.weights))
    ended = scripts.run(typed.script, typed.words, typed.env)
    assert ended.code == 0, ended.output
    stem = (scripts.folder / options.weights).with_suffix("")
    assert stem.with_suffix(".onnx").is_file() and stem.with_suffix(".torchscript.pt").is_file()
    assert ended.output.count("largest difference") == 2


def provide(scripts: Scripts, weights: Path) -> None:
    """Provide the weights that a command expects: those of any finished training, or of a new one of one epoch."""
    wanted = scripts.folder / weights
    if wanted.is_file():
        return
    trained = sorted((scripts.folder / "runs").glob("train/*/weights/best.pt"))
    if not trained:
        words = "--epochs 1 --batch 4 --workers 0 --data data/coco320.yaml --img 320 --cfg yolov7-tiny --name provided"
        ended = scripts.run("train.py", words.split())
        assert ended.code == 0, ended.output
        trained = [scripts.folder / "runs/train/provided/weights/best.pt"]
    wanted.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(trained[0], wanted)


def check_refusal(ended: Ended) -> None:
    """On a machine without a GPU, a command for a GPU fails at once with a reason."""
    assert ended.code == 5, ended.output
    assert "GPU" in ended.output.splitlines()[-1]


def newest_run(project: Path, name: str) -> Path:
    return max((path for path in project.glob(f"{name}*") if path.is_dir()), key=lambda path: path.stat().st_mtime)


_seen_kinds: set[tuple[object, ...]] = set()


def is_first(*kind: object) -> bool:
    """Whether this is the first command of its kind in this session."""
    first = kind not in _seen_kinds
    _seen_kinds.add(kind)
    return first
