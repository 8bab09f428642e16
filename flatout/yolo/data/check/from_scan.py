"""Checks that the scan makes on its way through pictures and label lines."""

from flatout.yolo.data.check.facts import Check, add

for _check in (
    Check(
        "image-unreadable",
        "error",
        "pictures that cannot be opened: permissions, links to nowhere, folders or pipes named like pictures",
        "correct the permissions or take them out of the data set",
    ),
    Check("image-empty", "error", "files of 0 bytes", "copy them again from where they came"),
    Check(
        "image-format",
        "error",
        "files whose content is no picture, whatever their name says",
        "remove them; a web page saved as .jpg is a failed download",
    ),
    Check(
        "image-unsupported",
        "error",
        "pictures of a format that is not trained on (GIF, AVIF, HEIC, ...)",
        "convert them to JPEG or PNG",
    ),
    Check(
        "image-corrupt",
        "error",
        "damaged pictures: a broken header, wrong checksums, pixels that do not decode",
        "copy them again, or remove them; training leaves them out",
    ),
    Check(
        "image-truncated",
        "error",
        "pictures that are cut off: more than 1 % of the rows are missing",
        "copy them again; training leaves them out",
    ),
    Check(
        "image-no-end", "note", "JPEG files without their end marker, all rows present", "nothing to do; they are used"
    ),
    Check("image-too-small", "error", "pictures with a side below 10 px", "remove them; training leaves them out"),
    Check(
        "image-huge",
        "error",
        "pictures of more than 100 million pixels",
        "cut them into tiles; a picture this size takes gigabytes to decode",
    ),
    Check(
        "image-extension",
        "warning",
        "files whose ending does not fit their content (a PNG named .jpg)",
        "rename them; flatout reads them, other tools may not",
    ),
    Check(
        "image-bytes-after-end",
        "note",
        "files with more bytes after the end of the picture",
        "nothing to do; often a second picture of a phone",
    ),
    Check(
        "exif-rotated",
        "note",
        "pictures that EXIF turns by 90, 180 or 270 degrees",
        "make sure that the labels were drawn on the upright picture",
    ),
    Check(
        "exif-mirrored",
        "warning",
        "pictures that EXIF mirrors, which cameras never do",
        "look at them; labels often belong to the picture before mirroring",
    ),
    Check("image-16-bit", "note", "pictures of more than 8 bits per channel", "nothing to do; 8 bits are used"),
    Check(
        "image-cmyk",
        "warning",
        "JPEG files in CMYK colours",
        "convert them to RGB; colours differ from program to program",
    ),
    Check(
        "image-alpha", "note", "pictures with transparency", "look at them; what is transparent gets its hidden colour"
    ),
    Check("image-pages", "note", "files of several pages or frames", "split them if the others matter"),
    Check(
        "label-unreadable",
        "error",
        "label files that cannot be read",
        "correct the permissions; the picture counts as background",
    ),
    Check(
        "label-too-many",
        "error",
        "more than 10,000 labels in one picture",
        "cut the picture into tiles, or take it out; none of its labels is read",
        stops=True,
    ),
    Check(
        "label-encoding",
        "error",
        "label files that are no UTF-8 text, or no valid XML",
        "save them as UTF-8, or export them again",
    ),
    Check("label-bom", "note", "label files that begin with a byte order mark", "save them as UTF-8 without BOM"),
    Check(
        "label-columns",
        "error",
        "lines with a wrong number of columns",
        'write "class cx cy w h", or "class x1 y1 x2 y2 x3 y3 ..." for a polygon',
    ),
    Check("label-not-a-number", "error", "lines with text where a number should be", "write class numbers, not names"),
    Check("label-separator", "error", "lines separated by commas or semicolons", "separate by spaces"),
    Check("label-nan", "error", "nan or inf", "correct the program that wrote them"),
    Check("label-negative", "error", "coordinates below 0", "clip boxes to the picture before writing them"),
    Check(
        "label-above-one", "error", "coordinates above 1", "divide by the width and height of the picture, then clip"
    ),
    Check(
        "label-in-pixels", "error", "coordinates far above 1: pixels", "divide by the width and height of the picture"
    ),
    Check("label-class-negative", "error", "classes below 0", "classes count from 0"),
    Check("label-class-fraction", "error", "classes that are no whole numbers", "write 1, not 1.5"),
    Check(
        "label-zero-area", "warning", "boxes and polygons without area", "remove them; nothing can be learned from them"
    ),
    Check("label-duplicate", "warning", "the same label twice in one picture", "remove one; it would count twice"),
    Check("label-blank-line", "note", "blank lines between labels", "remove them if YOLOv7 shall read them too"),
    Check("label-polygon-odd", "error", "polygons with an odd number of coordinates", "write x and y of every point"),
    Check(
        "label-polygon-outside",
        "error",
        "polygons that leave the picture by more than 1 %",
        "clip them to the picture before writing them",
    ),
    Check(
        "label-mixed",
        "note",
        "boxes and polygons in one file",
        "nothing to do; YOLOv7 itself would read the boxes as polygons of two points",
    ),
):
    add(_check)
