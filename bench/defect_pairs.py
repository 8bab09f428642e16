"""How well are real defects on circuit boards found after local alignment, and how fast?

Answer: bench/results/defect_pairs_<machine>_<yyyymm>.md (rewrite it with --write). Data: $FLATOUT_DATA/deeppcb_mini, or
pairs of your own with --data: folders or CSV files as `flatout defect test` reads them, labelled by boxes or masks, or
good. The first five letters of an image's name say which group of boards it is of (--group-letters).

Five groups of boards; each in turn is left out. The threshold is chosen on the pairs of the other four (0.1 false blobs
per picture, as `flatout defect calibrate` does), and used on the group that was left out. A blob is a connected
component; it hits a box if both overlap, and is false if it hits none. Boxes are human annotation; the masks were
derived from local shifts and differences, so pixel IoU says little. They were also opened with OpenCV's 2 x 2 kernel,
which shifts by one pixel to the right and down: IoU is given for the masks as they are, and moved back by that pixel.

The baseline is the classical way in 25 lines: whole shift per window of 48 px, found with 8 px around it, difference
above 100, opening of 2 x 2, area of at least 12; of two references it sees the first. "At equal recall" compares at the
highest threshold that finds 99 % of all boxes: of the area for the baseline, of the heat for flatout. The alignment and
the classical method have no random part; --network also trains networks (base width 8) on the templates of the other
groups, once per seed.

Only the threshold is chosen without the group that is left out. The settings of the alignment and of the classical
method (pools, boxes, score, share of the contrast) were chosen on these same pairs, after about 30 variants were
compared: boards of other groups may give more false blobs.

Speeds are measured with --speed, and then nothing else. They are CPU times of one thread, because other programs may
run on the machine: a rate on two free cores follows from them. Rates of wall time are measured with two threads, and
mean something only if the load average at the end is low. The networks are of base width 8 and random, in ONNX Runtime
as `flatout defect export` writes them for boards of 640 x 640: with patches of 128 px, which is the default, and with
one patch of 640 px.

One inspected image, 44000020, contains its own annotation (frames and words): results are given with and without it.
"""

import argparse
import csv
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from bench.defect_boards import moved
from bench.measure import Timing, arguments, report, summarize
from flatout.defect.compare.align import align
from flatout.defect.compare.calibrate import LOWEST, Blobs, heat_blobs, lowest_for, response, threshold_for
from flatout.defect.compare.classical import find_differences, heat_of_differences, refined
from flatout.defect.data.find import EvaluationImage
from flatout.defect.data.items import size_text
from flatout.defect.data.pairs import COLUMNS, aligned_planes, list_pair_images, read_planes
from flatout.defect.evaluate.evaluate import mask_of_image
from flatout.defect.evaluate.maps import HeatMapper, HostMapMaker, MakeMap
from flatout.defect.evaluate.scores import PixelCounts
from flatout.defect.export import model_for, reduce_precision
from flatout.defect.model import DefectNet
from flatout.defect.options import TrainOptions
from flatout.defect.patches import Grid
from flatout.defect.train import train
from flatout.defect.weights import load_network
from flatout.errors import DataError, FlatoutError, counted
from flatout.export import Precision, Session
from flatout.feed import DecodeError

FALSE_BLOBS = 0.1
"""False blobs per image that the choice of the threshold allows."""
RECALL = 0.99
DRAWN_ON = "44000020"
WINDOW, RING, REACH, MIN_DIFFERENCE, MIN_AREA = 48, 8, 8, 100, 12
"""Settings of the baseline, in pixels and grey levels."""
SEEDS = (0, 1, 2)
BOARD_HW, STRIP_HW = (640, 640), (976, 176)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--speed", action="store_true", help="measure speeds only; written to defect_pairs_speed_*")
    parser.add_argument("--network", action="store_true", help="also train networks, one per group and seed")
    parser.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="PAIRS",
        help="other pairs: folders or CSV files; nothing is written",
    )
    parser.add_argument(
        "--group-letters",
        type=int,
        default=5,
        metavar="N",
        help="images whose names begin with the same N letters are of one group of boards; 0: those of each of the "
        "PAIRS are (default: %(default)s)",
    )
    parser.add_argument("--groups", nargs="+", help="leave out only these groups for networks (default: all)")
    parser.add_argument("--epochs", type=int, default=6, help="epochs of each training (default: %(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="seeds of the trainings")
    options = parser.parse_args()
    if options.data and (options.write or options.speed):
        parser.error("--write and --speed are for the pairs of $FLATOUT_DATA: omit them, or --data.")
    try:
        _measure(options)
    except FlatoutError as error:
        parser.error(str(error))


def _measure(options: argparse.Namespace) -> None:
    pairs = _read_pairs(options)
    if options.speed:
        lines, numbers = _speed_report([pair.planes_CHW for pair in pairs])
        report("defect_pairs_speed", "\n".join(lines), numbers, options)
        return
    runs = {
        "baseline": _same_for_all_groups(_judged(pairs, baseline_map)),
        "classical": _same_for_all_groups(_judged(pairs, _classical_map)),
    }
    for seed in options.seeds if options.network else ():
        runs[f"network, seed {seed}"] = _networks(pairs, seed, options)
    lines, numbers = [], dict[str, Any]()
    has_drawn = any(pair.name == DRAWN_ON for pair in pairs)
    for which, text in (("all", ""), *([("clean", f", without {DRAWN_ON}")] if has_drawn else [])):
        lines.append(f"{len(pairs) - (which == 'clean')} pairs{text}")
        for way, run in runs.items():
            own = {group: [each for each in run[group] if which == "all" or each.name != DRAWN_ON] for group in run}
            numbers[f"{way}, {which}"] = found = _scores(own, has_threshold=way != "baseline")
            lines += _lines(way, found)
    if not options.data:
        lines += [
            "only the threshold is chosen without the group that is left out; the settings of alignment and method",
            "were chosen on these same pairs, after about 30 variants were compared",
        ]
    report("defect_pairs", "\n".join(lines), numbers, options)


class Pair(NamedTuple):
    """A labelled pair."""

    image: EvaluationImage
    group: str
    planes_CHW: np.ndarray
    """float32, in 0..255; the references are not aligned."""

    @property
    def name(self) -> str:
        return self.image.path.stem


def _read_pairs(options: argparse.Namespace) -> list[Pair]:
    """All pairs; DataError if one cannot be used, or if the comparison would lack something."""
    shipped = Path(os.environ.get("FLATOUT_DATA", "../shared/data")) / "deeppcb_mini"
    given = [
        (image, image.path.stem[: options.group_letters] if options.group_letters > 0 else str(source))
        for source in options.data or [shipped / "train", shipped / "val"]
        for image in list_pair_images(source)
    ][:: 8 if options.quick else 1]
    images = [image for image, _ in given]
    if unlabelled := [image.path for image in images if not image.is_labelled and image.boxes is None]:
        raise DataError(
            f"{counted(len(unlabelled), 'image')} without a mask or boxes, such as {unlabelled[0]}. Good images need "
            "an empty mask or an empty file of boxes, or a folder named good."
        )
    groups = {group for _, group in given}
    if len(groups) < 2:
        raise DataError(
            f"All images are of one group of boards, {groups.pop()!r}, so none can be left out. Say how groups are "
            "named with --group-letters, or add other boards to --data, such as $FLATOUT_DATA/deeppcb_mini/val."
        )
    if unknown := set(options.groups or ()) - groups:
        raise DataError(f"--groups: {', '.join(sorted(unknown))} is none of {', '.join(sorted(groups))}.")
    try:
        pairs = [Pair(image, group, read_planes(image)) for image, group in given]
    except (OSError, DecodeError) as error:
        raise DataError(str(error)) from None
    sizes = {pair.planes_CHW.shape[1:] for pair in pairs}
    if options.network and len(sizes) > 1:
        texts = ", ".join(sorted(map(size_text, sizes)))
        raise DataError(f"--network: a training needs images of one size (width x height), not of {texts}.")
    return pairs


@dataclass(frozen=True)
class Judged:
    """The heat map of one image with its blobs and its mask."""

    name: str
    group: str
    blobs: Blobs
    heat_HW: np.ndarray
    mask_HW: np.ndarray | None
    """None: only its boxes are known."""
    lowest: float
    """Lowest threshold that is chosen for the method that made the map."""


Run = Mapping[str, Sequence[Judged]]
"""Group that is left out -> all images, judged by the method without this group."""


def _judged(pairs: Iterable[Pair], make_map: MakeMap, lowest: float = LOWEST) -> list[Judged]:
    return [_judge(pair, make_map(pair.planes_CHW), lowest) for pair in pairs]


def _same_for_all_groups(judged: Sequence[Judged]) -> Run:
    """The run of a method that learns nothing from images."""
    return dict.fromkeys(sorted({each.group for each in judged}), judged)


def _judge(pair: Pair, heat_HW: np.ndarray, lowest: float) -> Judged:
    blobs = heat_blobs(heat_HW, pair.image, least=1e-6)
    return Judged(pair.name, pair.group, blobs, heat_HW, mask_of_image(pair.image, heat_HW.shape), lowest)


def _scores(run: Run, *, has_threshold: bool) -> dict[str, Any]:
    """Results at equal recall over the images that were left out, and of each group at the threshold of the others.

    A method without a threshold to choose gives blobs that all count.
    """
    left_out = [each for group, judged in run.items() for each in judged if each.group == group]
    best_K = np.sort(np.concatenate([each.blobs.best_K for each in left_out]))
    if not len(best_K):
        raise DataError("No image has a labelled defect, so there is no recall at which methods could be compared.")
    at_recall = max(float(best_K[int(np.floor((1 - RECALL) * len(best_K) + 1e-9))]), 1e-6)
    groups = {}
    for group, judged in run.items():
        false = [each.blobs.heat_N[each.blobs.is_false_N] for each in judged if each.group != group]
        threshold = threshold_for(false, FALSE_BLOBS, lowest=judged[0].lowest) if has_threshold else 1e-6
        groups[group] = _at(threshold, [each for each in judged if each.group == group])
    total: dict[str, Any] = {
        name: sum(each[name] for each in groups.values()) for name in ("pictures", "boxes", "hit", "false")
    }
    for name in ("iou", "iou_moved"):
        overlap, union = (sum(each[f"{name}_{part}"] for each in groups.values()) for part in ("overlap", "union"))
        total[name] = overlap / union if union else None
    return {
        "equal_recall": _at(at_recall, left_out),
        "groups": groups,
        "left_out": {**total, "false_per_picture": total["false"] / total["pictures"]},
    }


def _at(threshold: float, judged: Sequence[Judged]) -> dict[str, Any]:
    false = sum(int((each.blobs.heat_N[each.blobs.is_false_N] >= threshold).sum()) for each in judged)
    drawn = [(each.heat_HW >= np.float32(threshold), each.mask_HW) for each in judged if each.mask_HW is not None]
    overlaps = {}
    for name, by in (("iou", 0), ("iou_moved", -1)):
        pairs = [(drawn_HW, moved(mask_HW, (by, by))) for drawn_HW, mask_HW in drawn]
        overlaps[f"{name}_overlap"] = sum(int((drawn_HW & mask_HW).sum()) for drawn_HW, mask_HW in pairs)
        overlaps[f"{name}_union"] = sum(int((drawn_HW | mask_HW).sum()) for drawn_HW, mask_HW in pairs)
    return {
        "threshold": threshold,
        "pictures": len(judged),
        "boxes": sum(len(each.blobs.best_K) for each in judged),
        "hit": sum(int((each.blobs.best_K >= threshold).sum()) for each in judged),
        "false": false,
        "false_per_picture": false / len(judged),
        **overlaps,
        **{
            name: overlaps[f"{name}_overlap"] / union if (union := overlaps[f"{name}_union"]) else None
            for name in ("iou", "iou_moved")
        },
    }


def _lines(label: str, found: Mapping[str, Any]) -> list[str]:
    equal, left_out = found["equal_recall"], found["left_out"]
    is_reached = equal["hit"] >= RECALL * equal["boxes"] - 1e-9
    recall = "at equal recall" if is_reached else f"below a recall of {RECALL:.0%} at any threshold"
    lines = [
        f"  {label:<18} {recall}: {equal['hit']} of {equal['boxes']} boxes, {equal['false']} false blobs "
        f"({equal['false_per_picture']:.3f} per picture), "
        f"IoU {_share(equal['iou'])}, moved {_share(equal['iou_moved'])}",
        f"  {'':<18} left out, threshold of the others: {left_out['hit']} of {left_out['boxes']} boxes, "
        f"{left_out['false']} false blobs ({left_out['false_per_picture']:.3f} per picture), "
        f"IoU {_share(left_out['iou'])}, moved {_share(left_out['iou_moved'])}",
    ]
    for group, each in found["groups"].items():
        lines.append(
            f"  {'':<20} {group}: threshold {each['threshold']:.3f}, {each['hit']} of {each['boxes']} boxes, "
            f"{each['false_per_picture']:.2f} false blobs per picture, IoU {_share(each['iou'])}"
        )
    return lines


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


# The ways


def baseline_map(planes_CHW: np.ndarray) -> np.ndarray:
    """The classical way in 25 lines; a component's heat rises with its area, 0.5 for 12 pixels."""
    target_HW, reference_HW = (plane_HW.astype(np.uint8) for plane_HW in planes_CHW[:2])
    height, width = target_HW.shape
    wide = cv2.copyMakeBorder(reference_HW, REACH, REACH, REACH, REACH, cv2.BORDER_REPLICATE)
    difference_HW = np.zeros((height, width), np.uint8)
    for y in range(0, height, WINDOW):
        for x in range(0, width, WINDOW):
            top, left = max(0, y - RING), max(0, x - RING)
            bottom, right = min(height, y + WINDOW + RING), min(width, x + WINDOW + RING)
            searched = wide[top : bottom + 2 * REACH, left : right + 2 * REACH]
            fit = cv2.matchTemplate(searched, target_HW[top:bottom, left:right], cv2.TM_SQDIFF)
            dx, dy = cv2.minMaxLoc(fit)[2]
            window = target_HW[y : y + WINDOW, x : x + WINDOW]
            there = wide[y + dy : y + dy + window.shape[0], x + dx : x + dx + window.shape[1]]
            difference_HW[y : y + WINDOW, x : x + WINDOW] = cv2.absdiff(window, there)
    differs_HW = (difference_HW > MIN_DIFFERENCE).astype(np.uint8)
    opened_HW = cv2.morphologyEx(differs_HW, cv2.MORPH_OPEN, np.ones((2, 2), np.uint8))
    _, number_HW, facts, _ = cv2.connectedComponentsWithStats(opened_HW, connectivity=8)
    area_N = facts[:, 4].astype(np.float32)
    area_N[0] = 0
    return np.where(area_N >= MIN_AREA, area_N / (area_N + MIN_AREA), 0).astype(np.float32)[number_HW]


def _classical_map(planes_CHW: np.ndarray) -> np.ndarray:
    return _heat_of_aligned(aligned_planes(planes_CHW))


def _heat_of_aligned(planes_CHW: np.ndarray) -> np.ndarray:
    return heat_of_differences(find_differences(planes_CHW))


def _networks(pairs: Sequence[Pair], seed: int, options: argparse.Namespace) -> Run:
    """For every group, a network that was trained on the templates of the other groups."""
    aligned = [pair._replace(planes_CHW=aligned_planes(pair.planes_CHW)) for pair in pairs]
    run = {}
    for group in options.groups or sorted({pair.group for pair in pairs}):
        others = {pair.image.path: pair for pair in aligned if pair.group != group}
        images = [pair.image for pair in others.values()]
        with tempfile.TemporaryDirectory() as name:
            network_map = _trained(images, Path(name), seed, 1 if options.quick else options.epochs)
        make_map = partial(_refined_map, network_map)
        read = {path: pair.planes_CHW for path, pair in others.items()}.__getitem__
        lowest = lowest_for(None, partial(response, images, read, HostMapMaker(make_map)))
        run[group] = _judged(aligned, make_map, lowest)
    return run


def _refined_map(make_map: MakeMap, planes_CHW: np.ndarray) -> np.ndarray:
    return refined(make_map(planes_CHW), planes_CHW)


def _trained(images: Sequence[EvaluationImage], folder: Path, seed: int, epochs: int) -> MakeMap:
    pairs = folder / "pairs.csv"
    with pairs.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS[:3])
        for image in images:
            first, *second = image.references
            writer.writerow([each.resolve() for each in (first, image.path, *second)])
    result = train(
        TrainOptions(
            training_dataset_path=str(pairs), project=str(folder / "runs"), base_width=8, epochs=epochs, seed=seed,
            psf_pool_size=500, num_workers=0, use_mask=False,
        )
    )  # fmt: skip
    network, _ = load_network(result.folder / "weights/best.pt")
    return HeatMapper(network, partial(Grid.over, patch=128), torch.device("cpu"))


# Speed


SPEED_BARS = {
    "alignment of a board of 640 x 640": 15.0,
    "alignment of a strip of 976 x 176": 6.0,
    "network, float32, patches of 128 px": 2000 / 6,
    "network, int8, patches of 128 px": 2000 / 15,
}
"""What is timed -> CPU time in ms that it should take at most."""
MIN_BOARDS_PER_S = 60
"""Boards per second, aligned and compared, on two cores."""


def _speed_report(boards: list[np.ndarray]) -> tuple[list[str], dict[str, Any]]:
    """Lines of the report about speed, and its numbers."""
    network_speeds, walls = _network_speeds(boards)
    speeds = _speeds(boards[0]) | network_speeds
    rate = _rate(boards)
    lines = ["speed, CPU time of one thread"]
    for name, timing in speeds.items():
        bar = SPEED_BARS.get(name)
        verdict = "" if bar is None else f"  {'PASS' if 1e3 * timing.median <= bar else 'FAIL'} (at most {bar:.0f} ms)"
        per_s = ""
        if name in walls:
            per_s = f", {2 / timing.median:.1f} boards/s on two free cores, {2 / walls[name].median:.1f} of wall time"
        lines.append(f"  {name:<38} {timing.text()}{per_s}{verdict}")
    on_free = 2000 / rate["cpu_ms"]
    lines += [
        f"  alignment and classical method, two threads: a board takes {rate['cpu_ms']:.1f} ms of CPU time, which is "
        f"{on_free:.0f} boards/s on two free cores  {'PASS' if on_free >= MIN_BOARDS_PER_S else 'FAIL'} "
        f"(at least {MIN_BOARDS_PER_S}); {rate['boards_per_s']:.1f} boards/s of wall time",
        f"  (load average of the machine at the end: {os.getloadavg()[0]:.1f})",
    ]
    numbers = {name: timing._asdict() for name, timing in speeds.items()}
    wall_numbers = {name: timing._asdict() for name, timing in walls.items()}
    return lines, {"ways": numbers, "walls": wall_numbers, "two_threads": rate, "load": os.getloadavg()[0]}


def _speeds(board_CHW: np.ndarray) -> dict[str, Timing]:
    cv2.setNumThreads(1)
    torch.set_num_threads(1)
    board = board_CHW.astype(np.uint8)
    strip = np.ascontiguousarray(np.tile(board, (1, 2, 1))[:, : STRIP_HW[0], : STRIP_HW[1]])
    aligned = aligned_planes(board)
    heat_HW = _heat_of_aligned(aligned)
    calls: dict[str, Callable[[], object]] = {
        "alignment of a board of 640 x 640": partial(align, board[0], board[1]),
        "alignment of a strip of 976 x 176": partial(align, strip[0], strip[1]),
        "classical method, aligned board": partial(_heat_of_aligned, aligned),
        "baseline, board": partial(baseline_map, board),
        "counts for AU-PRO, AP and AUROC, board": partial(PixelCounts().add, heat_HW >= 0.5, heat_HW),
    }
    return {name: _timed(call) for name, call in calls.items()}


def _network_speeds(boards: list[np.ndarray]) -> tuple[dict[str, Timing], dict[str, Timing]]:
    """Exported networks of base width 8: CPU time of a board, and wall time of two boards, in one thread each."""
    torch.manual_seed(0)
    network = DefectNet("v1", 8)
    cpu, wall = dict[str, Timing](), dict[str, Timing]()
    with tempfile.TemporaryDirectory() as name:
        for patch in (128, 640):
            paths: dict[Precision, Path] = {each: Path(name, f"{patch}.{each}.onnx") for each in ("float32", "int8")}
            model_for(network, Grid.over(BOARD_HW, patch)).write_onnx(paths["float32"])
            calibration = [board_CHW.astype(np.float32) for board_CHW in boards[:4]]
            reduce_precision(paths["float32"], paths["int8"], "int8", calibration)
            for precision, path in paths.items():
                name_of_way, board = f"network, {precision}, patches of {patch} px", {"input": calibration[0][None]}
                cpu[name_of_way] = _timed(partial(Session(path, threads=1), board), repeats=9)
                sessions = [Session(path, threads=1) for _ in range(2)]
                both = partial(_at_once, [partial(session, board) for session in sessions])
                wall[name_of_way] = _timed(both, time.perf_counter, repeats=9)
    return cpu, wall


def _at_once(calls: Sequence[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(calls)) as threads:
        for done in [threads.submit(call) for call in calls]:
            done.result()


def _timed(call: Callable[[], object], clock: Callable[[], float] = time.process_time, *, repeats: int = 41) -> Timing:
    """By default CPU time of all threads: the time of day would depend on what else the machine does."""
    durations = []
    for _ in range(repeats + 3):
        began = clock()
        call()
        durations.append(clock() - began)
    return summarize(durations[3:])


def _rate(boards: list[np.ndarray]) -> dict[str, float]:
    """Boards per second of wall time in two threads, and CPU time per board; decoded beforehand."""
    cv2.setNumThreads(1)
    boards = [planes_CHW.astype(np.uint8) for planes_CHW in boards]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(_classical_map, boards[:4]))
        began, cpu_began = time.perf_counter(), time.process_time()
        list(threads.map(_classical_map, boards))
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {"boards_per_s": len(boards) / seconds, "cpu_ms": 1e3 * cpu_s / len(boards)}


if __name__ == "__main__":
    main()
