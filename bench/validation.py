"""How long does a training wait for a validation, and what do NMS and metrics gain by working on whole batches?

The wait: validations of a training as `train.py --fast` makes them, of yolov7-tiny at 320 px, on generated JPEGs of
several shapes with labels of 80 classes. The network runs, then its boxes are replaced by boxes like those of a trained
one, because nothing is detected without training. The wait is measured as it is; the ledger is measured once more with
the device synchronised around each part, so that its sum is larger. An early network floods NMS: there every box and
class is a candidate. On a GPU consecutive batches of one shape go through the network together; "batches apart" is the
wait without that, in turns. `--tuned`: the same while cuDNN tries out kernels, which validations do not let it do.

NMS and metrics: both sides run on the same random network outputs (80 classes, a confidence of 0.001, several classes
per box, as YOLOv7 validates): `non_max_suppression` and `Evaluator` for a batch at once, against a reference
implementation (twin) that works image by image, with torchvision's NMS kernel if it is installed (else a NumPy loop
that stops at 300 boxes) and one table of overlaps per image. Both must give the same boxes and the same matches. Then a
flood: an untrained network, where every box and class is a candidate, in half precision on a GPU.

Exit code 1 if a promise is broken. The wait on a GPU needs 16 GB there.

Answer: bench/results/validation_<machine>_<yyyymm>.md (rewritten with --write).

Dimension key:  B images of a batch   N raw boxes of an image (images in Scenes)   C classes   T labels
                O = 5 + C outputs of a box
"""

import io
import logging
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import cv2
import numpy as np
import torch
from torch import Tensor, nn

from bench import noise
from bench.measure import arguments, facts_line, report
from bench.promises import Criterion
from flatout.feed import plan_workers
from flatout.ranks import Interrupts, World, choose_device, make_current
from flatout.runs import RunContext
from flatout.yolo.boxes import Letterbox
from flatout.yolo.data.image_set import ImageSet, Labels
from flatout.yolo.evaluate import run as evaluate_run
from flatout.yolo.evaluate.validation_input import ValidationBatch, ValidationInput
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.hyp import load_hyp
from flatout.yolo.metrics import IOU_THRESHOLDS, Evaluator, labels_in_images
from flatout.yolo.model.configs import load_config
from flatout.yolo.model.layers import Predictions
from flatout.yolo.model.network import Network, build_network
from flatout.yolo.nms import NmsConfig, non_max_suppression
from flatout.yolo.train import validate
from flatout.yolo.train.step import DetectionLoss
from flatout.yolo.train.validate import Validation
from tests.reference.plain_evaluation import matched_per_image
from tests.reference.plain_nms import Suppress, best_suppress, plain_nms

NUM_CLASSES = 80
INPUT_HW = (640, 640)
CONFIG = NmsConfig(conf_thres=0.001, iou_thres=0.65, multi_label=True)


# The wait of a training


@dataclass(frozen=True, kw_only=True)
class WaitSetting:
    """How much is validated."""

    images: int
    batches: tuple[int, ...]
    """Images per batch of a validation: twice those of a step."""
    size: int
    passes: int


WAIT = WaitSetting(images=5000, batches=(768, 128), size=320, passes=4)
WAIT_CPU = WaitSetting(images=64, batches=(32,), size=320, passes=3)
WAIT_QUICK = WaitSetting(images=12, batches=(8,), size=64, passes=2)
LIMIT_S = 0.5
SIZES_WH = ((640, 480), (640, 480), (640, 480), (640, 427), (480, 640), (500, 375), (427, 640), (640, 640))
"""Width and height of the images, one after the other."""
NEAR_SHARE, FAINT = 0.1, (-6.0, 4.0)
"""Raw boxes near an object, of those of a trained network at 320 px; and the objectness of the others: 10 to the power
of a number from the first to the sum of both."""


def draw_scenes(folder: Path, num: int, *, seed: int = 0) -> ImageSet:
    """Write JPEGs of smooth noise; every one has 1 to 14 labels of NUM_CLASSES classes."""

    def write(number: int) -> str:
        own = np.random.default_rng((seed, number))
        width, height = SIZES_WH[number % len(SIZES_WH)]
        coarse = own.integers(0, 256, (height // 16, width // 16, 3), np.uint8)
        path = folder / f"{number:05}.jpg"
        cv2.imwrite(str(path), cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC))
        return str(path)

    with ThreadPoolExecutor() as pool:
        paths = tuple(pool.map(write, range(num)))
    rng = np.random.default_rng(seed)
    count_N = rng.integers(1, 15, num)
    size_T2 = 0.03 + 0.5 * rng.random((count_N.sum(), 2)) ** 2
    centre_T2 = size_T2 / 2 + (1 - size_T2) * rng.random(size_T2.shape)
    class_T = (NUM_CLASSES * rng.random(len(size_T2)) ** 2).astype(np.int64)
    labels = Labels(
        np.column_stack((class_T, centre_T2, size_T2)).astype(np.float32),
        np.concatenate(([0], count_N.cumsum())),
        np.zeros((0, 2), np.float32),
        np.zeros(len(size_T2) + 1, np.int64),
    )
    sizes = np.array([SIZES_WH[number % len(SIZES_WH)] for number in range(num)], np.int32)
    return ImageSet(paths, sizes, labels, tuple(map(str, range(NUM_CLASSES))))


class AsTrained(nn.Module):
    """Runs a network and returns other boxes, those of `outputs`: of one batch or several each time, over and over."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network
        self.outputs: list[Tensor] = []
        self._turn = 0

    def forward(self, x: Tensor) -> Predictions:
        own = self.network(x)
        outputs = [self._next()]
        while sum(map(len, outputs)) < len(x):
            outputs.append(self._next())
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        assert own.decoded.shape == joined.shape
        return Predictions(joined, own.raw)

    def _next(self) -> Tensor:
        self._turn += 1
        return self.outputs[(self._turn - 1) % len(self.outputs)]


class Ledger:
    """Seconds of each part of a validation, with the device synchronised around it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.parts: dict[str, float] = defaultdict(float)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begin_s = self.now_s()
        yield
        self.parts[name] += self.now_s() - begin_s

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*values: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*values, **named)

        return timed_call

    def timed_batches(self, epoch: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def batches(*values: Any) -> Iterator[Any]:
            source = epoch(*values)
            while True:
                with self.part("input"):
                    batch = next(source, None)
                if batch is None:
                    return
                yield batch

        return batches

    def watching(self) -> AbstractContextManager[object]:
        """The parts of validations in the block are timed."""
        stack = ExitStack()
        stack.enter_context(patch.object(ValidationInput, "epoch", self.timed_batches(ValidationInput.epoch)))
        for name, owner, attribute in (
            ("network", evaluate_run.Forward, "__call__"),
            ("losses", DetectionLoss, "validation"),
            ("NMS", evaluate_run, "non_max_suppression"),
            ("matching", Evaluator, "update"),
            ("scores", Evaluator, "result"),
            ("plots: copies for the thread", evaluate_run.EvaluationPlots, "on_batch"),
            ("plots: copies for the thread", evaluate_run.EvaluationPlots, "finish"),
            ("log", validate.logger, "info"),
        ):
            stack.enter_context(patch.object(owner, attribute, self.timed(name, getattr(owner, attribute))))
        return stack

    def now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Wait:
    """What validations with one batch size took; seconds each."""

    batch: int
    opened_s: float
    """Opening the input, once: images decoded, copied to the device."""
    first_s: float
    """The first validation after that: libraries loaded, kernels compiled."""
    waits_s: list[float]
    apart_s: list[float]
    """The same with every batch going through the network alone, in turns."""
    last_s: float
    """That of the last epoch, whose plots are made beside what follows it."""
    early_s: float
    """With boxes of an early network."""
    ledger: Mapping[str, float]
    map50_95: float


def measure_wait(images: ImageSet, batch: int, setting: WaitSetting, device: torch.device, folder: Path) -> Wait:
    torch.manual_seed(0)
    config: Any = load_config("yolov7-tiny")
    network = build_network({**config, "nc": NUM_CLASSES}).to(device)
    if device.type == "cuda":
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    head, hyp = network.head, load_hyp(shipped_folder("data") / "hyp.scratch.tiny.yaml")
    scaled = hyp.loss().scaled(num_layers=head.nl, num_classes=head.nc, image_size_px=setting.size)
    as_trained = AsTrained(network)
    with ExitStack() as stack:
        context = RunContext(
            world=World(),
            device=device,
            folder=folder,
            weights=folder / "weights",
            continues=False,
            interrupts=Interrupts(),
            stack=stack,
            plots=True,
        )
        stack.enter_context(context.background)
        on_gpu = device.type == "cuda"
        validation = Validation(
            images=images,
            names=images.names,
            loss=DetectionLoss(head, scaled, ota=True),
            run=context,
            size=setting.size,
            batch_size=batch,
            grid=32,
            workers=min(8, plan_workers("cpu*1.0").total),
            amp=torch.bfloat16 if on_gpu else torch.float32,
            keeps_images=True,
            on_device=on_gpu,
        )
        ledger = Ledger(device)

        def wait_s(*, last: bool = False, apart: bool = False) -> float:
            with patch.object(Validation, "_pixels_at_once", 0) if apart else nullcontext():
                begin_s = ledger.now_s()
                validation(as_trained, last)
                return ledger.now_s() - begin_s

        begin_s = ledger.now_s()
        batches = validation._input
        opened_s = ledger.now_s() - begin_s
        assert isinstance(batches, ValidationInput)
        as_trained.outputs = [_outputs(number, each, network) for number, each in enumerate(batches.epoch())]
        first_s = wait_s()
        wait_s(apart=True)
        apart_s, waits_s = zip(*((wait_s(apart=True), wait_s()) for _ in range(setting.passes)), strict=True)
        found = validation(as_trained, False)
        last_s = wait_s(last=True)
        context.background.wait()
        with ledger.watching():
            whole_s = [wait_s() for _ in range(setting.passes)]
        parts = {name: seconds / setting.passes for name, seconds in ledger.parts.items()}
        parts["the rest"] = sum(whole_s) / setting.passes - sum(parts.values())
        for number, outputs in enumerate(as_trained.outputs):
            generator = torch.Generator(device).manual_seed(number)
            outputs[..., 4:].normal_(-3, 0.3, generator=generator).sigmoid_()
        early_s = min(wait_s() for _ in range(2))
    assert found is not None
    return Wait(
        batch=batch,
        opened_s=opened_s,
        first_s=first_s,
        waits_s=list(waits_s),
        apart_s=list(apart_s),
        last_s=last_s,
        early_s=early_s,
        ledger=parts,
        map50_95=found.evaluation.map50_95,
    )


@torch.no_grad()
def _outputs(seed: int, batch: ValidationBatch, network: Network) -> Tensor:
    """Boxes as a trained network would find them in the batch, in float32."""
    height, width = batch.input_hw
    num_boxes = network.head.na * sum(int(height / stride) * int(width / stride) for stride in network.head.strides)
    generator = torch.Generator(batch.images.device).manual_seed(seed)
    count_B = torch.from_numpy(batch.counts_B).to(batch.images.device, torch.int64)
    return outputs_near(
        generator, batch.targets_T6[:, 1:], count_B, num_boxes, batch.input_hw, near=NEAR_SHARE, faint=FAINT
    )


def wait_lines(waits: Sequence[Wait], setting: WaitSetting) -> list[str]:
    lines = [
        f"wait of a training, {setting.images} images at {setting.size} px, {NUM_CLASSES} classes, yolov7-tiny; in s:",
        "batch        wait            batches apart   of the last epoch   of an early one      the first   input opened"
        "     mAP",
    ]
    for each in waits:
        spread = f"{median(each.waits_s):.3f} ({min(each.waits_s):.3f}-{max(each.waits_s):.3f})"
        lines.append(
            f"{each.batch:5}  {spread:22}{median(each.apart_s):11.3f}{each.last_s:20.3f}{each.early_s:18.3f}"
            f"{each.first_s:15.3f}{each.opened_s:15.3f}{each.map50_95:8.3f}"
        )
    lines += ["", "ledger, synchronised around each part, in ms:" + "".join(f"{each.batch:>9}" for each in waits)]
    for name in waits[0].ledger:
        lines.append(f"  {name:<43}" + "".join(f"{1e3 * each.ledger[name]:9.1f}" for each in waits))
    sums = "".join(f"{1e3 * sum(each.ledger.values()):9.1f}" for each in waits)
    return [*lines, f"  {'sum':<43}{sums}"]


# NMS and metrics against the twin


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
GPU = Setting(images=5000, batch=32, pool=8, turns=4, turn_batches=4, flood_images=16)
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
    rand = partial(torch.rand, generator=generator)
    count_B = (14.7 * rand(num_images)).long() + 1
    image_T = torch.repeat_interleave(count_B)
    class_T = (NUM_CLASSES * rand(len(image_T)) ** 2).long()
    size_T2 = 0.03 + 0.5 * rand(len(image_T), 2) ** 2
    box_T4 = torch.cat((size_T2 / 2 + (1 - size_T2) * rand(len(image_T), 2), size_T2), 1)
    class_box_T5 = torch.cat((class_T[:, None], box_T4), 1)
    prediction_BNO = outputs_near(generator, class_box_T5, count_B, num_boxes, INPUT_HW, near=0.6, faint=(-4.0, 3.0))
    target_T6 = torch.cat((image_T[:, None], class_box_T5), 1)
    letterbox = Letterbox.centred(INPUT_HW, [(480, 640)] * num_images, str(device))
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    return Batch(prediction_BNO.to(device, dtype), target_T6.to(device), letterbox)


def outputs_near(
    generator: torch.Generator,
    class_box_T5: Tensor,
    count_B: Tensor,
    num_boxes: int,
    input_hw: tuple[int, int],
    *,
    near: float,
    faint: tuple[float, float],
) -> Tensor:
    """Outputs of which a share `near` is near objects of their image, each of which has one; float32 [B, N, O]."""
    device, num_images = class_box_T5.device, len(count_B)
    rand = partial(torch.rand, generator=generator, device=device)
    randn = partial(torch.randn, generator=generator, device=device)
    class_T, box_T4 = class_box_T5[:, 0].long(), class_box_T5[:, 1:]
    # The object of each raw box, if any.
    begin_B = count_B.cumsum(0) - count_B
    object_BN = begin_B[:, None] + (rand(num_images, num_boxes) * count_B[:, None]).long()
    near_BN1 = rand(num_images, num_boxes, 1) < near
    faint_BN4 = torch.cat((rand(num_images, num_boxes, 2), 0.02 + 0.4 * rand(num_images, num_boxes, 2) ** 2), 2)
    box_BN4 = torch.where(near_BN1, box_T4[object_BN], faint_BN4)
    jitter_BN4 = 0.12 * near_BN1 * randn(num_images, num_boxes, 4)
    centre_BN2 = box_BN4[..., :2] + jitter_BN4[..., :2] * box_BN4[..., 2:]
    size_BN2 = box_BN4[..., 2:] * jitter_BN4[..., 2:].exp()
    faint_BN1 = 10 ** (faint[0] + faint[1] * rand(num_images, num_boxes, 1))
    objectness_BN1 = torch.where(near_BN1, rand(num_images, num_boxes, 1) ** 1.5, faint_BN1)
    logit_BNC = -7.5 + 1.3 * randn(num_images, num_boxes, NUM_CLASSES)
    logit_BNC.scatter_add_(2, class_T[object_BN][..., None], 8.0 * near_BN1)
    height, width = input_hw
    pixel_BN4 = torch.cat((centre_BN2, size_BN2), 2) * torch.tensor([width, height] * 2, device=device)
    return torch.cat((pixel_BN4, objectness_BN1, logit_BNC.sigmoid()), 2)


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
    parser.add_argument("--device", default="", help="cpu, or the number of a GPU (default: a GPU if there is one)")
    parser.add_argument("--wait-only", action="store_true", help="leave out NMS and metrics against the twin")
    parser.add_argument("--tuned", action="store_true", help="measure the wait also with kernels that cuDNN tried out")
    options = parser.parse_args()
    device = choose_device(options.device)
    make_current(device)
    on_gpu = device.type == "cuda"
    print(facts_line(), flush=True)
    before = noise.listen().line()
    print(before, file=sys.stderr, flush=True)
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    lines, criteria = [before, where, ""], list[Criterion]()
    numbers: dict[str, Any] = {"noise": before, "where": where}
    wait_setting = WAIT_QUICK if options.quick else WAIT if on_gpu else WAIT_CPU
    # A training logs, too: its lines are formatted, and lost.
    logging.basicConfig(level=logging.INFO, stream=io.StringIO())
    with tempfile.TemporaryDirectory() as name:
        images = draw_scenes(Path(name), wait_setting.images)
        for tuned in (False, True) if options.tuned else (False,):
            with _tuning() if tuned else nullcontext():
                waits = [measure_wait(images, each, wait_setting, device, Path(name)) for each in wait_setting.batches]
            lines += [*(["while cuDNN tries out kernels:"] if tuned else []), *wait_lines(waits, wait_setting), ""]
            numbers["waits, tuned" if tuned else "waits"] = [asdict(each) for each in waits]
            if on_gpu and not tuned:
                name_of = "training waits for a validation, batches of {}"
                criteria += [
                    Criterion.of_median(name_of.format(each.batch), each.waits_s, LIMIT_S, at_most=True, unit=" s")
                    for each in waits
                ]
            print("\n".join(lines[-10:]), file=sys.stderr, flush=True)
    if not options.wait_only:
        setting = QUICK if options.quick else GPU if on_gpu else CPU
        kernel, suppress = best_suppress()
        answers = [compare(raw_boxes, setting, device, suppress) for raw_boxes in setting.raw_boxes]
        flooded = flood(setting, device)
        criteria += check_promises(answers, flooded, device)
        lines += [
            f"NMS and metrics, {setting.images} images in batches of {setting.batch}; the twin's NMS kernel: {kernel}",
            "",
            *table(answers),
            "",
            *([f"flood: {flooded.more_bytes / 1e6:.0f} MB more than the predictions"] if flooded.more_bytes else []),
        ]
        numbers |= {
            "twin_kernel": kernel,
            "flood": asdict(flooded),
            "answers": [asdict(each) for each in answers],
        }
    lines += map(str, criteria)
    if options.quick:
        lines.append("a quick run only shows that the script works; ignore PASS and FAIL")
    numbers["criteria"] = [asdict(each) | {"passed": each.passed} for each in criteria]
    report("validation", "\n".join(lines), numbers, options)
    return int(not options.quick and not all(each.passed for each in criteria))


@contextmanager
def _tuning() -> Iterator[None]:
    """In the block cuDNN tries out kernels, in validations too."""
    torch.backends.cudnn.benchmark = True
    try:
        with patch.object(validate, "without_tuning", nullcontext):
            yield
    finally:
        torch.backends.cudnn.benchmark = False


if __name__ == "__main__":
    sys.exit(main())
