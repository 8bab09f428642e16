"""Write the files of this folder with the programs whose formats they are: python -m tests.yolo.data.format_files.write

Needs labelme, supervision and datumaro (README.md has the versions); the tests read the files without them.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.yolo.data.drawn_set import jpeg

FOLDER = Path(__file__).parent
NAMES = ("bolt", "nut")
SIZES = {"a": (64, 48), "b": (50, 80), "c": (64, 48)}
"""Image -> width and height in pixels."""
BOXES = {"a": [(0, 10.0, 6.0, 42.0, 30.0), (1, 0.0, 0.0, 64.0, 48.0)], "b": [(1, 5.0, 12.0, 25.0, 72.0)], "c": []}
"""Image -> boxes: class, left, top, right, bottom in pixels."""


def write_images(folder: Path) -> None:
    """The images of all files: a.jpg, b.jpg and c.jpg."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (stem, (width, height)) in enumerate(SIZES.items()):
        (folder / f"{stem}.jpg").write_bytes(jpeg(width, height, seed))


def by_labelme(folder: Path) -> None:
    """One .json per image, and shapes.json with one shape of each type."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    from labelme import LabelFile

    def shape(label, points, kind):
        return {
            "label": label, "points": [list(map(float, point)) for point in points], "group_id": None,
            "description": "", "shape_type": kind, "flags": {}, "mask": None,
        }  # fmt: skip

    def save(stem: str, shapes) -> None:
        width, height = SIZES.get(stem, (64, 48))
        LabelFile().save(
            filename=str(folder / f"{stem}.json"), shapes=shapes, image_path=f"{stem}.jpg", image_height=height,
            image_width=width,
        )  # fmt: skip

    folder.mkdir(parents=True, exist_ok=True)
    for stem, boxes in BOXES.items():
        save(stem, [shape(NAMES[kind], [(x1, y1), (x2, y2)], "rectangle") for kind, x1, y1, x2, y2 in boxes])
    save(
        "shapes",
        [
            shape("bolt", [(10, 6), (42, 6), (30, 30)], "polygon"),
            shape("nut", [(20, 20), (25, 20)], "circle"),
            shape("bolt", [(4, 9), (9, 4), (30, 25), (25, 30)], "oriented_rectangle"),
            shape("nut", [(5, 5), (40, 40)], "line"),
            shape("nut", [(5, 5)], "point"),
        ],
    )


def by_supervision(folder: Path) -> None:
    """COCO, CreateML, labelme, Pascal VOC and YOLO."""
    import supervision

    with tempfile.TemporaryDirectory() as scratch:
        write_images(Path(scratch))
        paths = [str(Path(scratch) / f"{stem}.jpg") for stem in BOXES]
        found = {
            path: supervision.Detections(
                xyxy=np.array([box[1:] for box in boxes], float).reshape(-1, 4),
                class_id=np.array([box[0] for box in boxes], int),
            )
            for path, boxes in zip(paths, BOXES.values(), strict=True)
        }
        data = supervision.DetectionDataset(classes=list(NAMES), images=paths, annotations=found)
        data.as_coco(annotations_path=str(folder / "coco/annotations.json"))
        data.as_createml(annotations_path=str(folder / "createml/annotations.json"))
        data.as_labelme(annotations_directory_path=str(folder / "labelme"))
        data.as_pascal_voc(annotations_directory_path=str(folder / "voc"))
        data.as_yolo(annotations_directory_path=str(folder / "yolo"))


def by_datumaro(folder: Path) -> None:
    """CVAT for images, and Open Images."""
    import datumaro
    from datumaro.components.media import Image

    def item(stem: str):
        width, height = SIZES[stem]
        boxes = [
            datumaro.Bbox(x1, y1, x2 - x1, y2 - y1, label=kind, attributes={"occluded": False}, z_order=0)
            for kind, x1, y1, x2, y2 in BOXES[stem]
        ]
        pixels = np.zeros((height, width, 3), np.uint8)
        return datumaro.DatasetItem(id=stem, subset="train", media=Image.from_numpy(pixels), annotations=boxes)

    data = datumaro.Dataset.from_iterable([item(stem) for stem in BOXES], categories=list(NAMES))
    with tempfile.TemporaryDirectory() as scratch:
        for kind in ("cvat", "open_images"):
            data.export(f"{scratch}/{kind}", kind, save_media=False)
            for file in sorted(Path(scratch, kind).rglob("*")):
                if file.suffix in (".xml", ".csv"):
                    place = folder / kind / file.relative_to(Path(scratch, kind))
                    place.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(file, place)


WRITERS = {"labelme": by_labelme, "supervision": by_supervision, "datumaro": by_datumaro}

if __name__ == "__main__":
    for name in sys.argv[1:] or WRITERS:
        WRITERS[name](FOLDER / name)
