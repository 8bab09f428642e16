"""Makes the figures of the README from the results of `./run demo` in runs/demo: python docs/pictures/demo/draw.py

found.jpg: the first images of the validation set with the network's detections; none were selected.
photographs.jpg: the detections of the shipped weights in the six photographs (data/photographs/ATTRIBUTION.md).
"""

from pathlib import Path

import cv2
import numpy as np
import torch

from flatout.charts.boxes import plot_boxes
from flatout.images import read_image
from flatout.yolo.data.letterbox import fit, letterbox
from flatout.yolo.load_network import load_network
from flatout.yolo.nms import NmsConfig, non_max_suppression

HERE, RUN = Path(__file__).parent, Path("runs/demo")
INPUT_HW = (128, 160)
COLUMNS, ROWS, GAP_PX = 4, 2, 6
PHOTOGRAPHS = (("bus", "desk", "cat"), ("baseball", "fruit", "motorcycle"))
WIDTH_PX = 1000
NMS = NmsConfig(conf_thres=0.3, iou_thres=0.45)


def detections_in(network: torch.nn.Module, image: np.ndarray) -> np.ndarray:
    """Detections in an image: boxes in its pixels, scores and classes, [n, 6]."""
    box = fit(image.shape[:2], INPUT_HW)
    pixels = letterbox(image, box)[..., ::-1].transpose(2, 0, 1)
    with torch.no_grad():
        predictions = network(torch.from_numpy(pixels.copy())[None].float() / 255)
    rows_n6 = non_max_suppression(predictions.decoded, NMS).row_D6.numpy()
    rows_n6[:, :4] = (rows_n6[:, :4] - np.tile(box.pad_wh, 2)) / np.tile(box.ratio_wh, 2)
    return rows_n6


def row_of(images: list[np.ndarray]) -> np.ndarray:
    """Images side by side, at the one height that makes the row WIDTH_PX wide."""
    images_px = WIDTH_PX - GAP_PX * (len(images) - 1)
    height_px = images_px / sum(image.shape[1] / image.shape[0] for image in images)
    edges = np.cumsum([0.0, *(height_px * image.shape[1] / image.shape[0] for image in images)]).round().astype(int)
    row = np.full((round(height_px), WIDTH_PX, 3), 255, np.uint8)
    for number, image in enumerate(images):
        begin, end = edges[number : number + 2] + number * GAP_PX
        row[:, begin:end] = cv2.resize(image, (int(end - begin), len(row)), interpolation=cv2.INTER_AREA)
    return row


def main() -> None:
    rows = [row_of([cv2.imread(str(RUN / f"photographs/{name}.jpg")) for name in names]) for names in PHOTOGRAPHS]
    gap = np.full((GAP_PX, WIDTH_PX, 3), 255, np.uint8)
    figure = np.vstack([rows[0], gap, rows[1]])
    cv2.imwrite(str(HERE / "photographs.jpg"), figure, [cv2.IMWRITE_JPEG_QUALITY, 88])
    network, weights = load_network(RUN / "train/weights/last.pt")
    tiles = []
    for number in range(COLUMNS * ROWS):
        image = read_image(str(RUN / f"data/images/val/{number:04}.jpg"))
        rows_n6 = detections_in(network, image)
        plot_boxes(image, rows_n6[:, :4], rows_n6[:, 5], weights.names, score_n=rows_n6[:, 4], letters_px=8)
        tiles.append(cv2.copyMakeBorder(image, 0, GAP_PX, 0, GAP_PX, cv2.BORDER_CONSTANT, value=(255, 255, 255)))
    lines = [cv2.hconcat(tiles[row * COLUMNS : (row + 1) * COLUMNS]) for row in range(ROWS)]
    figure = cv2.vconcat(lines)[:-GAP_PX, :-GAP_PX]
    cv2.imwrite(str(HERE / "found.jpg"), figure, [cv2.IMWRITE_JPEG_QUALITY, 88])


if __name__ == "__main__":
    main()
