"""An evaluation gives what its images give one by one; losses, modes, hybrid labels and plots are as documented."""

import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from flatout.yolo.evaluate import Evaluate
from flatout.yolo.evaluate.run import DeviceWatch
from flatout.yolo.evaluate.validation_input import ValidationBatch, ValidationInput, open_validation
from flatout.yolo.loss import LossConfig, LossParts, plain_loss
from flatout.yolo.metrics import IOU_THRESHOLDS, score_classes
from flatout.yolo.metrics.confusion_file import read_confusion
from flatout.yolo.model.layers import Predictions
from flatout.yolo.nms import NmsConfig
from flatout.yolo.train.step import DetectionLoss
from flatout.yolo.train.validate import pixels_that_fit
from tests.reference.plain_evaluation import matched_by_loops, to_image_by_hand
from tests.reference.plain_nms import plain_nms
from tests.yolo.detection_batch import make_anchors, make_map
from tests.yolo.small_sets import files_of
from tests.yolo.train.small_training import narrow_network

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, NUM_CLASSES = 64, 2
NAMES = ("bolt", "nut")


@pytest.fixture(scope="module")
def batches(tmp_path_factory) -> Iterator[ValidationInput]:
    image_set = files_of(tmp_path_factory.mktemp("set"))
    with open_validation(image_set, size=SIZE, batch_size=4, workers=0, device="cpu") as opened:
        yield opened


class Answer(NamedTuple):
    """The predictions that the network will return for a batch, and the targets and shapes of that batch."""

    predictions: Predictions
    targets_T6: Tensor
    shapes: list[list[float]]


class Scripted(nn.Module):
    """Returns the given predictions, batch after batch."""

    def __init__(self, answers: list[Answer]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._answers = answers
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Predictions:
        assert not self.training
        self.seen.append(x)
        return self._answers[len(self.seen) - 1].predictions


def answers_near_the_labels(batches: ValidationInput, seed: int = 0) -> list[Answer]:
    """Boxes around the labels, and boxes with low scores anywhere; the raw maps are unrelated to them."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for batch in batches.epoch(0):
        height, width = batch.input_hw
        decoded = torch.rand(len(batch.images), 200, 5 + NUM_CLASSES, generator=generator)
        decoded[..., :4] *= torch.tensor([width, height, width / 2, height / 2])
        decoded[..., 4] *= 0.3
        for row, box in enumerate(batch.targets_T6.repeat(6, 1)):
            number, kind = int(box[0]), int(box[1])
            noise = torch.randn(4, generator=generator) * 2
            decoded[number, row, :4] = box[2:] * torch.tensor([width, height, width, height]) + noise
            decoded[number, row, 4] = torch.rand((), generator=generator)
            decoded[number, row, 5 + kind] = 0.9
        maps = [make_map(len(batch.images), height // s, width // s, NUM_CLASSES, generator) for s in (8, 16, 32)]
        answers.append(Answer(Predictions(decoded, maps), batch.targets_T6.clone(), shapes_of(batch)))
    return answers


def shapes_of(batch: ValidationBatch) -> list[list[float]]:
    boxes = zip(*(column.tolist() for column in batch.letterbox), strict=True)
    return [[h0, w0, gain, gain, *pad] for (w0, h0), gain, pad in boxes]


def by_hand(answers: list[Answer], input_hws: list[tuple[int, int]], config: NmsConfig) -> Any:
    """Image by image: NMS, boxes to pixels of the image, matching in loops; scores at the end."""
    right, rows, labels = [], [], []
    for answer, (height, width) in zip(answers, input_hws, strict=True):
        found = plain_nms(answer.predictions.decoded, config)
        for number, (found_n6, shape) in enumerate(zip(found, answer.shapes, strict=True)):
            own = answer.targets_T6[answer.targets_T6[:, 0] == number].numpy()
            centre, half = own[:, 2:4] * (width, height), own[:, 4:] * (width, height) / 2
            corners = np.concatenate((centre - half, centre + half), 1).astype(np.float32)
            label_m5 = np.concatenate((own[:, 1:2], to_image_by_hand(corners, shape)), 1)
            row_n6 = found_n6.numpy().copy()
            row_n6[:, :4] = to_image_by_hand(row_n6[:, :4], shape)
            right.append(matched_by_loops(torch.from_numpy(row_n6), torch.from_numpy(label_m5), IOU_THRESHOLDS))
            rows.append(row_n6)
            labels.append(own[:, 1])
    row_D6 = np.concatenate(rows)
    return score_classes(np.concatenate(right), row_D6[:, 4], row_D6[:, 5], np.concatenate(labels))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("conf_thres", "iou_thres"), [(0.001, 0.6), (0.25, 0.45)])
def test_an_evaluation_is_that_of_its_images_one_by_one(batches, seed, conf_thres, iou_thres):
    answers = answers_near_the_labels(batches, seed)
    network = Scripted(answers)
    outcome = Evaluate(names=NAMES).run(network, batches, conf_thres=conf_thres, iou_thres=iou_thres)
    config = NmsConfig(conf_thres=conf_thres, iou_thres=iou_thres, multi_label=True)
    expected = by_hand(answers, [(x.shape[2], x.shape[3]) for x in network.seen], config)
    found = outcome.evaluation
    assert found.map50 == pytest.approx(expected.ap_CK[:, 0].mean(), abs=1e-9)
    assert found.map50_95 == pytest.approx(expected.ap_CK.mean(), abs=1e-9)
    assert found.map50_95 > 0.05
    assert found.precision == pytest.approx(expected.precision_C.mean(), abs=1e-9)
    assert found.recall == pytest.approx(expected.recall_C.mean(), abs=1e-9)
    np.testing.assert_array_equal(found.classes.num_labels_C, expected.num_labels_C)
    assert found.num_images == batches.num_images
    assert found.num_labels == sum(len(answer.targets_T6) for answer in answers)


def test_the_network_sees_every_image_from_0_to_1(batches):
    answers = answers_near_the_labels(batches)
    network = Scripted(answers)
    Evaluate(names=NAMES).run(network, batches)
    for x, batch in zip(network.seen, batches.epoch(0), strict=True):
        torch.testing.assert_close(x, batch.images.float() / 255)


def test_losses_are_means_over_the_batches_and_zeros_without_a_loss(batches):
    answers, config = answers_near_the_labels(batches), LossConfig()

    def loss(maps: list[Tensor], targets_T6: Tensor) -> LossParts:
        return plain_loss(maps, targets_T6, make_anchors(3), config)

    outcome = Evaluate(names=NAMES).run(Scripted(answers), batches, loss=loss)
    each = torch.stack([loss(answer.predictions.raw, answer.targets_T6).items[:3] for answer in answers])
    assert list(outcome.val_losses.values()) == pytest.approx(each.mean(0).tolist(), rel=1e-6)
    assert list(outcome.val_losses) == ["box", "obj", "cls"]
    assert outcome.scores["val_obj"] == outcome.val_losses["obj"]
    without = Evaluate(names=NAMES).run(Scripted(answers), batches)
    assert without.val_losses == {"box": 0.0, "obj": 0.0, "cls": 0.0}
    assert without.evaluation.map50_95 == outcome.evaluation.map50_95


class ByImage(nn.Module):
    """Returns the predictions of each image, however images are put together, and counts its calls."""

    def __init__(self, images: list[Tensor], answers: list[Answer]) -> None:
        """`images` and `answers` of batches of one image."""
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._answers = {image.numpy().tobytes(): each.predictions for image, each in zip(images, answers, strict=True)}
        self.num_calls = 0

    def forward(self, x: Tensor) -> Predictions:
        self.num_calls += 1
        found = [self._answers[(255 * image[None]).round().byte().numpy().tobytes()] for image in x]
        raw = [torch.cat(levels) for levels in zip(*(each.raw for each in found), strict=True)]
        return Predictions(torch.cat([each.decoded for each in found]), raw)


def test_batches_that_go_through_the_network_together_give_the_same_numbers(batches):
    def loss(maps: list[Tensor], targets_T6: Tensor) -> LossParts:
        return plain_loss(maps, targets_T6, make_anchors(3), LossConfig())

    evaluate = Evaluate(names=NAMES)
    with open_validation(batches.image_set, size=SIZE, batch_size=1, workers=0, device="cpu") as single:
        images = [batch.images.clone() for batch in single.epoch()]
        answers = answers_near_the_labels(single)
        apart, joined, observed = (ByImage(images, answers) for _ in range(3))
        expected = evaluate.run(apart, single, loss=loss)
        found = evaluate.run(joined, single, loss=loss, pixels_at_once=10**6)
        assert found.scores == expected.scores
        assert expected.scores["val_box"] > 0 and expected.evaluation.map50 > 0
        assert len(single) == apart.num_calls > joined.num_calls
        evaluate.run(observed, single, observers=[lambda *_: None], pixels_at_once=10**6)
        assert observed.num_calls == len(single), "observers see single batches"


DEVICES = [
    "cpu",
    pytest.param("cuda", marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    ]),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_network_finds_nearly_the_same_in_batches_that_go_through_it_together(batches, device, on_device):
    network = narrow_network(NUM_CLASSES).to(device).eval()
    loss = DetectionLoss(network.head, LossConfig(), ota=True).validation
    with open_validation(
        batches.image_set, size=SIZE, batch_size=2, workers=0, device=device, on_device=on_device
    ) as pairs:
        found = [Evaluate(names=NAMES).run(network, pairs, loss=loss, pixels_at_once=pixels) for pixels in (0, 10**6)]
    apart, joined = (list(outcome.val_losses.values()) for outcome in found)
    assert joined == pytest.approx(apart, rel=1e-4) and min(apart) > 0


@pytest.mark.parametrize(
    ("free_gb", "amp", "images"), [(120, torch.bfloat16, 572), (16, torch.float16, 76), (16, torch.float32, 38)]
)
def test_images_of_320_px_that_go_through_a_network_together_take_a_fraction_of_the_free_memory(free_gb, amp, images):
    assert pixels_that_fit(free_gb * 10**9, amp) // 320**2 == images
    assert pixels_that_fit(10**15, amp) // 320**2 == 781, "more would not be faster"


@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was_also_after_an_error(batches, training):
    network = Scripted(answers_near_the_labels(batches)).train(training)
    Evaluate(names=NAMES).run(network, batches)
    assert network.training == training
    with pytest.raises(IndexError):
        Evaluate(names=NAMES).run(network, batches)  # there are no more predictions
    assert network.training == training


def test_labels_given_to_nms_are_found(batches):
    answers = answers_near_the_labels(batches)
    silent = [answer._replace(predictions=Predictions(answer.predictions.decoded * 0, [])) for answer in answers]
    nothing = Evaluate(names=NAMES).run(Scripted(silent), batches).evaluation
    assert (nothing.map50, nothing.recall) == (0, 0)
    assert nothing.num_labels > 20
    hybrid = Evaluate(names=NAMES).run(Scripted(silent), batches, hybrid=True).evaluation
    assert hybrid.map50 > 0.9


def test_with_a_single_class_any_class_counts(batches, tmp_path):
    image_set = files_of(tmp_path)
    answers = answers_near_the_labels(batches)
    with open_validation(image_set, size=SIZE, batch_size=4, workers=0, device="cpu", single_cls=True) as single:
        outcome = Evaluate(names=("item",), single_cls=True).run(Scripted(answers), single, plots=None)
    assert outcome.evaluation.num_classes == 1
    assert outcome.evaluation.classes.classes_C.tolist() == [0]
    assert outcome.evaluation.map50 > 0.05


def test_observers_get_every_batch_in_pixels_of_the_input_and_of_the_images(batches):
    calls = []

    def observe(batch, found, native):
        calls.append((len(batch.paths), found.num_images))
        limit_D2 = batch.letterbox.native_wh_B2[native.image_D]
        assert (native.box_D4 >= 0).all()
        assert (native.box_D4[:, 2:] <= limit_D2).all()
        assert torch.equal(found.row_D6[:, 4:], native.row_D6[:, 4:])

    Evaluate(names=NAMES).run(Scripted(answers_near_the_labels(batches)), batches, observers=[observe])
    assert [count for count, _ in calls] == [4, 4, 3]


def test_speed_is_given_per_image(batches):
    speed = Evaluate(names=NAMES).run(Scripted(answers_near_the_labels(batches)), batches).speed_ms
    assert speed.inference > 0
    assert speed.nms > 0
    assert speed.total == speed.inference + speed.nms


def test_half_precision_changes_little(batches):
    class Halved(Scripted):
        def forward(self, x: Tensor) -> Predictions:
            assert x.dtype == torch.bfloat16
            assert torch.is_autocast_enabled("cpu")
            return super().forward(x)

    answers = answers_near_the_labels(batches)
    plain = Evaluate(names=NAMES).run(Scripted(answers), batches).evaluation
    halved = Evaluate(names=NAMES).run(Halved(answers), batches, amp=torch.bfloat16).evaluation
    assert halved.map50 == plain.map50
    Evaluate(names=NAMES).run(Scripted(answers), batches, amp=torch.float32)


def test_plots_of_the_first_batches_and_curves_appear_in_the_folder(batches, tmp_path):
    answers = answers_near_the_labels(batches)
    Evaluate(names=NAMES).run(Scripted(answers), batches, plots=tmp_path)
    expected = {f"test_batch{number}_{what}.jpg" for number in range(3) for what in ("labels", "pred")}
    expected |= {"PR_curve.png", "F1_curve.png", "P_curve.png", "R_curve.png", "confusion_matrix.png"}
    assert {path.name for path in tmp_path.iterdir()} == expected | {"confusion_matrix.csv"}
    assert read_confusion(tmp_path / "confusion_matrix.csv").names == tuple(NAMES)


def test_plots_that_cannot_be_written_are_only_a_warning(batches, tmp_path, caplog):
    answers = answers_near_the_labels(batches)
    outcome = Evaluate(names=NAMES).run(Scripted(answers), batches, plots=tmp_path / "absent")
    assert outcome.evaluation.map50 > 0
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "absent: plots cannot be written (No such file or directory)" in warning


def test_a_watch_adds_up_blocks_on_the_host():
    watch = DeviceWatch()
    begin_s = time.perf_counter()
    for _ in range(2):
        with watch.timing(torch.device("cpu")):
            time.sleep(0.01)
    assert 0.02 <= watch.seconds <= time.perf_counter() - begin_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_watch_does_not_wait_for_a_gpu_until_it_is_read():
    watch, device = DeviceWatch(), torch.device("cuda")
    torch.cuda.synchronize()
    begin_s = time.perf_counter()
    for _ in range(2):
        with watch.timing(device):
            torch.cuda._sleep(200_000_000)  # cycles: about a tenth of a second
    queued_s = time.perf_counter() - begin_s
    assert queued_s < watch.seconds / 2
    assert watch.seconds <= time.perf_counter() - begin_s
