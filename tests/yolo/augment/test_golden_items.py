"""Pasting, and whole items replayed from recorded draws, give the golden images and labels."""

from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest

from flatout.feed import Feed, FeedConfig, Plan
from flatout.yolo.augment.draw import FOUR_SHARE, AugmentConfig
from flatout.yolo.augment.labels import CanvasLabels
from flatout.yolo.augment.paint import CutOut, cut_out, paste_copies, paste_in
from flatout.yolo.augment.paste import MAX_SIDES, SKIP_PROBABILITY, choose_copies
from flatout.yolo.augment.source import ValidationSource
from flatout.yolo.data.image_set import offsets
from flatout.yolo.data.letterbox import resize_long_side
from tests.golden_cases import golden_cases
from tests.yolo.augment.scenes import image_set_of, labels_of, one_draw, renderer_of
from tests.yolo.augment.test_golden_warp import PAINTERS, cases_of, numbered, variants
from tests.yolo.pattern import near_opencv, pattern

Draw = tuple[str, list[Any], Any]


def as_uniform(draw: Draw) -> float:
    """A uniform number from which the code under test computes the recorded one."""
    kind, arguments, value = draw
    if kind == "random":
        return float(value)
    assert kind == "randint"
    low, high = arguments
    return (value - low + 0.5) / (high - low + 1)


def attempts(draws: Iterator[Draw]) -> tuple[np.ndarray, Iterator[Draw]]:
    """The numbers of 20 attempts to paste, and the draws after them; unused numbers of an attempt were not recorded."""
    tries_K6 = np.zeros((len(MAX_SIDES), 6))
    for numbers in tries_K6:
        numbers[0] = as_uniform(next(draws))
        if numbers[0] >= SKIP_PROBABILITY:
            numbers[1:5] = [as_uniform(next(draws)) for _ in range(4)]
        ahead = list(islice(draws, 1))
        if ahead and ahead[0][0] == "randint":
            numbers[5] = as_uniform(ahead.pop())
        draws = chain(ahead, draws)
    return tries_K6, draws


@pytest.mark.parametrize("case", golden_cases("yolov7-data/paste.npz", cases_of))
def test_objects_are_copied_cut_out_and_pasted_as_in_the_golden(case):
    number, record, _, arrays = case
    known = {"image", "zero_block_yxyx", "paste_base", "probability", "order", "n", "sample_labels", "n_new"}
    assert set(record) <= known | {"pastein_draws"}
    canvas = pattern(*record["image"])
    y1, x1, y2, x2 = record["zero_block_yxyx"]
    canvas[y1:y2, x1:x2] = 0
    label_T5, polygons = arrays[f"cp_t{number}"], numbered(arrays, f"cp_s{number}_")
    labels = CanvasLabels(
        np.zeros(len(label_T5), np.int64),
        label_T5[:, 0],
        label_T5[:, 1:],
        np.concatenate(polygons),
        offsets(np.array([len(points) for points in polygons])),
    )
    order = np.array(record["order"])
    assert len(order) == round(record["probability"] * record["n"])
    size_12, key_1 = np.array([canvas.shape[1::-1]]), np.zeros(1, np.uint64)
    extended, (copied,) = choose_copies(labels, size_12, key_1, record["probability"], lambda key, n, count: order)
    assert len(copied) == record["n_new"]
    if f"cp_tout{number}" in arrays:
        found_T5 = np.concatenate((extended.class_T[:, None], extended.box_T4), 1)
        np.testing.assert_array_equal(found_T5, arrays[f"cp_tout{number}"])
    for new, expected in enumerate(numbered(arrays, f"cp_snew{number}_")):
        np.testing.assert_array_equal(extended.polygon(len(label_T5) + new), expected)
    pasted = canvas.copy()
    paste_copies(pasted, [labels.polygon(label) for label in copied])
    near_opencv(pasted, variants(arrays, f"cp_out{number}"))

    expected_cuts = numbered(arrays, f"ss_img{number}_")
    cuts = cut_out(canvas, label_T5[order, 0], label_T5[order, 1:], [polygons[label] for label in order])
    assert [cut.class_number for cut in cuts] == record["sample_labels"]
    for cut, expected in zip(cuts, expected_cuts, strict=True):
        np.testing.assert_array_equal(cut.image, expected)

    if f"pi_t{number}" in arrays:
        image = pattern(*record["paste_base"])
        tries_K6, rest = attempts(iter(record["pastein_draws"]))
        assert next(rest, None) is None
        found_T5 = paste_in(image, arrays[f"pi_t{number}"], cuts, tries_K6)
        near_opencv(image, variants(arrays, f"pi_out{number}"))
        if f"pi_tout{number}" in arrays:
            np.testing.assert_array_equal(found_T5, arrays[f"pi_tout{number}"])


class Replay:
    """The recorded draws of one item, converted to the draws of `draw_training`."""

    def __init__(self, record: dict[str, Any], num_images: int) -> None:
        self._record = record
        self._stream: Iterator[Draw] = iter(record["draws"])
        self._config = AugmentConfig(**record["hyp"])
        self._num_images = num_images
        self._picked: list[np.ndarray] = []
        self.draws = self._read()

    def pick(self, key: int, num_things: int, count: int) -> np.ndarray:
        picked = self._picked[int(key)]
        assert len(picked) == count
        return picked

    def _read(self) -> dict[str, np.ndarray]:
        config = self._config
        is_mosaic = self._next("random") < config.mosaic
        canvases: list[dict[str, Any]] = []
        mix = 1.0
        if is_mosaic:
            canvases.append(self._mosaic(self._next("random"), self._record["index"]))
            if self._next("random") < config.mixup:
                coin = self._next("random")
                canvases.append(self._mosaic(coin, self._next("randint")))
                mix = self._next("np.beta")
        else:
            canvases.append({"tiles": [self._record["index"]], "warp": self._warp()})
        hsv = 1 + np.array(self._next("np.uniform")) * (config.hsv_h, config.hsv_s, config.hsv_v)
        more: dict[str, Any] = {"mix": mix, "hsv": hsv}
        if self._next("random") < config.paste_in:
            more |= self._paste()
        flip = [self._next("random") < config.flipud, self._next("random") < config.fliplr]
        assert next(self._stream, None) is None
        return one_draw(canvases, flip=np.array(flip), **more)

    def _mosaic(self, coin: float, first: int) -> dict[str, Any]:
        if coin < FOUR_SHARE:
            y, x = self._next("uniform"), self._next("uniform")
            partners = self._next("choices")
        else:
            partners = self._next("choices")
            y, x = self._next("uniform"), self._next("uniform")
        canvas = {"tiles": [first, *partners], "centre": (x, y), "key": self._sample()}
        return canvas | {"warp": self._warp()}

    def _warp(self) -> list[float]:
        return [self._next("uniform") for _ in range(8)]

    def _paste(self) -> dict[str, Any]:
        tiles, centres, keys = [], [], []
        while (draw := self._peek())[0] == "randint":
            index = self._next("randint")
            assert draw[1] == [0, self._num_images - 1]
            y, x = self._next("uniform"), self._next("uniform")
            tiles.append([index, *self._next("choices")])
            centres.append((x, y))
            keys.append(self._sample())
        tries_K6, self._stream = attempts(self._stream)
        return {
            "paste": True,
            "paste_tiles": np.array(tiles),
            "paste_centre": np.array(centres),
            "paste_key": np.array(keys, np.uint64),
            "paste_tries": tries_K6,
        }

    def _sample(self) -> int:
        """The key of a recorded choice without replacement in `pick`; a key that is never used if none was recorded."""
        if self._peek()[0] == "sample":
            self._picked.append(np.array(self._next("sample"), np.int64))
            return len(self._picked) - 1
        return 2**32

    def _peek(self) -> Draw:
        draw = next(self._stream)
        self._stream = chain([draw], self._stream)
        return draw

    def _next(self, kind: str) -> Any:
        found, _, value = next(self._stream)
        assert found == kind
        return value


def set_of(record: dict[str, Any], meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> tuple[Any, Any]:
    images = [pattern(*arguments) for arguments in meta["images"]]
    boxes = [arrays[f"labels{i}"] for i in range(len(images))]
    polygons = [numbered(arrays, f"seg{i}_") for i in range(len(images))] if record["use_segments"] else None
    return images, labels_of(boxes, polygons)


def assert_item(image_CHW: np.ndarray, target_T5: np.ndarray, record: dict[str, Any], arrays: Any) -> None:
    near_opencv(image_CHW, variants(arrays, f"img_{record['key']}"))
    assert len(target_T5) == record["n_labels"]
    if f"lab_{record['key']}" in arrays:
        np.testing.assert_allclose(target_T5, arrays[f"lab_{record['key']}"][:, 1:], rtol=0, atol=1e-5)


KNOWN = {"name", "key", "index", "use_segments", "augment", "hyp", "draws", "shapes", "n_labels"}


@pytest.mark.parametrize("painter", PAINTERS)
@pytest.mark.parametrize("case", golden_cases("yolov7-data/pipeline.npz", cases_of))
def test_a_whole_item_is_replayed_to_the_golden_one(case, painter):
    _, record, meta, arrays = case
    assert set(meta) <= {"img_size", "images", "n_seg", "cases"}
    assert set(record) <= KNOWN
    images, labels = set_of(record, meta, arrays)
    size = meta["img_size"]
    if not record["augment"]:
        check_validation(record, images, labels, size, arrays)
        return
    replay = Replay(record, len(images))
    renderer = renderer_of(
        images, labels, AugmentConfig(**record["hyp"]), size=size, painter=painter(), pick=replay.pick
    )
    out_1CHW = np.empty((1, 3, size, size), np.uint8)
    target_T6, *_ = renderer.render(replay.draws, out_1CHW)
    assert_item(out_1CHW[0], target_T6[:, 1:], record, arrays)


def check_validation(record: dict[str, Any], images: list[np.ndarray], labels: Any, size: int, arrays: Any) -> None:
    resized = [resize_long_side(image, size, augment=False).image for image in images]
    source = ValidationSource(image_set_of(images, labels), resized, size=size)
    plan = Plan(num_samples=len(images), batch_size=1, order=np.array([record["index"]]))
    with Feed(source, plan, FeedConfig(workers=0)) as feed:
        batch = next(iter(feed)).copy()
    assert_item(batch["images"][0], batch["targets"][:, 1:], record, arrays)
    (h0, w0), ((ratio_h, ratio_w), pad) = record["shapes"]
    np.testing.assert_array_equal(batch["shapes"][0], [h0, w0, ratio_h, ratio_w, *pad])


def test_a_cut_out_keeps_black_objects_visible():
    canvas = np.zeros((30, 30, 3), np.uint8)
    square = np.array([[5, 5], [20, 5], [20, 20], [5, 20]], np.float32)
    (cut,) = cut_out(canvas, np.array([3.0]), np.array([[5, 5, 20, 20]], np.float32), [square])
    assert isinstance(cut, CutOut) and cut.class_number == 3
    assert (cut.image == 255).all()
