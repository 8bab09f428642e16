"""COCO: one JSON file with all images, boxes and polygons, in pixels. `flatout.yolo.data.coco` reads such files."""

import json
from collections.abc import Iterator, Sequence

from flatout.yolo.data.formats.annotated import ImageToWrite, px


def write_coco(images: Sequence[ImageToWrite], names: Sequence[str]) -> Iterator[str]:
    """The file of a split, piece by piece. Ids of images, annotations and categories count from 1."""
    yield '{"info": {}, "licenses": [],\n"categories": '
    yield json.dumps([{"id": number, "name": name, "supercategory": ""} for number, name in enumerate(names, 1)])
    yield ',\n"images": ['
    for number, image in enumerate(images, 1):
        width, height = image.size_wh
        record = {"id": number, "file_name": image.name, "width": width, "height": height}
        yield f"{',' if number > 1 else ''}\n{json.dumps(record)}"
    yield '\n],\n"annotations": ['
    count = 0
    for number, image in enumerate(images, 1):
        for place, (class_number, corners) in enumerate(zip(image.class_n, image.corners_px().tolist(), strict=True)):
            count += 1
            x1, y1, x2, y2 = corners
            points = image.points_px(place)
            record = {
                "id": count,
                "image_id": number,
                "category_id": class_number + 1,
                "bbox": [px(x1), px(y1), px(x2 - x1), px(y2 - y1)],
                "area": px(_area(points) if points else (x2 - x1) * (y2 - y1)),
                "iscrowd": 0,
                "segmentation": [[value for point in points for value in point]] if points else [],
            }
            yield f"{',' if count > 1 else ''}\n{json.dumps(record)}"
    yield "\n]}\n"


def _area(points: Sequence[Sequence[float]]) -> float:
    """Area of a polygon."""
    following = [*points[1:], points[0]]
    return abs(sum(x * y2 - x2 * y for (x, y), (x2, y2) in zip(points, following, strict=True))) / 2
