"""flatout yolo stages: several trainings as one job, each from the best weights of the one before."""

import os
from typing import Any

from flatout.cli import FlagParser, flags_of, show_log
from flatout.yolo.commands.flags import options_from, train_parser
from flatout.yolo.options import TrainOptions

DESCRIPTION = """\
Train in stages, as one job: the first from --weights, each further one from the best weights of the stage before, with
its own epochs, frozen layers, hyp file and whatever else FILE says. Optimizer and epochs begin anew in every stage. The
same command typed again continues at the right stage and epoch; a finished stage is never trained again.
"""
EPILOG = """\
FILE is YAML; its keys are the flags above, without the dashes:
  common: {data: my.yaml, cfg: yolov7-tiny, img_size: 320}
  stages:
    - {epochs: 100, freeze: 50, hyp: data/hyp.scratch.tiny.noota.yaml}
    - {epochs: 200, freeze: 0, hyp: data/hyp.scratch.tiny.noota.stage4.yaml}

Flags of the command hold for all stages, whatever FILE says. --project, --name, --fresh and --break-lock are about the
whole job.

examples:
  %(prog)s data/stages.gradual_unfreeze.yaml --weights runs/train/tiny/weights/best.pt --data data/coco320.yaml
  %(prog)s my_stages.yaml --epochs 1 --name try          every stage for one epoch: does all of it work?

Exit code: as train.py: 0, 2 wrong options or FILE has changed, 3 data, 4 weights, 5 no room, 75 interrupted and saved.
"""


def main(argv: list[str]) -> int:
    """Train all stages; returns the exit code."""
    typed = _parser().parse_typed(argv)
    file = typed.pop("file")
    show_log()
    # Now, because help and mistyped flags are answered without torch.
    from flatout.runs import OnDone, Spending
    from flatout.yolo.stages import read_plan, run_stages

    plan = read_plan(file, typed, of_this_call=_from_environment())
    first = plan.stages[0]
    spending = Spending(first.price, first.budget)
    with OnDone(first.on_done, spending) as done:
        print(run_stages(plan, [done], spending=spending))
    return 0


def _from_environment() -> dict[str, Any]:
    """FLATOUT_STOP_AFTER and USE_COMPILE, as train.py understands them."""
    asked = options_from({}, os.environ)
    return {"stop_after": asked.stop_after, "use_compile": asked.use_compile}


def _parser() -> FlagParser:
    parser = train_parser("flatout yolo stages")
    parser.usage = "flatout yolo stages [-h] FILE [FLAG ...]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("file", metavar="FILE", help="stages, as YAML")
    # What the command does not say, help shows as the default.
    parser.set_defaults(**dict.fromkeys([flag.dest for flag in flags_of(TrainOptions)], "as FILE says"))
    return parser
