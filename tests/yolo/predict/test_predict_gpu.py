"""Detection on a CUDA device finds what it finds on the host, up to half precision."""

import numpy as np
import pytest
import torch

import flatout.yolo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("tiles", [None, 48])
def test_a_gpu_finds_the_hosts_boxes(place, tiles):
    """Half precision changes boxes and scores a little; nearly all with high scores must be found again."""
    host, device = (flatout.yolo.load(place / "a.pt", device=name) for name in ("cpu", "0"))
    found_again, expected = 0, 0
    pairs = zip(
        host.predict(place / "images", img_size=64, conf_thres=0.5, tiles=tiles),
        device.predict(place / "images", img_size=64, conf_thres=0.4, tiles=tiles),
        strict=True,
    )
    for on_host, on_device in pairs:
        assert on_host.path == on_device.path
        for box, kind in zip(on_host.boxes, on_host.classes, strict=True):
            near = np.abs(on_device.boxes - box).max(1) < 2
            found_again += bool((near & (on_device.classes == kind)).any())
            expected += 1
    assert expected > 10 and found_again >= 0.9 * expected


def test_batches_and_single_images_agree_on_a_gpu(place):
    model = flatout.yolo.load(place / "a.pt", device="0")
    alone, together = (model.predict(place / "images", img_size=64, at_once=n) for n in (1, 16))
    assert [result.path for result in alone] == [result.path for result in together]
    assert abs(sum(map(len, alone)) - sum(map(len, together))) <= 0.1 * sum(map(len, alone))
