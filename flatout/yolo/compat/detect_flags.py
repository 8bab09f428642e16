"""Every flag of a detection and what it does, for people who read `--help`."""

from flatout.yolo.compat.flag import switch, value

YOLOV7 = (
    value("--weights", "weights to detect with; several files answer together, as an ensemble", nargs="+"),
    value("--source", "picture, folder, 'pattern*.jpg', video, .txt list, number of a camera, or URL of a stream"),
    value("--img-size", "longer side of the pictures, rounded up to the grid", type=int, metavar="PX"),
    value("--conf-thres", "forget detections that are less certain", type=float, metavar="CONF"),
    value("--iou-thres", "of two detections that overlap more, keep the more certain one", type=float, metavar="IOU"),
    value("--device", "cpu, or the number of a GPU; '' takes the first GPU, or the CPU if there is none"),
    switch("--view-img", "show results in windows while they are made; q ends it"),
    switch("--save-txt", "write detections as label files"),
    switch("--save-conf", "with --save-txt: write how certain each detection is"),
    switch("--nosave", "write no pictures and videos"),
    value("--classes", "keep only these classes, by number: --classes 0 2 3", type=int, nargs="+", metavar="N"),
    switch("--agnostic-nms", "let detections of different classes suppress each other"),
    switch("--augment", "detect at three scales, once mirrored, and join the results"),
    switch("--update", "afterwards write the weights again without the state of their training"),
    value("--project", "folder of the folders of results", metavar="FOLDER"),
    value("--name", "name of the folder; a number is added if that name is taken"),
    switch("--exist-ok", "use the folder of that name even if it exists"),
    switch("--no-trace", "accepted for YOLOv7's sake: nothing is traced here"),
)

OURS = (
    switch("--save-crop", "cut every detection out: crops/<class>/<picture>_<number>.jpg"),
    switch("--save-json", "write detections as COCO JSON"),
    value("--at-once", "pictures per call of the network (default: 16 on a GPU, 1 on a CPU)", type=int, metavar="N"),
    value("--workers", "threads that read, and as many that draw and write, at most", type=int),
)

DESCRIPTION = """\
Detect objects in pictures, videos, cameras and streams: boxes drawn on them, label files, crops, JSON. Reading, drawing
and writing happen beside the network. Every flag of YOLOv7's detect.py is here, means the same and may be shortened as
there (--img, --conf, --iou).
"""
EPILOG = """\
examples:
  %(prog)s --weights runs/train/exp/weights/best.pt --source pictures/ --img 640
  %(prog)s --weights best.pt --source 'shots/**/*.jpg' --save-txt --save-conf --nosave
  %(prog)s --weights best.pt --source video.mp4 --conf 0.4 --classes 0 2
  %(prog)s --weights a.pt b.pt --source 0                       a camera, by an ensemble; Ctrl-C ends it

A file that cannot be read is told and left out. Ctrl-C ends cleanly, with everything written that was seen.
Exit code: 0, 2 wrong options, 3 nothing could be read, 4 weights, 5 no room, 130 ended early.
"""
