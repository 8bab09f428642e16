"""`flatout demo`: detect with the weights that come with flatout, then train from scratch.

    detect objects in six photographs (seconds)
    generate a data set -> train yolov7-tiny -> validate on unseen images -> report scores, speed and where time went

Takes minutes on two CPU cores. It is an ordinary training: if it is interrupted, the same command continues it; if it
is run again, it trains again in another run folder. The other jobs have their own demos.
"""

import json
import os
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from flatout.cli import Command, dispatch, parser_of, show_log, value

if TYPE_CHECKING:
    from flatout.yolo.options import TrainOptions
    from flatout.yolo.train import TrainResult

OTHERS = {
    "defect": Command("die-to-die defects on strips", "flatout.defect.commands.demo"),
    "spike": Command("video deblurring with a spike camera", "flatout.spike.commands.demo"),
}
"""Demos of the other jobs, such as `flatout demo defect`."""
HYP = "data/hyp.demo.yaml"
CFG = "cfg/training/yolov7-tiny.yaml"
WEIGHTS = "yolov7-tiny"
PHOTOGRAPHS_PX = 320
"""The size at which these weights are most accurate on images that keep their aspect ratio: weights/yolov7-tiny.md."""
DESCRIPTION = """\
First detect everyday objects in six photographs with the trained weights that come with flatout; this takes seconds.
Then generate a small data set, train yolov7-tiny on it from scratch, and report how accurate it became, how fast the
training was and where the time went. Under five minutes on two CPU cores. After Ctrl-C, the same command continues.
"""
EPILOG = "Other jobs: flatout demo defect, flatout demo spike."
PLOTS = {
    "test_batch0_pred.jpg": "its detections in images it has not seen",
    "test_batch0_labels.jpg": "the true labels of these images",
    "train_batch0.jpg": "training images after augmentation",
    "results.png": "losses and scores of each epoch",
    "confusion_matrix.png": "which classes it mistakes for which",
}
REST = "everything else: start, scan, plots"


FLAGS = (
    value("--out", "folder to write to (default: %(default)s)", type=Path, default=Path("runs/demo")),
    value("--device", "cpu, or the number of a GPU (default: a GPU if there is one)", default=""),
    value("--seed", "seed for weights, image order and augmentation (default: %(default)s)", type=int, default=1),
)


class Pace(NamedTuple):
    """Size of the demo training, chosen to take a few minutes."""

    size_px: int
    batch: int
    epochs: int


ON_CPU = Pace(size_px=160, batch=8, epochs=6)
ON_GPU = Pace(size_px=320, batch=64, epochs=30)


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code."""
    if argv and argv[0] in OTHERS:
        return dispatch(argv, OTHERS, prog="flatout demo")
    parser = parser_of("flatout demo", DESCRIPTION, EPILOG, FLAGS, shortened=True)
    args = parser.parse_args(argv[1:] if argv[:1] == ["yolo"] else argv)
    # Set before torch is imported, which reads it: waiting threads sleep instead of spinning. With other programs on
    # the same two cores, a step takes 0.9 s this way and 4.6 s by default.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.clock import clock
    from flatout.profiler import EngineObservation
    from flatout.ranks import choose_device
    from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
    from flatout.yolo.train import train

    show_log()
    on_gpu = choose_device(args.device).type == "cuda"
    print(detect_in_photographs(args.out / "photographs", args.device), flush=True)
    data = write_demo_data(args.out / "data", DemoDataConfig(), show_progress=True)
    print(f"Data set: {data.parent}. Training yolov7-tiny from scratch on {'a GPU' if on_gpu else 'the CPU'}.")
    began_s = time.monotonic()
    pace = ON_GPU if on_gpu else ON_CPU
    observation = EngineObservation(images_per_step=pace.batch, num_steps=None, title="flatout demo")
    with observation.observing():
        result = train(training_options(args.out, data, args.device, on_gpu=on_gpu, seed=args.seed))
    assert result is not None
    seconds = {name: spent_ns / 1e9 for name, spent_ns in clock.read_self_ns(observation.recorder.table).items()}
    seconds[REST] = time.monotonic() - began_s - sum(seconds.values())
    print(report(result, seconds))
    print(observation.report(result.folder))
    return 0


def detect_in_photographs(folder: Path, device: str) -> str:
    """Detect objects in the photographs that come with flatout; writes images with boxes to `folder`, returns text."""
    import cv2

    import flatout.yolo
    from flatout.yolo.find_file import shipped_folder

    began_s = time.monotonic()
    detector = flatout.yolo.load(WEIGHTS, device=device)
    results = detector.predict(shipped_folder("data") / "photographs", img_size=PHOTOGRAPHS_PX)
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        cv2.imwrite(str(folder / Path(result.path).name), result.plot())
    return "\n".join(
        [
            f"Detections of {WEIGHTS}, the network that comes with flatout, in photographs it was not trained on:",
            *(f"  {Path(result.path).name:16}{result.summary()}" for result in results),
            f"{time.monotonic() - began_s:.1f} s. Photographs with their boxes: {folder}",
            "",
        ]
    )


def training_options(out: Path, data: Path, device: str, *, on_gpu: bool, seed: int) -> "TrainOptions":
    """The options of the training, as for `flatout yolo train`."""
    from flatout.yolo.options import TrainOptions

    pace = ON_GPU if on_gpu else ON_CPU
    return TrainOptions(
        weights="",
        cfg=CFG,
        data=str(data),
        hyp=HYP,
        epochs=pace.epochs,
        batch_size=pace.batch,
        img_size=(pace.size_px, pace.size_px),
        device=device,
        # On two cores a worker process would only compete with the threads of the network.
        workers=8 if on_gpu else 0,
        project=str(out),
        name="train",
        adam=True,
        fast_dataloader=True,
        channels_last=True,
        fast=on_gpu,
        nosave=True,
        seed=seed,
        log_every=10,
    )


def report(result: "TrainResult", seconds: Mapping[str, float]) -> str:
    """The closing text: scores, speed, time per stage, and files to look at."""
    assert result.outcome is not None
    scores, rows = result.outcome.evaluation, _epochs_in(result.folder / "log.jsonl")
    trained_s = sum(row["seconds"] for row in rows)
    speed = median(row["images_per_s"] for row in rows)
    return "\n".join(
        [
            "",
            f"mAP@.5 {scores.map50:.3f}, mAP@.5:.95 {scores.map50_95:.3f} on {scores.num_images} unseen images, "
            f"after {trained_s:.0f} s of training at {speed:.0f} img/s",
            "",
            *times(seconds),
            "",
            "Files to look at",
            *(f"  {result.folder / name}   {what}" for name, what in PLOTS.items() if (result.folder / name).exists()),
            "",
            "To do the same with your own images, see docs/start.md.",
        ]
    )


def times(seconds: Mapping[str, float]) -> Sequence[str]:
    """A table of the stages that took at least 0.1 % of the time, largest first."""
    from flatout.clock import label_of

    total_s = sum(seconds.values())
    by_label: dict[str, float] = defaultdict(float)
    for name, spent_s in seconds.items():
        by_label[label_of(name)] += spent_s
    known = {label: spent_s for label, spent_s in by_label.items() if spent_s >= 0.001 * total_s}
    width = max(map(len, known), default=0)
    return [
        f"{'Where the time went':<{width + 2}} {'s':>8} {'share':>6}",
        *(
            f"  {name:<{width}} {spent_s:8.1f} {spent_s / total_s:6.1%}"
            for name, spent_s in sorted(known.items(), key=lambda item: -item[1])
        ),
    ]


def _epochs_in(log: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in log.read_text().splitlines()]
