"""How fast are NMS and metrics over a validation set, and what does working on whole batches gain?

Both sides run on the same random network outputs (80 classes, a confidence of 0.001, several classes per box, as YOLOv7
validates): `non_max_suppression` and `Evaluator` for a batch at once, against a reference implementation (twin) that
works image by image, with torchvision's NMS kernel if it is installed (else a NumPy loop that stops at 300 boxes) and
one table of overlaps per image. Both must give the same boxes and the same matches. Then a flood: an untrained network,
where every box and class is a candidate. Runs on the GPU (in half precision) if there is one, else, or with --cpu, on
the host. Exit code 1 if a promise is broken.

Answer: bench/results/validation_<machine>_<yyyymm>.md (rewritten with --write).

Dimension key:  B images of a batch   N raw boxes of an image   C classes   T labels
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from bench import noise
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.yolo.boxes import Letterbox
from flatout.yolo.metrics import IOU_THRESHOLDS, Evaluator, labels_in_images
from flatout.yolo.nms import NmsConfig, non_max_suppression
from tests.reference.plain_evaluation import matched_per_image
from tests.reference.plain_nms import Suppress, best_suppress, plain_nms

NUM_CLASSES = 80
INPUT_HW = (640, 640)
CONFIG = NmsConfig(conf_thres=0.001, iou_thres=0.65, multi_label=True)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How much is measured."""

    images: int
    """Images of the whole validation."""
    batch: int
    pool: int
    """Number of different batches, which the validation repeats."""
    turns: int
    turn_batches: int
    """Batches of each side per turn."""
    flood_images: int
    flood_stride_px: int = 8
    raw_boxes: tuple[int, ...] = (300, 3000)


CPU = Setting(images=5000, batch=32, pool=8, turns=5, turn_batches=2, flood_images=4)
GPU = Setting(images=5000, batch=32, pool=8, turns=5, turn_batches=8, flood_images=16)
QUICK = Setting(
    images=64, batch=8, pool=2, turns=2, turn_batches=2, flood_images=2, flood_stride_px=32, raw_boxes=(30, 300)
)


class Batch(NamedTuple):
    """The input of NMS and matching in a validation step, on the device."""

    prediction_BNO: Tensor
    target_T6: Tensor
    letterbox: Letterbox


def random_batch(seed: int, num_images: int, num_boxes: int, device: torch.device) -> Batch:
    """Outputs like those of a trained detector: most raw boxes are near objects, the rest is faint background."""
    generator = torch.Generator().manual_seed(seed)
    rand, randn = partial(torch.rand, generator=generator), partial(torch.randn, generator=generator)
    count_B = (14.7 * rand(num_images)).long() + 1
    image_T = torch.repeat_interleave(count_B)
    class_T = (NUM_CLASSES * rand(len(image_T)) ** 2).long()
    size_T2 = 0.03 + 0.5 * rand(len(image_T), 2) ** 2
    box_T4 = torch.cat((size_T2 / 2 + (1 - size_T2) * rand(len(image_T), 2), size_T2), 1)
    # The object of each raw box, if any.
    begin_B = count_B.cumsum(0) - count_B
    object_BN = begin_B[:, None] + (rand(num_images, num_boxes) * count_B[:, None]).long()
    near_BN1 = rand(num_images, num_boxes, 1) < 0.6
    faint_BN4 = torch.cat((rand(num_images, num_boxes, 2), 0.02 + 0.4 * rand(num_images, num_boxes, 2) ** 2), 2)
    box_BN4 = torch.where(near_BN1, box_T4[object_BN], faint_BN4)
    jitter_BN4 = 0.12 * near_BN1 * randn(num_images, num_boxes, 4)
    centre_BN2 = box_BN4[..., :2] + jitter_BN4[..., :2] * box_BN4[..., 2:]
    size_BN2 = box_BN4[..., 2:] * jitter_BN4[..., 2:].exp()
    faint_BN1 = 10 ** (-4 + 3 * rand(num_images, num_boxes, 1))
    objectness_BN1 = torch.where(near_BN1, rand(num_images, num_boxes, 1) ** 1.5, faint_BN1)
    logit_BNC = -7.5 + 1.3 * randn(num_images, num_boxes, NUM_CLASSES)
    logit_BNC.scatter_add_(2, class_T[object_BN][..., None], 8.0 * near_BN1)
    pixel_BN4 = torch.cat((centre_BN2, size_BN2), 2) * INPUT_HW[0]
    prediction_BNO = torch.cat((pixel_BN4, objectness_BN1, logit_BNC.sigmoid()), 2)
    target_T6 = torch.cat((image_T[:, None], class_T[:, None], box_T4), 1)
    letterbox = Letterbox.centred(INPUT_HW, [(480, 640)] * num_images, str(device))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return Batch(prediction_BNO.to(device, dtype), target_T6.to(device), letterbox)


def random_flood(seed: int, num_images: int, stride_px: int, device: torch.device) -> Tensor:
    """Outputs like those of an untrained network: boxes of anchor size everywhere, with every class above threshold."""
    generator = torch.Generator().manual_seed(seed)
    randn = partial(torch.randn, generator=generator)
    cells = [torch.cartesian_prod(*[torch.arange(s / 2, INPUT_HW[0], s)] * 2) for s in (stride_px, 2 * stride_px)]
    centre_N2 = torch.cat(cells).repeat(3, 1)
    shape = num_images, len(centre_N2)
    size_BN2 = 30 * 2.5 ** (torch.arange(shape[1]) * 3 // shape[1])[:, None] * (0.1 * randn(*shape, 2)).exp()
    centre_BN2 = centre_N2 + 3 * randn(*shape, 2)
    score_BNO = (-3 + 0.3 * randn(*shape, 1 + NUM_CLASSES)).sigmoid()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return torch.cat((centre_BN2, size_BN2, score_BNO), 2).to(device, dtype)


def batched(batches: Iterable[Batch], evaluator: Evaluator) -> Evaluator:
    """Our side, without the summary at the end."""
    for batch in batches:
        found = non_max_suppression(batch.prediction_BNO, CONFIG)
        evaluator.update(found, batch.target_T6, batch.letterbox, INPUT_HW)
    return evaluator


def image_by_image(batches: Iterable[Batch], suppress: Suppress) -> list[Tensor]:
    """The twin's side, without the summary at the end: which detections of each image are correct."""
    return [correct_nK for batch in batches for correct_nK in _one_by_one(batch, suppress)]


def _one_by_one(batch: Batch, suppress: Suppress) -> Iterator[Tensor]:
    thresholds_K = torch.tensor(IOU_THRESHOLDS, device=batch.prediction_BNO.device)
    labels = labels_in_images(batch.target_T6, batch.letterbox, INPUT_HW)
    label_T5 = torch.cat((labels.class_L[:, None].float(), labels.box_L4), 1)
    for image, found_n6 in enumerate(plain_nms(batch.prediction_BNO, CONFIG, suppress=suppress)):
        letterbox = Letterbox(*(column[image] for column in batch.letterbox))
        box_n4 = (found_n6[:, :4] - letterbox.pad_xy_B2.repeat(2)) / letterbox.gain_B
        box_n4 = torch.minimum(box_n4.clamp_(min=0), letterbox.native_wh_B2.repeat(2))
        found_n6 = torch.cat((box_n4, found_n6[:, 4:]), 1)
        yield matched_per_image(found_n6, label_T5[labels.image_L == image], thresholds_K)


def seconds(device: torch.device, call: Callable[..., object], *arguments: object) -> float:
    """Wall time of a call, with the device synchronised before and after."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin_s = time.perf_counter()
    call(*arguments)
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin_s


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Results for one number of raw boxes."""

    raw_boxes: int
    candidates_per_image: float
    kept_per_image: float
    batched_per_s: list[float]
    twin_per_s: list[float]
    whole_s: float
    """All images, with the summary at the end."""
    sum_s: float
    map50_95: float
    equal: bool

    @property
    def ratios(self) -> list[float]:
        return [ours / twin for ours, twin in zip(self.batched_per_s, self.twin_per_s, strict=True)]


def compare(raw_boxes: int, setting: Setting, device: torch.device, suppress: Suppress) -> Comparison:
    """Both sides in turns, then the whole validation by our side."""
    pool = [random_batch(seed, setting.batch, raw_boxes, device) for seed in range(setting.pool)]
    equal, candidates, kept = check(pool[0], suppress)
    ours, twin = [], []
    turn_images = setting.turn_batches * setting.batch
    for turn in range(setting.turns + 1):
        batches = [pool[(turn + step) % setting.pool] for step in range(setting.turn_batches)]
        ours.append(turn_images / seconds(device, batched, batches, Evaluator(NUM_CLASSES)))
        twin.append(turn_images / seconds(device, image_by_image, batches, suppress))
    evaluator = Evaluator(NUM_CLASSES)
    whole = islice(cycle(pool), -(-setting.images // setting.batch))
    steps_s = seconds(device, batched, whole, evaluator)
    sum_s = seconds(device, evaluator.result)
    return Comparison(
        raw_boxes=raw_boxes,
        candidates_per_image=candidates,
        kept_per_image=kept,
        batched_per_s=ours[1:],  # the first turn warms up
        twin_per_s=twin[1:],
        whole_s=steps_s + sum_s,
        sum_s=sum_s,
        map50_95=evaluator.result().map50_95,
        equal=equal,
    )


def check(batch: Batch, suppress: Suppress) -> tuple[bool, float, float]:
    """Whether both sides agree on a batch; candidates and kept boxes per image."""
    correct = torch.cat(image_by_image([batch], suppress)).cpu()
    ours = non_max_suppression(batch.prediction_BNO, CONFIG).per_image()
    theirs = plain_nms(batch.prediction_BNO, CONFIG, suppress=suppress)
    same_boxes = all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    same_matches = torch.equal(batched([batch], Evaluator(NUM_CLASSES)).matches().correct_DK, correct)
    score_BNC = batch.prediction_BNO[..., 5:] * batch.prediction_BNO[..., 4:5]
    confident_BN1 = batch.prediction_BNO[..., 4:5] > CONFIG.conf_thres
    candidates = ((score_BNC > CONFIG.conf_thres) & confident_BN1).sum() / len(ours)
    return same_boxes and same_matches, float(candidates), sum(map(len, ours)) / len(ours)


@dataclass(frozen=True, kw_only=True)
class Flood:
    """Results for an untrained network, where every box and class is a candidate."""

    raw_boxes: int
    images: int
    s_per_image: float
    more_bytes: int | None
    """Peak memory beyond that of the prediction, on a GPU."""


def flood(setting: Setting, device: torch.device) -> Flood:
    prediction_BNO = random_flood(0, setting.flood_images, setting.flood_stride_px, device)
    non_max_suppression(prediction_BNO, CONFIG)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    elapsed_s = median(seconds(device, non_max_suppression, prediction_BNO, CONFIG) for _ in range(3))
    more_bytes = torch.cuda.max_memory_allocated() - before if device.type == "cuda" else None
    num_images, raw_boxes, _ = prediction_BNO.shape
    return Flood(raw_boxes=raw_boxes, images=num_images, s_per_image=elapsed_s / num_images, more_bytes=more_bytes)


def check_promises(answers: list[Comparison], flooded: Flood, device: torch.device) -> list[Criterion]:
    wanted = 3.0 if device.type == "cuda" else 1.5
    limit_ms = 10.0 if device.type == "cuda" else 500.0
    promise = f"NMS of a flooded image, {flooded.raw_boxes} x {NUM_CLASSES}"
    criteria = [Criterion(promise=promise, value=1e3 * flooded.s_per_image, limit=limit_ms, unit=" ms")]
    for each in answers:
        name = f"{each.raw_boxes} raw boxes"
        criteria += [
            Criterion(promise=f"same boxes and matches, {name}", value=float(each.equal), limit=1, at_most=False),
            Criterion.of_median(f"images/s, batched / twin, {name}", each.ratios, wanted, at_most=False),
            Criterion(promise=f"summary, {name}", value=each.sum_s, limit=1.0, unit="s"),
        ]
    return criteria


def table(answers: list[Comparison]) -> list[str]:
    lines = ["raw boxes  candidates    kept   batched img/s   twin img/s    whole validation    of that, sum     mAP"]
    lines += [
        f"{each.raw_boxes:9}{each.candidates_per_image:12.0f}{each.kept_per_image:8.0f}"
        f"{median(each.batched_per_s):16.0f}{median(each.twin_per_s):13.0f}"
        f"{each.whole_s:18.2f} s{each.sum_s:15.2f} s{each.map50_95:7.3f}"
        for each in answers
    ]
    return lines


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--cpu", action="store_true", help="measure on the host even if there is a GPU")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and not options.cpu else "cpu")
    setting = QUICK if options.quick else GPU if device.type == "cuda" else CPU
    print(facts_line(), flush=True)
    before = noise.listen().line()
    print(before, file=sys.stderr, flush=True)
    kernel, suppress = best_suppress()
    answers = [compare(raw_boxes, setting, device, suppress) for raw_boxes in setting.raw_boxes]
    flooded = flood(setting, device)
    criteria = check_promises(answers, flooded, device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    lines = [
        before,
        f"{where}; {setting.images} images in batches of {setting.batch}; the twin's NMS kernel: {kernel}",
        "",
        *table(answers),
        "",
        *([f"flood: {flooded.more_bytes / 1e6:.0f} MB more than the predictions"] if flooded.more_bytes else []),
        *map(str, criteria),
    ]
    if options.quick:
        lines.append("a quick run only shows that the script works; ignore PASS and FAIL")
    numbers = {
        "noise": before,
        "where": where,
        "twin_kernel": kernel,
        "flood": asdict(flooded),
        "answers": [asdict(each) for each in answers],
        "criteria": [asdict(each) | {"passed": each.passed} for each in criteria],
    }
    report("validation", "\n".join(lines), numbers, options)
    return int(not options.quick and not all(each.passed for each in criteria))


if __name__ == "__main__":
    sys.exit(main())
