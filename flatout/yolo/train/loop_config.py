"""What the options of a training mean for the loop: how long, how often it tells and saves, and how rates move."""

import sys

from flatout.engine.loop import LoopConfig
from flatout.yolo.schedule import YoloSchedule
from flatout.yolo.train.setting import Setting

NEVER = float("inf")


def loop_config(setting: Setting, *, epochs: int, steps_per_epoch: int) -> LoopConfig:
    options = setting.options
    return LoopConfig(
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
        amp=setting.amp,
        log_every=min(options.log_every, steps_per_epoch),
        save_every_s=NEVER if options.nosave else 60 * options.save_every_minutes,
        save_every_steps=sys.maxsize if options.nosave else options.save_every_steps,
        save_apart_s=NEVER if options.nosave else LoopConfig.save_apart_s,
        stop_after=options.stop_after,
        graphs=options.as_graphs,
    )


def schedule(setting: Setting, *, epochs: int, steps_per_epoch: int) -> YoloSchedule:
    options = setting.options
    return YoloSchedule(
        setting.hyp,
        # Trained on beyond its end, YOLOv7's cosine keeps its length; a line of that length would fall below 0.
        epochs=epochs if options.linear_lr else options.epochs,
        steps_per_epoch=steps_per_epoch,
        total_batch=options.batch_size,
        linear=options.linear_lr,
        adam=options.adam,
    )
