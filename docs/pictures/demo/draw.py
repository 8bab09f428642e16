"""Draws the picture of the README from what `./run demo` left in runs/demo: python docs/pictures/demo/draw.py

The first pictures of the validation set, and what the network finds in them: nothing is chosen.
"""

from pathlib import Path

import cv2
import numpy as np
import torch

from flatout.images import read_picture
from flatout.yolo.data.letterbox import fit, letterbox
from flatout.yolo.loading import load_network
from flatout.yolo.nms import NmsConfig, non_max_suppression
from flatout.yolo.pictures.boxes import draw_boxes

HERE, RUN = Path(__file__).parent, Path("runs/demo")
INPUT_HW = (128, 160)
COLUMNS, ROWS, GAP_PX = 4, 2, 6
NMS = NmsConfig(conf_thres=0.3, iou_thres=0.45)


def found_in(network: torch.nn.Module, image: np.ndarray) -> np.ndarray:
    """Boxes in pixels of the picture, scores and classes: [n, 6]."""
    box = fit(image.shape[:2], INPUT_HW)
    pixels = letterbox(image, box)[..., ::-1].transpose(2, 0, 1)
    with torch.no_grad():
        predictions = network(torch.from_numpy(pixels.copy())[None].float() / 255)
    rows_n6 = non_max_suppression(predictions.decoded, NMS).row_D6.numpy()
    rows_n6[:, :4] = (rows_n6[:, :4] - np.tile(box.pad_wh, 2)) / np.tile(box.ratio_wh, 2)
    return rows_n6


def main() -> None:
    network, weights = load_network(RUN / "train/weights/last.pt")
    tiles = []
    for number in range(COLUMNS * ROWS):
        image = read_picture(str(RUN / f"data/images/val/{number:04}.jpg"))
        rows_n6 = found_in(network, image)
        draw_boxes(image, rows_n6[:, :4], rows_n6[:, 5], weights.names, score_n=rows_n6[:, 4], letters_px=8)
        tiles.append(cv2.copyMakeBorder(image, 0, GAP_PX, 0, GAP_PX, cv2.BORDER_CONSTANT, value=(255, 255, 255)))
    lines = [cv2.hconcat(tiles[row * COLUMNS : (row + 1) * COLUMNS]) for row in range(ROWS)]
    sheet = cv2.vconcat(lines)[:-GAP_PX, :-GAP_PX]
    cv2.imwrite(str(HERE / "found.jpg"), sheet, [cv2.IMWRITE_JPEG_QUALITY, 88])


if __name__ == "__main__":
    main()
