"""flatout defect train: train a network on defect-free images."""

import os

from flatout.defect.commands.flags import options_from, parser_for, whole_number
from flatout.defect.options import TrainOptions

DESCRIPTION = """\
Train a segmentation network on defect-free images of target, ref1 and ref2. Defects are painted while it runs; images
stay decoded, in GPU memory where there is one. Interrupted, it saves; the same command then continues.
"""
EPILOG = """\
examples:
  flatout defect demo-data demo && flatout defect train --training_dataset_path demo --base_width 16 --epochs 3
  flatout defect train --config strips.yaml --epochs 100 --lr 1e-4
  flatout defect train --training_dataset_path R/train/good/ --amplitudes 8:12 60:90 --partial_leak_prob 0.4
  torchrun --nproc_per_node 2 -m flatout defect train ...

All names may stand in the YAML file too. docs/defect.md explains them.
Exit code: 0, 75 interrupted and saved; see docs/exit-codes.md for the others.
"""


def main(argv: list[str]) -> int:
    """Train; returns the exit code."""
    parser = parser_for("flatout defect train", DESCRIPTION, EPILOG, TrainOptions, hidden=("stop_after",))
    extra = {"stop_after": whole_number(os.environ, "FLATOUT_STOP_AFTER")}
    options = options_from(parser.parse_args(argv), TrainOptions, extra)
    from flatout.engine.log_lines import show_log

    show_log(only_warnings=os.environ.get("RANK", "0") != "0")
    # Now, because help and mistakes are answered without torch.
    from flatout.defect.train import train
    from flatout.engine.interrupts import StopSignals
    from flatout.engine.on_done import OnDone
    from flatout.engine.spending import Spending
    from flatout.engine.warnings_kept import KeepWarnings

    spending = Spending(options.price, options.budget)
    with StopSignals(), OnDone(options.on_done, spending) as done:
        train(options, [done, KeepWarnings()], spending=spending)
    return 0
