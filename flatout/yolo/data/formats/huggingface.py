"""Hugging Face data sets on this disk: a folder of images with metadata.jsonl or .csv, parquet files, saved folders.

    {"file_name": "0001.png", "objects": {"bbox": [[x, y, width, height]], "categories": [0]}}

Boxes are in pixels. Parquet files and folders of `save_to_disk` contain the images themselves, which training reads as
files: they are written to the cache folder once. pyarrow reads both kinds, so `datasets` does not have to be installed,
and nothing is downloaded.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from flatout.errors import ConfigError, DataError, ResourceError
from flatout.feed import default_folder as store_folder
from flatout.yolo.data.find import is_image_name
from flatout.yolo.data.formats.annotated import (
    AnnotatedImage,
    AnnotationFile,
    ImageToWrite,
    Objects,
    csv_rows,
    invalid_json,
    numbers,
    opened,
    px,
)

CLASS_KEYS = ("category", "categories", "label", "labels", "category_id", "class", "classes", "name", "names")
"""Keys under which data sets have the classes of their objects."""
MAX_LINE = 64 << 20
ROWS = 64
"""Rows of a parquet file that are in memory at a time."""


def read_metadata(path: str) -> AnnotationFile:
    """Read metadata.jsonl or metadata.csv beside the images of a folder."""
    records = _csv_records(path) if path.lower().endswith(".csv") else _json_lines(path)
    images = []
    for record, line in records:
        name = record.get("file_name")
        if not isinstance(name, str) or not name:
            raise DataError(f"{path}:{line}: a record without file_name. Is it the right file?")
        images.append(AnnotatedImage(name, _objects(record.get("objects"), (), line)))
    return AnnotationFile(images)


def _json_lines(path: str) -> Iterator[tuple[dict[str, Any], int]]:
    line = 0
    try:
        with opened(path) as content, TextIOWrapper(content, "utf-8-sig") as file:
            while text := file.readline(MAX_LINE):
                line += 1
                if not text.strip():
                    continue
                record = json.loads(text)
                if not isinstance(record, dict):
                    raise DataError(f"{path}:{line}: not a record. Is it the right file?")
                yield record, line
    except UnicodeDecodeError:
        raise DataError(f"{path}:{line + 1}: not UTF-8 text. Export it again.") from None
    except (json.JSONDecodeError, RecursionError) as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "too deeply nested"
        raise DataError(f"{path}:{line}: not valid JSON: {reason}. Export it again.") from None


def _csv_records(path: str) -> Iterator[tuple[dict[str, Any], int]]:
    """The rows of metadata.csv; its column `objects` is JSON."""
    rows = csv_rows(path)
    header, _ = next(rows, ([], 0))
    for row, line in rows:
        record: dict[str, Any] = dict(zip(header, row, strict=False))
        try:
            record["objects"] = json.loads(record.get("objects") or "null")
        except (ValueError, RecursionError) as error:
            raise invalid_json(path, error, line) from None
        yield record, line


def _objects(listed: Any, names: tuple[str, ...], line: int) -> Objects:
    """The objects of a record: a dict of lists, or a list of dicts; `names` translates class numbers."""
    objects = Objects()
    if isinstance(listed, list):
        keys = {key for each in listed if isinstance(each, dict) for key in each}
        listed = {key: [each.get(key) if isinstance(each, dict) else None for each in listed] for key in keys}
    if not isinstance(listed, dict):
        return objects
    boxes = listed.get("bbox", listed.get("bboxes", listed.get("boxes")))
    classes = next((listed[key] for key in CLASS_KEYS if isinstance(listed.get(key), list)), None)
    if not isinstance(boxes, list) or not isinstance(classes, list) or len(boxes) != len(classes):
        if boxes:
            objects.report("label-columns", "objects do not have as many classes as boxes", line=line)
        return objects
    for place, (box, kind) in enumerate(zip(boxes, classes, strict=True), 1):
        try:
            x, y, width, height = numbers(box)
            if not isinstance(kind, int | str) or isinstance(kind, bool):
                raise ValueError
        except (TypeError, ValueError):
            text = f"object {place}: bbox does not consist of four numbers, or its class is no name or number"
            objects.report("label-columns", text, line=line)
            continue
        name = names[kind] if isinstance(kind, int) and 0 <= kind < len(names) else kind
        objects.add(name, (x, y, x + width, y + height), line=line)
    return objects


def write_metadata(images: Sequence[ImageToWrite], names: Sequence[str]) -> Iterator[str]:
    """The metadata.jsonl of a split, piece by piece; classes are written by name."""
    for image in images:
        boxes = [[px(x1), px(y1), px(x2 - x1), px(y2 - y1)] for x1, y1, x2, y2 in image.corners_px().tolist()]
        objects = {"bbox": boxes, "category": [names[number] for number in image.class_n]}
        yield json.dumps({"file_name": image.name, "objects": objects}, ensure_ascii=False) + "\n"


# Parquet files and folders of `save_to_disk`, which contain the images


def read_parquet(path: str) -> AnnotationFile:
    """Read a .parquet or .arrow file. Its images are written to the cache folder, unless they are there."""
    with opened(path):  # one that cannot be read is refused like any other
        table = _open_table(path)
    schema = table.schema if path.lower().endswith(".arrow") else table.schema_arrow
    names = class_names(schema.metadata)
    folder = cache_folder(path)
    if not folder.is_dir():
        _write_images(path, folder)
    records = (record for batch in _batches(path, without_images=True) for record in batch)
    images = [
        AnnotatedImage(str(folder / file), _objects(record.get("objects", record), names, 0))
        for file, record in zip(sorted(os.listdir(folder)), records, strict=True)
    ]
    return AnnotationFile(images, names)


def class_names(metadata: dict[bytes, bytes] | None) -> tuple[str, ...]:
    """The class names that `datasets` keeps in the metadata of a table; empty if there are none.

    Those of the objects, if images have a class, too.
    """
    try:
        features = json.loads((metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return ()
    # The last is looked at first.
    waiting = [features, features.get("objects") if isinstance(features, dict) else None]
    while waiting:
        feature = waiting.pop()
        if isinstance(feature, dict):
            if feature.get("_type") == "ClassLabel" and isinstance(feature.get("names"), list):
                return tuple(map(str, feature["names"]))
            waiting += feature.values()
        elif isinstance(feature, list):
            waiting += feature
    return ()


def cache_folder(path: str) -> Path:
    """Where the images of a file are written; another folder once the file has changed."""
    state = os.stat(path)
    text = repr((os.path.realpath(path), state.st_size, state.st_mtime_ns))
    name = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    return store_folder().parent / "parquet" / f"{Path(path).stem}-{name}"


def _write_images(path: str, folder: Path) -> None:
    """Write all images, under their row number and name; the folder appears only when it is complete."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder.parent).free
        if os.path.getsize(path) > free:
            raise ResourceError(
                f"{folder.parent}: the images inside {path} are unpacked there and need about "
                f"{os.path.getsize(path) / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free. Free some space, or set "
                "XDG_CACHE_HOME to a folder on another disk."
            )
        with tempfile.TemporaryDirectory(dir=folder.parent, suffix=".part") as part:
            row = 0
            for batch in _batches(path, without_images=False):
                for record in batch:
                    content, name = _image_of(record, path, row)
                    ending = os.path.splitext(name)[1] or _ending(content)
                    stem = os.path.splitext(os.path.basename(name))[0][:100]
                    Path(part, f"{row:08}{'_' if stem else ''}{stem}{ending}").write_bytes(content)
                    row += 1
            done = Path(part)
            # The temporary folder is renamed, and an empty one takes its place, to be removed at the end.
            try:
                done.rename(folder)
            except OSError:
                if not folder.is_dir():  # otherwise another process was faster
                    raise
            done.mkdir(exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"{folder}: the images of {path} cannot be written: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            "folder on a disk with free space."
        ) from None


def _image_of(record: dict[str, Any], path: str, row: int) -> tuple[bytes, str]:
    """Content and file name of the image of a row, which `datasets` saves inside the file, or only by its path."""
    image = record.get("image")
    if isinstance(image, dict) and isinstance(image.get("bytes"), bytes):
        return image["bytes"], str(image.get("path") or "")
    name = image.get("path") if isinstance(image, dict) else image
    if not isinstance(name, str) or not name:
        raise DataError(f"{path}: row {row} has no image. Save the data set with its images.")
    # A relative path starts from the folder of the file. Nothing but images is read, whatever a foreign file names.
    place = os.path.join(os.path.dirname(path), name)
    if not is_image_name(name) or not os.path.isfile(place):
        raise DataError(
            f"{path}: row {row} has only the path of its image, {name}, and there is no such file. Save the data set "
            "with its images inside."
        )
    return Path(place).read_bytes(), name


def _ending(content: bytes) -> str:
    return ".png" if content.startswith(b"\x89PNG") else ".webp" if content[8:12] == b"WEBP" else ".jpg"


def _open_table(path: str) -> Any:
    """The file, opened by pyarrow: a ParquetFile, or a stream of record batches."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ModuleNotFoundError:
        raise ConfigError(
            f"{path}: reading this file needs pyarrow, which is not installed. Run `pip install pyarrow`."
        ) from None
    try:
        if path.lower().endswith(".arrow"):
            return ipc.open_stream(pyarrow.memory_map(path))
        return parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: neither parquet nor arrow: {str(error)[:100]}. Save it again.") from None


def _batches(path: str, *, without_images: bool) -> Iterator[list[dict[str, Any]]]:
    """The rows as plain values, some at a time."""
    import pyarrow

    table = _open_table(path)
    try:
        if path.lower().endswith(".arrow"):
            for batch in table:
                wanted = [name for name in batch.schema.names if (name == "image") != without_images]
                for start in range(0, batch.num_rows, ROWS):
                    yield batch.slice(start, ROWS).select(wanted).to_pylist()
        else:
            names = table.schema_arrow.names
            wanted = [name for name in names if (name == "image") != without_images]
            for batch in table.iter_batches(batch_size=ROWS, columns=wanted):
                yield batch.to_pylist()
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: the file is damaged: {str(error)[:100]}. Save it again.") from None
