"""`flatout yolo resize`: a copy of a data set with smaller images."""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.cli import parser_of, show_log, switch, value

if TYPE_CHECKING:
    from flatout.yolo import ResizedSet

DESCRIPTION = """\
Make a copy of a data set with smaller images. Training at 320 px on images of 640 px decodes four times the pixels that
it uses, in every epoch; the copy has to be made only once. The longer side of every image becomes --size, and the
aspect ratio stays. Smaller images are copied unchanged, and so are labels, which are relative to the image. Boxes and
masks in COCO annotation files are scaled. The source is never changed.
"""
EPILOG = """\
examples:
  flatout yolo resize coco.yaml --size 320 --out coco320           COCO at 320 px, from coco/ in this folder
  flatout yolo train --data coco320/coco320.yaml --img 320 ...     train on the copy
  flatout yolo resize bolts.yaml --size 640 --out /fast/bolts640 --quality 90
  flatout yolo resize bolts.yaml --size 256 --out bolts256 --stretch    squares; test and detect with --img 256 too

files in the output folder:
  images and labels    with their names and formats; images that EXIF rotates are stored upright
  annotations, lists   scaled COCO files; .txt lists with the images of the copy
  the data YAML        named like the folder and written last; it keeps working if the folder is moved
  resize.json          the settings, and the images that could not be read

If the command was interrupted, or images or labels were added or changed, run it again: it makes only what is missing.
Other settings need another folder.

Exit codes: 0 done, 2 wrong arguments or a folder with other files, 3 more than 1 % of the images cannot be read (fewer
are reported and left out, as in training), 5 not enough disk space, 75 interrupted.
"""
FLAGS = (
    value("data", "data YAML, or a COCO .json file", metavar="DATA.yaml"),
    value("--size", "longer side of the resized images", type=int, required=True, metavar="PX"),
    value("--out", "output folder: a new one, or one to complete", type=Path, required=True, metavar="FOLDER"),
    switch("--stretch", "make squares of PX x PX instead of keeping the aspect ratio"),
    switch("--enlarge", "also enlarge images that are smaller than PX"),
    value(
        "--quality",
        "quality of JPEG and lossy WebP, 1 to 100 (default: %(default)s)",
        type=int,
        default=95,
        metavar="Q",
    ),
    value(
        "--workers",
        "number of worker processes, or cpu*F for F times the number of CPUs (default: %(default)s)",
        default="cpu*1.0",
    ),
)


def main(argv: list[str]) -> int:
    """Resize a data set; returns the exit code."""
    args = parser_of("flatout yolo resize", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)

    # Imported late, so that help and usage errors do not wait for NumPy.
    from flatout.yolo import resize

    show_log()
    print(as_text(resize(**vars(args), progress=True)))
    return 0


def as_text(done: "ResizedSet") -> str:
    """One line about where the copy is and what was done."""
    parts = [f"{done.num_resized} resized", f"{done.num_copied} copied", f"{done.num_kept} already there"]
    left_out = f", {len(done.skipped)} left out" if done.skipped else ""
    written = f", {done.num_bytes / 1e6:.1f} MB written" if done.num_bytes else ""
    return f"{done.data}: {done.num_images} images ({', '.join(parts)}{left_out}){written}"
