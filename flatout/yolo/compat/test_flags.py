"""Every flag of an evaluation and what it does, for people who read `--help`."""

from flatout.yolo.compat.flag import switch, value

YOLOV7 = (
    value("--weights", "weights to evaluate; several files answer together, as an ensemble", nargs="+"),
    value("--data", "data YAML; one that ends in coco.yaml implies --save-json, as in YOLOv7"),
    value("--batch-size", "pictures per step", type=int),
    value("--img-size", "longer side of the pictures, rounded up to the grid", type=int, metavar="PX"),
    value("--conf-thres", "forget detections that are less certain", type=float, metavar="CONF"),
    value("--iou-thres", "of two detections that overlap more, keep the more certain one", type=float, metavar="IOU"),
    value("--task", "train, val or test: which pictures; speed: time it; study: sizes from 256 to 1536"),
    value("--device", "cpu, or the number of a GPU; '' takes the first GPU, or the CPU if there is none"),
    switch("--single-cls", "treat all classes as one"),
    switch("--augment", "detect at three scales, once mirrored, and join the results"),
    switch("--verbose", "a row for every class, however many there are"),
    switch("--save-txt", "write detections as label files"),
    switch("--save-hybrid", "write labels and detections together"),
    switch("--save-conf", "with --save-txt: write how certain each detection is"),
    switch("--save-json", "write detections as COCO JSON; COCO's AP too, if there is an annotation file"),
    value("--project", "folder of the folders of results", metavar="FOLDER"),
    value("--name", "name of the folder; a number is added if that name is taken"),
    switch("--exist-ok", "use the folder of that name even if it exists"),
    switch("--no-trace", "accepted for YOLOv7's sake: nothing is traced here"),
    switch("--v5-metric", "average precision as YOLOv5 computes it, with recall going on to 1"),
)

FORK = (value("--save-per-class-ap", "write the average precision of every class to this JSON file", metavar="FILE"),)

OURS = (
    value("--workers", "processes that read pictures, at most", type=int),
    switch("--strict-labels", "obey all label rules of YOLOv7: one bad line drops the picture"),
    switch("--allow-bad-labels", "go on although more than half of the labels cannot be used"),
    switch("--verify-cache", "compare decoded pictures in caches with their checksums"),
)

DESCRIPTION = """\
Evaluate weights: precision, recall, mAP@.5 and mAP@.5:.95, per class, with curves and a confusion matrix. Every flag of
YOLOv7's test.py is here, means the same and may be shortened as there (--img, --batch, --conf, --iou).
"""
EPILOG = """\
examples:
  %(prog)s --weights runs/train/exp/weights/best.pt --data data/coco320.yaml --img 320
  %(prog)s --weights yolov7.pt --data data/coco.yaml --img 640 --batch 32 --conf 0.001 --iou 0.65
  %(prog)s --weights a.pt b.pt --augment                        an ensemble, at three scales

Exit code: 0, 2 wrong options, 3 data, 4 weights, 5 no room.
"""
