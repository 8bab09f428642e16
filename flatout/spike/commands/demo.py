"""flatout spike demo: simulate data, train, and show frames before and after."""

from pathlib import Path

from flatout.cli import parser_of, show_log, value
from flatout.spike.commands.arguments import DEVICE, VERDICT_FLAGS

DESCRIPTION = """\
Simulate a small data set, train a small deblurring network on it from scratch, and write images that show blurry,
restored and true frames side by side. Takes less than three minutes on two CPU cores. Ctrl-C saves; the same command
then continues.
"""
EPILOG = """\
Exit code: 0, 2 a folder with other files, 75 interrupted and saved.
"""
FLAGS = (
    value(
        "--out",
        "folder for the data and the run (default: %(default)s)",
        type=Path,
        default=Path("runs/demo-spike"),
        metavar="FOLDER",
    ),
    DEVICE,
)


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code."""
    args = parser_of("flatout spike demo", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.profiler import EngineObservation
    from flatout.spike.config import load_config
    from flatout.spike.demo_data import DemoConfig, write_demo_data
    from flatout.spike.train import TrainOptions, train

    data = args.out / "data"
    path = write_demo_data(data, DemoConfig())
    config = load_config(path, [f"LOG.SAVE_DIR={args.out / 'train'}", f"DATA.ROOT={data}"])
    observation = EngineObservation(
        images_per_step=config.TRAIN.BATCH_SIZE,
        num_steps=None,
        title="flatout demo spike: an image is a clip",
        own_flags=VERDICT_FLAGS,
    )
    with observation.observing():
        result = train(config, TrainOptions(device=args.device))
    print(f"\n{result.evaluation}" if result.evaluation is not None else "")
    print("Look at (blurry | restored | true):")
    for path in sorted((result.folder / "visuals").glob("*.png")):
        print(f"  {path}")
    print(observation.report(result.folder))
    return 0
