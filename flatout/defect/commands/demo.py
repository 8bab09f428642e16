"""flatout defect demo: generate strips, train on them and show the results."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from flatout.cli import parser_of, show_log, value

if TYPE_CHECKING:
    from flatout.defect.options import TrainOptions

DESCRIPTION = """\
Generate strips, train a network on them with painted defects, and show what it finds in strips it has not seen. Takes
less than three minutes on two CPU cores, less than one on a GPU. Ctrl-C saves; the same command then continues.
"""
FLAGS = (
    value(
        "--out",
        "folder for the data, the run and the results (default: %(default)s)",
        type=Path,
        default=Path("runs/defect-demo"),
        metavar="FOLDER",
    ),
    value("--gpu_id", "number of a GPU, or -1 for the CPU (default: a GPU if there is one)", type=int, metavar="N"),
)


class DemoSize(NamedTuple):
    """The size of the demo training."""

    images: int
    patch: int
    base_width: int
    epochs: int


ON_CPU = DemoSize(images=6, patch=64, base_width=16, epochs=5)
ON_GPU = DemoSize(images=48, patch=128, base_width=64, epochs=12)


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code."""
    args = parser_of("flatout defect demo", DESCRIPTION, "", FLAGS, shortened=True).parse_args(argv)
    # Imported here so that help and argument errors do not load torch.
    from flatout.defect.commands.flags import VERDICT_FLAGS
    from flatout.defect.demo_data import DemoDataConfig, write_demo_data
    from flatout.defect.evaluate.sweep import sweep_table
    from flatout.defect.options import TestOptions, TrainOptions
    from flatout.defect.predict import predict
    from flatout.defect.train import train
    from flatout.profiler import EngineObservation
    from flatout.ranks import choose_device

    show_log()
    options = TrainOptions(gpu_id=args.gpu_id).with_current_names()
    size = ON_GPU if choose_device(options.device).type == "cuda" else ON_CPU
    began_s = time.monotonic()
    data = write_demo_data(args.out / "data", DemoDataConfig(images=size.images))
    observation = EngineObservation(
        images_per_step=options.bs,
        num_steps=None,
        title="flatout demo defect: an image is a patch",
        own_flags=VERDICT_FLAGS,
    )
    with observation.observing():
        result = train(_training(args.out, data, args.gpu_id, size))
    trained_s = time.monotonic() - began_s
    test = TestOptions(
        model_path=str(result.folder / "weights/best.pt"),
        test_path=str(args.out / "data"),
        output_dir=str(args.out / "test"),
        gpu_id=args.gpu_id,
    )
    scores = predict(test)
    print(f"\nAfter {trained_s:.0f} s of training, on strips it has not seen: {scores}\n")
    print(sweep_table(test))
    print(f"\nLook at\n  {result.folder / 'examples.png'}   samples that it was trained on")
    print(
        f"  {args.out / 'test'}/bright_spots/*_result.png   heat maps of test strips; labelled defects outlined in red"
    )
    print("To do the same with your own images, see docs/defect.md.")
    print(observation.report(result.folder))
    return 0


def _training(out: Path, data: Path, gpu_id: int | None, size: DemoSize) -> "TrainOptions":
    from flatout.defect.options import TrainOptions

    return TrainOptions(
        training_dataset_path=str(data),
        checkpoint_path=str(out),
        name="train",
        patch_size=size.patch,
        base_width=size.base_width,
        epochs=size.epochs,
        gpu_id=gpu_id,
        # On two cores, a worker process would compete with the network's own threads.
        num_workers="auto" if size is ON_GPU else 0,
        use_mask=False,
    )
