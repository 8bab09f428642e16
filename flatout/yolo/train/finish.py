"""After the last epoch: curves, the final files, and COCO's own AP where the data set asks for it."""

import logging
from pathlib import Path

from torch import nn

from flatout.engine.generations import Generations
from flatout.engine.run_folder import Run
from flatout.errors import FlatoutError
from flatout.yolo.data.coco_json import annotation_file
from flatout.yolo.evaluate import coco_ap, test
from flatout.yolo.options import TestOptions
from flatout.yolo.train.setting import Setting
from flatout.yolo.train.weight_files import WeightFiles

logger = logging.getLogger(__name__)

COCO_IOU = 0.7


def finish(setting: Setting, run: Run, files: WeightFiles, average: nn.Module, best_fitness: float) -> None:
    """What a finished training leaves; by the first rank. Killed at any moment, the same command comes here again."""
    _draw_results(run.folder)
    generations = Generations(files.folder)
    generations.write_final(files.final(average, fitness=best_fitness))
    # From here on the run is finished: all its files are on the disk, if not yet under their names.
    run.finish()
    generations.settle()
    logger.info("Results are in %s, the weights in %s.", run.folder, files.folder)
    if coco_ap.is_asked_for(setting.data) and annotation_file(setting.data, "val") is not None:
        _judge_as_coco(setting, files.folder)


def _draw_results(folder: Path) -> None:
    try:
        from flatout.yolo.pictures.results import results_png

        results_png(folder / "results.txt", folder / "results.png")
    except (ImportError, OSError, ValueError) as error:
        logger.warning("No picture of the results was drawn: %s.", error)


def _judge_as_coco(setting: Setting, folder: Path) -> None:
    for name in ("last.pt", "best.pt"):
        if not (folder / name).exists():
            continue
        options = TestOptions(
            weights=(str(folder / name),),
            data=setting.written.data,
            batch_size=2 * setting.written.batch_size,
            img_size=setting.written.img_size[1],
            iou_thres=COCO_IOU,
            device=setting.written.device,
            save_json=True,
            project=str(folder.parent),
            name=f"coco_{Path(name).stem}",
            exist_ok=True,
        )
        try:
            logger.info("%s", test(options))
        except FlatoutError as error:
            logger.warning("%s was not judged: %s", name, error)
