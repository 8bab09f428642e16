"""`flatout yolo convert-data`: write a data set in another label format."""

from typing import TYPE_CHECKING, Literal

from flatout.cli import parser_of, show_log, switch, value
from flatout.errors import counted

if TYPE_CHECKING:
    from flatout.yolo import ConvertedSet

FORMATS = ("yolo", "coco", "voc", "labelme", "cvat", "createml", "openimages", "huggingface")
DESCRIPTION = """\
Write a data set in another label format. Training reads all these formats directly: convert for other programs, or to
edit labels with another tool. The source is a data YAML, an annotation file or a folder, and is never changed.
"""
EPILOG = """\
examples:
  flatout yolo convert-data bolts.yaml bolts-coco --to coco                  images are copied
  flatout yolo convert-data bolts.yaml bolts-cvat --to cvat --images link    links to the images of the source
  flatout yolo convert-data cvat/annotations.xml bolts --to yolo             one annotation file becomes the train split
  flatout yolo convert-data roboflow-export bolts-labels --to voc --labels-only

files in the output folder:
  yolo        images/SPLIT, labels/SPLIT/NAME.txt
  coco        images/SPLIT, annotations/instances_SPLIT.json
  voc         JPEGImages, Annotations/NAME.xml, ImageSets/Main/SPLIT.txt; whole pixels
  labelme     SPLIT/NAME.jpg, SPLIT/NAME.json
  cvat        SPLIT/images, SPLIT/annotations.xml (CVAT for images 1.1)
  createml    SPLIT/NAME.jpg, SPLIT/_annotations.createml.json
  openimages  SPLIT/NAME.jpg, SPLIT/SPLIT-annotations-bbox.csv, class-descriptions-boxable.csv
  huggingface SPLIT/NAME.jpg, SPLIT/metadata.jsonl (load_dataset("imagefolder", data_dir=...))
  and data.yaml, to train on, written last; convert.json has the settings

Labels that training could not use are left out and counted. Polygons stay polygons in yolo, coco, labelme and cvat, and
become boxes in the others. If the command was interrupted, or the source has changed, run it again: it makes only what
is missing.

Exit codes: 0 done, 2 wrong arguments or a folder with other files, 3 unusable data, 5 not enough disk space, 75
interrupted.
"""
FLAGS = (
    value("data", "data YAML, annotation file or folder to read", metavar="DATA"),
    value("out", "output folder: a new one, or one to complete", metavar="OUT"),
    value("--to", "label format to write", choices=FORMATS, required=True),
    value(
        "--images",
        "copy the images, or make links to them, which need no space (default: %(default)s)",
        default="copy",
        choices=("copy", "link"),
    ),
    switch("--labels-only", "write only labels and classes.txt, and no data YAML"),
)


def main(argv: list[str]) -> int:
    """Convert a data set; returns the exit code."""
    args = parser_of("flatout yolo convert-data", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    # Imported late, so that help and usage errors do not wait for NumPy.
    from flatout.yolo import convert_data

    show_log()
    images: Literal["copy", "link", "none"] = "none" if args.labels_only else args.images
    done = convert_data(args.data, args.out, to=args.to, images=images, progress=True)
    print(as_text(done))
    return 0


def as_text(done: "ConvertedSet") -> str:
    """One line about where the new data set is and what is in it."""
    kept = f" ({done.num_kept:,} already there)" if done.num_kept else ""
    left_out = f", {counted(done.num_left_out, 'image')} left out" if done.num_left_out else ""
    dropped = f", {counted(done.num_dropped, 'label')} left out" if done.num_dropped else ""
    contents = f"{counted(done.num_images, 'image')}{kept}, {counted(done.num_labels, 'label')}"
    return f"{done.data or done.folder}: {contents}{left_out}{dropped}"
