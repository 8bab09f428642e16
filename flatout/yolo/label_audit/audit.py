"""The audit: weights and a data set in; a ranked list of labels that are probably wrong out, as files.

    images, weights -> passes -> fused detections \\
    labels ------------------------------------------> evidence -> ranking -> audit.json, audit.csv, audit.html
    label_statistics.npz of a run (--audit) --------/
"""

import filecmp
import logging
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.errors import ConfigError, MissingFileError, counted
from flatout.ranks import choose_device, make_current
from flatout.runs import STEPS_NAME, new_run_folder
from flatout.safefiles import write_file
from flatout.yolo.data.check.facts import SplitFacts
from flatout.yolo.data.data_yaml import Split, require_valid
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.data.label_cache import default_folder
from flatout.yolo.data.open_data import open_data_set
from flatout.yolo.data.open_set import SplitConfig, open_split
from flatout.yolo.data.recorded_files import changes_since, read_files
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.evaluate.tiles import TileConfig
from flatout.yolo.find_file import find_data, find_data_of_run, weights_files
from flatout.yolo.label_audit.config import DEFAULT_OVERLAP, AuditConfig
from flatout.yolo.label_audit.page import page
from flatout.yolo.label_audit.passes import PassConfig, passes_of
from flatout.yolo.label_audit.rank import KINDS, Evidence, gather_evidence, rank
from flatout.yolo.label_audit.records import Record, as_csv, as_json, records_of
from flatout.yolo.label_audit.set_boxes import SetBoxes, fuse, labels_as_boxes
from flatout.yolo.label_audit.statistics import FILE_NAME, LabelStatistics, fingerprint, read_statistics, with_history
from flatout.yolo.run_config import read_options
from flatout.yolo.weights import read_weights

logger = logging.getLogger(__name__)

WEIGHTS = ("best.pt", "last.pt")
"""Weights of a run that take part in its audit."""
NOTICED = 0.05
"""Confidence of a detection that at least notices an object: a network reaches it near most labels after few epochs."""
FEW = 0.5
"""If less than this share of the labels is noticed, the networks know too little to be asked about labels."""


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """The findings of an audit, most probable first."""

    records: tuple[Record, ...]
    num_images: int
    num_labels: int
    folder: Path

    def __str__(self) -> str:
        """What the command prints: counts by kind, the first findings, where the files are."""
        counts = Counter(record.kind for record in self.records)
        listed = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
        lines = [
            f"{counted(self.num_labels, 'label')} in {counted(self.num_images, 'image')}: "
            f"{counted(len(self.records), 'finding')}{f' ({listed})' if listed else ''}"
        ]
        lines += [f"  {each.score:.2f}  {each.kind:<12} {each.place}: {each.reason}" for each in self.records[:10]]
        if len(self.records) > 10:
            lines.append(f"  ... and {len(self.records) - 10:,} more, less and less probable")
        files = ", ".join(str(self.folder / name) for name in ("audit.html", "audit.csv", "audit.json"))
        return "\n".join([*lines, f"Files: {files}"])


def audit(config: AuditConfig, *, show_progress: bool = True) -> AuditResult:
    """Audit the labels of a split; writes audit.json, audit.csv and audit.html. Never changes the data set.

    MissingFileError, ConfigError or DataError if run, weights or data cannot be used.
    """
    replay = _replay_command(config)
    config, statistics = _resolved(config)
    weights = weights_files(config.weights)
    if config.mirrored is None:
        config = replace(config, mirrored=all(map(_was_mirrored, weights)))
    tiles = _tile_config(config)
    device = choose_device(config.device)
    make_current(device)
    opened = _open(config)
    images = opened.images
    pairs = [opened.pairs[row] for row in opened.used_rows]
    labels = labels_as_boxes(images.labels)
    if config.split != "train":
        statistics = None
    elif config.run is not None:
        statistics = _usable(statistics, config.run, config.data, images, labels)
    pass_config = PassConfig(
        size=config.img_size or config.tiles or 640,
        batch_size=config.batch_size,
        device=device,
        workers=config.workers,
        mirrored=bool(config.mirrored),
        tiles=tiles,
    )
    with _new_folder(config) as folder:
        found = fuse(passes_of(weights, images, pass_config, shown=show_progress))
        evidence = gather_evidence(labels, found)
        doubt = doubt_about(evidence)
        if doubt:
            logger.warning("%s", doubt)
        if statistics is not None:
            evidence = with_history(evidence, statistics)
        records = records_of(rank(labels, found, evidence), labels, found, evidence, pairs, images.names, statistics)
        result = AuditResult(
            records=tuple(records), num_images=len(images), num_labels=len(labels.class_D), folder=folder
        )
        _write_files(result, config, weights, statistics, doubt=doubt, replay=replay, show_progress=show_progress)
    return result


def doubt_about(evidence: Evidence) -> str:
    """Why the findings, or that there are none, say little about the labels; empty if they do."""
    num_labels = len(evidence.near_T)
    num_noticed = int((evidence.near_T >= NOTICED).sum())
    if num_noticed >= FEW * num_labels:
        return ""
    return (
        f"The network found something near only {num_noticed:,} of {counted(num_labels, 'label')}, so the findings say "
        "little about the others. Train longer, or give better weights with --weights."
    )


def _resolved(config: AuditConfig) -> tuple[AuditConfig, LabelStatistics | None]:
    """The config with what a run says about itself filled in, and what its training gathered about its labels."""
    if config.run is None:
        return config, None
    folder = config.run
    if not (folder / "opt.yaml").is_file():
        raise MissingFileError(
            f"{folder}: not the folder of a training run, which has a file opt.yaml. Give a run folder such as "
            "runs/train/exp."
        )
    options, _ = read_options(folder)
    weights = tuple(_named(weights, folder) for weights in config.weights) or _weights_of(folder)
    values = vars(config) | {
        "weights": weights,
        "data": str(find_data_of_run(config.data, options.data, folder)),
        "img_size": config.img_size or options.img_size[1],
    }
    if config.tiles is None:
        values["tiles"] = options.tiles
        if config.tile_overlap is None and options.tiles is not None:
            values["tile_overlap"] = options.tile_overlap
    if options.single_cls:
        raise ConfigError(
            f"{folder}: was trained with --single-cls, where classes cannot be audited. Give a run without it."
        )
    return AuditConfig(**values), read_statistics(folder / FILE_NAME)


def _usable(
    statistics: LabelStatistics | None, run: Path, data: str, images: ImageSet, labels: SetBoxes
) -> LabelStatistics | None:
    """What the training gathered about its labels, if they are still the same; names files that have changed since."""
    is_same = statistics is None or statistics.fingerprint == fingerprint(labels)
    recorded = read_files(run)
    changes = changes_since(recorded, images) if recorded is not None else None
    if changes is not None and changes.files:
        what = f"{data}: {counted(len(changes.files), 'file')} changed since {run} ({changes.listed})."
    elif not is_same:  # a run of an older version, which did not list its files
        what = f"{run}: the labels have changed since the training."
    else:
        return statistics
    unused = "" if is_same else " What the training saw of them is left out: only its weights are used."
    logger.warning("%s The labels are audited as they are now.%s", what, unused)
    return statistics if is_same else None


def _tile_config(config: AuditConfig) -> TileConfig | None:
    if config.tiles is None:
        if config.tile_overlap is not None:
            raise ConfigError("--tile-overlap is about tiles, and this audit has none: use it with --tiles.")
        return None
    return TileConfig(
        tile=config.tiles, overlap=DEFAULT_OVERLAP if config.tile_overlap is None else config.tile_overlap
    )


def _weights_of(folder: Path) -> tuple[str, ...]:
    """best.pt and last.pt, as far as they exist; one of them if they are the same."""
    files = [folder / "weights" / name for name in WEIGHTS if (folder / "weights" / name).is_file()]
    if not files:
        raise MissingFileError(f"{folder / 'weights'}: has neither best.pt nor last.pt. Give weights with --weights.")
    if len(files) == 2 and filecmp.cmp(files[0], files[1], shallow=False):  # the last epoch was the best
        files.pop()
    return tuple(map(str, files))


def _was_mirrored(weights: str) -> bool:
    """Whether the training of a weights file mirrored images, as far as the file says.

    A network that never saw mirrored images may find another class in them, such as arrows that point the other way.
    """
    share = (read_weights(weights).hyp or {}).get("fliplr")
    return isinstance(share, int | float) and share > 0


def _named(weights: str, folder: Path) -> str:
    """The path of weights: as given, or by their name in the run folder."""
    of_run = folder / "weights" / weights
    return str(of_run) if not Path(weights).exists() and of_run.is_file() else weights


def _open(config: AuditConfig) -> SplitFacts:
    data = open_data_set(find_data(config.data))
    split: Split = config.split
    require_valid(data, [split])
    return open_split(
        data, split, SplitConfig(scan=ScanConfig(large=config.tiles is not None), cache_folder=default_folder())
    )


@contextmanager
def _new_folder(config: AuditConfig) -> Iterator[Path]:
    """The folder for the files, created before the work begins; it does not stay behind if nothing is written."""
    project, name = (config.run, "audit") if config.run is not None else (Path("runs/audit"), "exp")
    is_own = config.out is None or not config.out.exists()
    if config.out is None:
        folder = new_run_folder(project, name, exist_ok=False, flag="--out")
    else:
        folder = _given_folder(config.out)
    try:
        yield folder
    except BaseException:
        if is_own:
            with suppress(OSError):  # it is not empty
                folder.rmdir()
        raise


def _given_folder(out: Path) -> Path:
    for name in ("audit.html", "audit.csv", "audit.json"):
        if (out / name).exists():
            raise ConfigError(f"{out / name} already exists. Choose another folder with --out.")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out}: is no folder and cannot become one: {error.strerror}.") from None
    return out


def _write_files(
    result: AuditResult,
    config: AuditConfig,
    weights: Sequence[str],
    statistics: LabelStatistics | None,
    *,
    doubt: str,
    replay: str,
    show_progress: bool,
) -> None:
    num_epochs = 0 if statistics is None else statistics.num_epochs
    about = {
        "data": config.data,
        "split": config.split,
        "weights": list(weights),
        "mirrored": config.mirrored,
        "tiles": config.tiles,
        "training_epochs": num_epochs,
        "num_images": result.num_images,
        "num_labels": result.num_labels,
    }
    lines = [
        f"{config.data}, {config.split}: {counted(result.num_labels, 'label')} in "
        f"{counted(result.num_images, 'image')}; weights: {', '.join(weights)}"
        + ("; with mirrored images" if config.mirrored else "")
        + (f"; in tiles of {config.tiles} px" if config.tiles is not None else "")
        + (f"; and the steps of {counted(num_epochs, 'epoch')} of the training" if num_epochs else ""),
        *([doubt] if doubt else []),
    ]
    _write(result.folder / "audit.json", as_json(result.records, about))
    _write(result.folder / "audit.csv", as_csv(result.records))
    html = page(f"Audit of {Path(config.data).name}", lines, result.records, replay=replay, shown=show_progress)
    _write(result.folder / "audit.html", html)


def _replay_command(config: AuditConfig) -> str:
    """The command that replays the audited run; empty if it has not recorded what its network saw."""
    if config.run is None or config.split != "train" or not (config.run / STEPS_NAME).is_file():
        return ""
    data = f" --data {shlex.quote(config.data)}" if config.data else ""
    return f"flatout yolo replay {shlex.quote(str(config.run))}{data}"


def _write(path: Path, text: str) -> None:
    write_file(path, text.encode(errors="surrogateescape"))
