"""A run's folder: which one a command means, what is written into it, and whether its images are still the same."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flatout.config import read_config
from flatout.defect.options import TrainOptions, config_of_run, of_this_call, plain
from flatout.defect.train.input import TrainingImages
from flatout.engine.checkpoint.atomic import replacing
from flatout.engine.generations import Generation
from flatout.engine.run_folder import AboutRun, Run, choose_run, finished_run, run_of
from flatout.errors import DataError

logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"


def options_to_resume(asked: TrainOptions) -> TrainOptions:
    """Those of the run that `--resume` names; only what every call says anew comes from `asked`."""
    stored = read_config(run_of(Path(asked.resume)) / CONFIG_NAME, TrainOptions)
    return replace(stored, **of_this_call(asked))


def complete_run(options: TrainOptions) -> Path | None:
    """With `--once`, the run of this command, if it is complete."""
    return finished_run(Path(options.checkpoint_path), options.name, **_about_run(options)) if options.once else None


def _about_run(options: TrainOptions) -> AboutRun:
    return {
        "config": config_of_run(options),
        "exist_ok": options.exist_ok,
        "fresh": options.fresh,
        "resume": Path(options.resume) if options.resume else None,
        "break_lock": options.break_lock,
    }


def open_run(options: TrainOptions) -> Run:
    """The run folder, locked, with the options in it."""
    run = choose_run(Path(options.checkpoint_path), options.name, **_about_run(options))
    kept: dict[str, Any] = {key: value for key, value in plain(options).items() if value is not None}
    content = yaml.safe_dump(kept | {"resume": ""}, sort_keys=False, allow_unicode=True).encode()
    with replacing(run.folder / CONFIG_NAME, needed_bytes=len(content)) as sink:
        sink.write(content)
    return run


def fingerprint(images: TrainingImages) -> str:
    """Changes when an image comes, goes or changes its length."""
    digest = hashlib.sha256(f"{images.num_images} {images.strips.shape_hw}".encode())
    for index in range(len(images.strips)):
        path = Path(images.strips.path(index))
        size = path.stat().st_size if path.exists() else -1
        digest.update(f"{path.name}\0{size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def check_data(saved: Generation, images: TrainingImages, options: TrainOptions) -> None:
    """Refuse to continue with other images, unless that is wished for."""
    if saved.sections["run"]["data"] == fingerprint(images):  # type: ignore[index]
        return
    told = f"{options.training_dataset_path}: images have changed since this run was saved"
    if not options.allow_data_change:
        raise DataError(
            f"{told}. Start a new run with --fresh, or continue with the changed data with --allow_data_change."
        )
    logger.warning("%s; continuing with the changed ones, as asked.", told)
