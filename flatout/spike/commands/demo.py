"""flatout spike demo: simulate a moving scene, train on it, show before and after."""

import argparse
from pathlib import Path

from flatout.cli import show_log
from flatout.spike.commands.arguments import VERDICT_FLAGS, add_device, parser

DESCRIPTION = """\
Simulate a small data set, train a small deblurring network on it from scratch, and write pictures: blurry, restored,
true. Under three minutes on two CPU cores. Interrupted with Ctrl-C it saves; the same command then continues.
"""
EPILOG = """\
Exit code: 0, 2 a folder with other files, 75 interrupted and saved.
"""


def main(argv: list[str]) -> int:
    """Run the demo; returns the exit code."""
    args = _parser().parse_args(argv)
    show_log()
    # Now, because help and mistakes are answered without torch.
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
    for picture in sorted((result.folder / "visuals").glob("*.png")):
        print(f"  {picture}")
    print(observation.report(result.folder))
    return 0


def _parser() -> argparse.ArgumentParser:
    made = parser("demo", DESCRIPTION, EPILOG)
    made.add_argument("--out", type=Path, default=Path("runs/demo-spike"), help="default: %(default)s")
    add_device(made)
    return made
