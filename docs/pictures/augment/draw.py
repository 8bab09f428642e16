"""Makes the figures of docs/augment.md: python docs/pictures/augment/draw.py (with the repository on the path)."""

from pathlib import Path

import cv2
import numpy as np

from flatout.yolo.augment.draw import AugmentConfig, draw_training
from flatout.yolo.augment.layout import lay_out, resized_wh
from flatout.yolo.augment.paint import Classic, compose
from flatout.yolo.augment.source import Renderer
from flatout.yolo.data.image_set import Labels

HERE, SIZE, COLUMNS = Path(__file__).parent, 128, 6
CHANGING = ("hsv_h", "hsv_s", "hsv_v", "translate", "scale", "fliplr", "mosaic", "mixup", "paste_in")
CALM = dict.fromkeys(CHANGING, 0)
SHOWN = {
    "mosaic": {"mosaic": 1, "scale": 0.3, "translate": 0.1},
    "warp": {"degrees": 15, "scale": 0.4, "shear": 8, "translate": 0.15},
    "perspective": {"perspective": 0.002},
    "colour": {"hsv_h": 0.1, "hsv_s": 0.7, "hsv_v": 0.4},
    "flip": {"fliplr": 0.5, "flipud": 0.5},
    "mixup": {"mosaic": 1, "mixup": 1},
    "copy_paste": {"mosaic": 1, "copy_paste": 0.7},
    "paste_in": {"mosaic": 1, "paste_in": 1},
}


def scene(seed: int) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """A flat landscape with a few ellipses, their boxes [n, 5] and polygons."""
    rng = np.random.default_rng(seed)
    width, height = (SIZE, int(SIZE * rng.uniform(0.6, 1)))[:: 1 if seed % 3 else -1]
    image = np.full((height, width, 3), (235, 206, 160), np.uint8)
    image[int(height * rng.uniform(0.4, 0.7)) :] = (80, 170, 120)
    boxes, polygons = [], []
    for _ in range(int(rng.integers(2, 4))):
        centre, radius = rng.uniform(0.2, 0.8, 2) * (width, height), rng.uniform(8, 22, 2)
        angle, around = rng.uniform(0, np.pi), np.linspace(0, 2 * np.pi, 24, endpoint=False)
        matrix = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        points = centre + (np.stack((np.cos(around), np.sin(around)), 1) * radius) @ matrix.T
        number = int(rng.integers(0, 2))
        cv2.fillPoly(image, [points.astype(np.int32)], ((60, 60, 220), (200, 90, 60))[number])
        points = np.clip(points / (width, height), 0, 1).astype(np.float32)
        low, high = points.min(0), points.max(0)
        boxes.append([number, *((low + high) / 2), *(high - low)])
        polygons.append(points)
    return image, np.array(boxes, np.float32), polygons


def data_set(num: int) -> tuple[list[np.ndarray], Labels]:
    images, boxes, polygons = zip(*map(scene, range(num)), strict=True)
    points = [one for of_image in polygons for one in of_image]
    firsts = (np.concatenate(([0], np.cumsum([len(part) for part in parts]))) for parts in (boxes, points))
    first_N, first_point_T = firsts
    return list(images), Labels(np.concatenate(boxes), first_N, np.concatenate(points), first_point_T)


def framed(image: np.ndarray, target_n5: np.ndarray) -> np.ndarray:
    """An image with its boxes and a white margin."""
    out = np.ascontiguousarray(image)
    for number, x, y, w, h in target_n5:
        low, high = (((x - w / 2) * SIZE, (y - h / 2) * SIZE), ((x + w / 2) * SIZE, (y + h / 2) * SIZE))
        color = ((0, 0, 255), (255, 0, 0))[int(number) % 2]
        cv2.rectangle(out, tuple(map(round, low)), tuple(map(round, high)), color, 1)
    return cv2.copyMakeBorder(out, 2, 2, 2, 2, cv2.BORDER_CONSTANT, value=(255, 255, 255))


def samples(images: list[np.ndarray], labels: Labels, config: AugmentConfig) -> np.ndarray:
    """A row of samples."""
    sizes = np.array([image.shape[1::-1] for image in images])
    renderer = Renderer(images=images, size_wh_N2=sizes, labels=labels, config=config, size=SIZE, painter=Classic())
    index = np.arange(COLUMNS)
    draws = draw_training(
        config, num_images=len(images), size=SIZE, seed=4, epoch=0, positions_M=index, indices_M=index
    )
    out = np.empty((COLUMNS, 3, SIZE, SIZE), np.uint8)
    targets_T6, count_M = renderer.render(draws, out)
    targets = np.split(targets_T6[:, 1:], np.cumsum(count_M)[:-1])
    return np.hstack([framed(one[::-1].transpose(1, 2, 0), rows) for one, rows in zip(out, targets, strict=True)])


def canvases(images: list[np.ndarray]) -> np.ndarray:
    """A canvas of four and one of nine, before the warp; the white square is what a warp without change shows."""
    sizes = np.array([image.shape[1::-1] for image in images])
    draws = draw_training(
        AugmentConfig(paste_in=0), num_images=len(images), size=SIZE, seed=0, epoch=0,
        positions_M=np.arange(40), indices_M=np.arange(40) % len(images),
    )  # fmt: skip
    shown = []
    for kind in (4, 9):
        row = int(np.flatnonzero(draws["kind"][:, 0] == kind)[0])
        one = {name: array[row : row + 1] for name, array in draws.items()}
        laid_out = lay_out(one, resized_wh(sizes, SIZE), size=SIZE, out_wh=(SIZE, SIZE))
        tiles = [images[number] for number in laid_out.image_Q9[0, :kind]]
        canvas = compose(tiles, laid_out.origin_Q92[0, :kind], (2 * SIZE, 2 * SIZE))
        cv2.rectangle(canvas, (SIZE // 2,) * 2, (3 * SIZE // 2,) * 2, (255, 255, 255), 1)
        shown.append(cv2.copyMakeBorder(canvas, 2, 2, 2, 2, cv2.BORDER_CONSTANT, value=(255, 255, 255)))
    return np.hstack(shown)


def main() -> None:
    images, labels = data_set(12)
    cv2.imwrite(str(HERE / "canvases.png"), canvases(images), [cv2.IMWRITE_PNG_COMPRESSION, 9])
    for name, changed in SHOWN.items():
        figure = samples(images, labels, AugmentConfig(**CALM | changed))
        cv2.imwrite(str(HERE / f"{name}.png"), figure, [cv2.IMWRITE_PNG_COMPRESSION, 9])


if __name__ == "__main__":
    main()
