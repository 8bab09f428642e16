"""`flatout yolo stages`: train in several stages, each from the best weights of the previous one."""

import os
from typing import Any

from flatout.cli import FlagParser, flags_of, show_log
from flatout.yolo.commands.flags import options_from, train_parser
from flatout.yolo.options import TrainOptions

DESCRIPTION = """\
Train in several stages. The first starts from --weights, every other one from the best weights of the previous stage.
FILE sets the epochs, frozen layers, hyp file and other options of each stage. Every stage starts with a new optimizer
and at epoch 0. If the command was interrupted, run it again: it continues at the right stage and epoch, and never
repeats a finished stage.
"""
EPILOG = """\
FILE is a YAML file whose keys are the flags above, without the dashes:
  common: {data: my.yaml, cfg: yolov7-tiny, img_size: 320}
  stages:
    - {epochs: 100, freeze: 50, hyp: data/hyp.scratch.tiny.noota.yaml}
    - {epochs: 200, freeze: 0, hyp: data/hyp.scratch.tiny.noota.stage4.yaml}

Flags on the command line apply to all stages and override FILE. --project, --name, --fresh and --break-lock apply to
the command as a whole.

examples:
  %(prog)s data/stages.gradual_unfreeze.yaml --weights runs/train/tiny/weights/best.pt --data data/coco320.yaml
  %(prog)s my_stages.yaml --epochs 1 --name try          one epoch per stage, to see whether everything works

Exit codes are those of train.py: 0 done, 2 wrong options or FILE has changed, 3 unusable data, 4 unusable weights,
5 not enough disk, memory or GPUs, 75 interrupted and saved.
"""


def main(argv: list[str]) -> int:
    """Train all stages; returns the exit code."""
    typed = _parser().parse_typed(argv)
    file = typed.pop("file")
    show_log()
    # Imported late, so that help and usage errors do not wait for torch.
    from flatout.runs import OnDone, Spending
    from flatout.yolo.stages import read_plan, run_stages

    plan = read_plan(file, typed, of_this_call=_from_environment())
    first = plan.stages[0]
    spending = Spending(first.price, first.budget)
    with OnDone(first.on_done, spending) as done:
        print(run_stages(plan, [done], spending=spending))
    return 0


def _from_environment() -> dict[str, Any]:
    """The options that FLATOUT_STOP_AFTER and USE_COMPILE set, as in train.py."""
    options = options_from({}, os.environ)
    return {"stop_after": options.stop_after, "use_compile": options.use_compile}


def _parser() -> FlagParser:
    parser = train_parser("flatout yolo stages")
    parser.usage = "flatout yolo stages [-h] FILE [FLAG ...]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("file", metavar="FILE", help="YAML file with the stages")
    # Shown in the help as the default of every flag.
    parser.set_defaults(**dict.fromkeys([flag.dest for flag in flags_of(TrainOptions)], "as FILE says"))
    return parser
