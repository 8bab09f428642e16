"""`--mirror` of a detection training: bring the run here if it was begun elsewhere, and keep copies of it."""

import logging
from pathlib import Path

from flatout.engine.mirror import Mirror
from flatout.yolo.compat.resume_options import config_of_run
from flatout.yolo.train.setting import Setting

logger = logging.getLogger(__name__)


def open_mirror(setting: Setting) -> Mirror | None:
    """The mirror that the options name; of several ranks the first has it. ConfigError if it cannot be used."""
    options = setting.written
    return Mirror(options.mirror, options.name) if options.mirror and setting.world.is_first else None


def fetch_run(mirror: Mirror | None, setting: Setting) -> Path | None:
    """Fetch the newest state if this machine has none as new; the folder, if it turns out that the training is over.

    All ranks ask at the same time. `--fresh` and `--resume` say where to begin, so nothing is fetched.
    """
    options, over = setting.written, None
    if mirror is not None and not options.fresh and setting.resume is None:
        config = config_of_run(options, setting.hyp)
        fetched = mirror.fetch(Path(options.project), options.name, config, exist_ok=options.exist_ok)
        over = str(fetched.folder) if fetched is not None and fetched.finished else None
    over = setting.world.from_first(over)
    if over is not None:
        logger.info("%s: this training is over; its files are here. --fresh trains anew.", over)
    return None if over is None else Path(over)
