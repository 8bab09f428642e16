"""NMS and matching give the same results on a CUDA device as on the host."""

import pytest
import torch

from flatout.yolo.boxes import Letterbox
from flatout.yolo.metrics import Evaluator
from flatout.yolo.nms import NmsConfig, non_max_suppression
from tests.yolo.nms_predictions import OPTIONS, VALIDATION, draw

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("kernel", ["triton", "sweep"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_kernels_give_the_same_boxes_as_on_the_host(options, kernel):
    for num_boxes, num_classes in ((60, 80), (700, 1), (300, 3)):
        prediction = draw(5, num_boxes, num_classes, seed=num_boxes)
        expected = non_max_suppression(prediction, NmsConfig(**options, kernel="sweep"))
        found = non_max_suppression(prediction.cuda(), NmsConfig(**options, kernel=kernel))
        assert torch.equal(found.row_D6.cpu(), expected.row_D6)
        assert torch.equal(found.image_D.cpu(), expected.image_D)


def test_too_many_candidates_of_some_images_are_limited_as_on_the_host():
    prediction = draw(6, 400, 80, seed=5)
    # Few distinct scores, so that the limit falls between equal ones; two images stay below it.
    prediction[..., 4:] = (prediction[..., 4:] * 4).ceil() / 4
    prediction[[1, 4], 10:, 4] = 0
    config = NmsConfig(**VALIDATION, max_nms=1000)
    expected, found = (non_max_suppression(each, config) for each in (prediction, prediction.cuda()))
    assert torch.equal(found.row_D6.cpu(), expected.row_D6)
    assert torch.equal(found.image_D.cpu(), expected.image_D)


def test_half_precision_is_rounded_as_on_the_host():
    prediction = draw(4, 500, 10, seed=1).half()
    config = NmsConfig(**VALIDATION)
    found = non_max_suppression(prediction.cuda(), config)
    assert torch.equal(found.row_D6.cpu(), non_max_suppression(prediction, config).row_D6)


def test_memory_does_not_grow_with_the_square_of_thirty_thousand_candidates_per_image():
    prediction = draw(8, 3000, 80, seed=2).cuda()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = non_max_suppression(prediction, NmsConfig(**VALIDATION))
    assert len(found.row_D6) == 8 * 300
    assert torch.cuda.max_memory_allocated() - before < 6 * prediction.nbytes


def test_matching_and_confusion_do_not_depend_on_the_device():
    prediction = draw(4, 300, 6, seed=3)
    image, class_id = torch.arange(4).repeat_interleave(9)[:, None].float(), torch.arange(36)[:, None] % 6
    target = torch.cat((image, class_id, prediction[:, :9, :4].reshape(-1, 4) / 640), 1)
    results = []
    for device in ("cpu", "cuda"):
        evaluator = Evaluator(6, confusion=True)
        letterbox = Letterbox.centred((640, 640), [(480, 640)] * 4, device)
        found = non_max_suppression(prediction.to(device), NmsConfig(**VALIDATION))
        evaluator.update(found, target.to(device), letterbox, (640, 640))
        results.append((evaluator.matches(), evaluator.result()))
    (matches, host), (other_matches, device_result) = results
    assert torch.equal(matches.correct_DK, other_matches.correct_DK)
    assert (host.confusion == device_result.confusion).all()
    assert host.map50_95 == device_result.map50_95 > 0
