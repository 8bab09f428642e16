"""Plots apart.png for docs/grouping.md: the shipped anti-confusion heads of COCO, and which classes they keep apart.

python docs/pictures/grouping/draw.py
"""

from pathlib import Path

import cv2
import numpy as np

from flatout.yaml_strict import load_yaml
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.multihead.grouping.chart import plot_grouping
from flatout.yolo.multihead.grouping.choose import GroupingResult
from flatout.yolo.multihead.grouping.methods import known_pairs
from flatout.yolo.multihead.grouping.statistics import Grouping
from flatout.yolo.multihead.head_config import head_config_of

OUT = Path(__file__).parent / "apart.png"
HEADS = shipped_folder("data") / "coco_320_1b4h_anticonfusion.yaml"
COMMENTS = ("262465 boxes (30.5 %)", "199806 boxes (23.2 %)", "198854 boxes (23.1 %)", "198876 boxes (23.1 %)")


def main() -> None:
    content = load_yaml(HEADS)
    assert isinstance(content, dict)
    names = tuple(content["names"])
    grouping = Grouping(head_config_of(content, where=str(HEADS)), COMMENTS)
    plot_grouping(GroupingResult(grouping, names, similarity_CC=known_pairs(names).astype(np.float64)), OUT)
    # Smaller, with fewer colours and the best compression of PNG, because it is part of every checkout.
    chart = cv2.resize(cv2.imread(str(OUT)), None, fx=0.6, fy=0.6, interpolation=cv2.INTER_AREA)
    cv2.imwrite(str(OUT), chart // 8 * 8 + chart // 32, [cv2.IMWRITE_PNG_COMPRESSION, 9])


if __name__ == "__main__":
    main()
