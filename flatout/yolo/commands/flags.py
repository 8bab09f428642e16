"""The command lines of train.py and test.py: words in, options out.

YOLOv7's flags and its fork's keep every abbreviation that argparse gave them. Flags that are new match only when they
are written in full; otherwise `--de`, `--wo`, `--p`, `--f` and `--bu`, which people type, would turn ambiguous.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatout.cli import FlagParser, flags_of, switch, value
from flatout.errors import ConfigError
from flatout.runs import from_environment
from flatout.yaml_strict import load_yaml
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.options import DetectOptions

# Which flags of a training come from where, and what `--help` says around them.

TRAIN_YOLOV7 = (
    "weights", "cfg", "data", "hyp", "epochs", "batch_size", "img_size", "rect", "resume", "nosave", "notest",
    "noautoanchor", "evolve", "bucket", "cache_images", "image_weights", "device", "multi_scale", "single_cls", "adam",
    "sync_bn", "local_rank", "workers", "project", "entity", "name", "exist_ok", "quad", "linear_lr", "label_smoothing",
    "upload_dataset", "bbox_interval", "save_period", "artifact_alias", "freeze", "v5_metric",
)  # fmt: skip
TRAIN_FORK = (
    "test_batch_size", "heads", "head_config", "transfer_weights", "auto_lr", "class_aware_aug", "head_params",
)  # fmt: skip
SPEED = (
    "fast", "fast_dataloader", "persistent_workers", "worker_tensor", "device_augment", "store_420", "compile",
    "channels_last", "no_fast_dataloader", "no_persistent_workers", "no_device_augment", "no_channels_last",
    "no_compile", "no_graphs", "no_scaled_decode", "no_gpu_decode", "profile", "amp",
)  # fmt: skip
RECIPE = (
    "sequential", "ota_from", "patience", "price", "budget", "seed", "head_attention", "deterministic",
)  # fmt: skip
FILES = (
    "fresh", "once", "save_every_minutes", "save_every_steps", "compat_pt", "allow_data_change", "break_lock",
    "strict_labels", "allow_bad_labels", "verify_cache", "log_every", "log_to", "mirror", "on_done", "no_preflight",
)  # fmt: skip

TRAIN_DESCRIPTION = """\
Train a detector. Every flag of YOLOv7's train.py is here, means the same and may be shortened as there (--img,
--batch); flags that are new are written in full. What is not built yet is refused, never ignored. The same command
typed again continues a run that was interrupted.
"""
TRAIN_EPILOG = """\
examples:
  %(prog)s --data data/coco320.yaml --img 320 --cfg yolov7-tiny --batch 64 --epochs 100 --weights ''
  %(prog)s --data my.yaml --cfg yolov7 --weights yolov7.pt --fast    from weights, as fast as this machine can
  %(prog)s --resume                                                  the newest run goes on where it stopped
  %(prog)s --device 0,1,2,3 --batch 256 ...                          four GPUs; torchrun works too

files: --data, --cfg and --hyp are taken as given; else looked for below this folder, where exactly one may match;
else taken from those that come with flatout (data/*.yaml, cfg/training/*.yaml).

environment: USE_COMPILE=1 is --compile on, DIAGNOSE_COMPILE=1 reports where the network cannot be compiled and trains
nothing, FLATOUT_STOP_AFTER=N ends cleanly after N steps, to try a long command.

Exit code: 0, 2 wrong options, 3 data, 4 weights, 5 no room, 6 diverged, 7 another rank was lost, 75 interrupted and
saved (type the same command again), 130 interrupted twice, at once.
"""


# Every flag of an evaluation and what it does, for people who read `--help`.

TEST_YOLOV7 = (
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

TEST_FORK = (
    value("--save-per-class-ap", "write the average precision of every class to this JSON file", metavar="FILE"),
)

TEST_OURS = (
    value("--workers", "processes that read pictures, at most", type=int),
    switch("--strict-labels", "obey all label rules of YOLOv7: one bad line drops the picture"),
    switch("--allow-bad-labels", "go on although more than half of the labels cannot be used"),
    switch("--verify-cache", "compare decoded pictures in caches with their checksums"),
)

TEST_DESCRIPTION = """\
Evaluate weights: precision, recall, mAP@.5 and mAP@.5:.95, per class, with curves and a confusion matrix. Every flag of
YOLOv7's test.py is here, means the same and may be shortened as there (--img, --batch, --conf, --iou).
"""
TEST_EPILOG = """\
examples:
  %(prog)s --weights runs/train/exp/weights/best.pt --data data/coco320.yaml --img 320
  %(prog)s --weights yolov7.pt --data data/coco.yaml --img 640 --batch 32 --conf 0.001 --iou 0.65
  %(prog)s --weights a.pt b.pt --augment                        an ensemble, at three scales

Exit code: 0, 2 wrong options, 3 data, 4 weights, 5 no room.
"""


# Every flag of a detection and what it does, for people who read `--help`.

DETECT_YOLOV7 = (
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

DETECT_OURS = (
    switch("--save-crop", "cut every detection out: crops/<class>/<picture>_<number>.jpg"),
    switch("--save-json", "write detections as COCO JSON"),
    value("--at-once", "pictures per call of the network (default: 16 on a GPU, 1 on a CPU)", type=int, metavar="N"),
    value("--workers", "threads that read, and as many that draw and write, at most", type=int),
)

DETECT_DESCRIPTION = """\
Detect objects in pictures, videos, cameras and streams: boxes drawn on them, label files, crops, JSON. Reading, drawing
and writing happen beside the network. Every flag of YOLOv7's detect.py is here, means the same and may be shortened as
there (--img, --conf, --iou).
"""
DETECT_EPILOG = """\
examples:
  %(prog)s --weights runs/train/exp/weights/best.pt --source pictures/ --img 640
  %(prog)s --weights best.pt --source 'shots/**/*.jpg' --save-txt --save-conf --nosave
  %(prog)s --weights best.pt --source video.mp4 --conf 0.4 --classes 0 2
  %(prog)s --weights a.pt b.pt --source 0                       a camera, by an ensemble; Ctrl-C ends it

A file that cannot be read is told and left out. Ctrl-C ends cleanly, with everything written that was seen.
Exit code: 0, 2 wrong options, 3 nothing could be read, 4 weights, 5 no room, 130 ended early.
"""


# Every flag of an export and what it does, for people who read `--help`.


class OneFile(argparse.Action):
    """Takes one value, and says what to do about more."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: Sequence[str] = values
        if len(given) > 1:
            parser.error(f"{option} {' '.join(given)}: a file holds one network, no ensemble. Export each on its own.")
        setattr(namespace, self.dest, given[0])


EXPORT_YOLOV7 = (
    value("--weights", "weights to export", nargs="+", action=OneFile, metavar="FILE"),
    value("--img-size", "height and width of the input; one number is both", type=int, nargs="+", metavar="PX"),
    value("--batch-size", "pictures per call", type=int),
    switch("--dynamic", "any number of pictures of any size (without NMS inside)"),
    switch("--dynamic-batch", "any number of pictures"),
    switch("--grid", "boxes in pixels; without it: raw maps, one per level"),
    switch("--end2end", "put NMS into the ONNX file: TensorRT's plugin, or ONNX's own with --max-wh"),
    value("--max-wh", "ONNX's NMS, with classes moved so many pixels apart; 0: across classes", type=int, metavar="PX"),
    value("--topk-all", "boxes of a picture that NMS keeps, at most", type=int, metavar="N"),
    value("--iou-thres", "of two boxes that overlap more, NMS keeps the more certain one", type=float, metavar="IOU"),
    value("--conf-thres", "NMS forgets boxes that are less certain", type=float, metavar="CONF"),
    value("--device", "where torch's time is measured: cpu, or the number of a GPU"),
    switch("--simplify", "compute constants and drop needless nodes (onnxslim)"),
    switch("--include-nms", "NMS by TensorRT's plugin on corners, as older versions wrote it"),
    switch("--fp16", "also write an ONNX file in half precision (YOLOv7: in CoreML)"),
    switch("--int8", "also write an ONNX file with convolutions of 8 bits (YOLOv7: in CoreML)"),
)

EXPORT_OURS = (
    value("--formats", "what to write: torchscript, onnx (default: both)", nargs="+", metavar="FORMAT"),
    value("--out", "path of the files without ending, or a folder (default: beside the weights)", metavar="PATH"),
    value("--cfg", "model config of weights that do not hold one"),
    value("--data", "data YAML whose validation pictures the files are compared on (default: drawn pictures)"),
    value("--images", "pictures, folders or lists to compare on, instead of --data", nargs="+", metavar="PATH"),
    value("--pictures", "how many of them", type=int, metavar="N"),
    value("--opset", "version of ONNX's operators", type=int, metavar="N"),
)

EXPORT_DESCRIPTION = """\
Write a network for other programs: ONNX and TorchScript. Batch norms, RepConv branches and implicit vectors are folded,
auxiliary heads left out. Every file is compared with the network on pictures before it is written; sizes and times are
printed. Every flag of YOLOv7's export.py is here and may be shortened as there.
"""
EXPORT_EPILOG = """\
examples:
  %(prog)s --weights best.pt --grid --simplify                      best.onnx: boxes in pixels
  %(prog)s --weights best.pt --grid --dynamic-batch --data my.yaml  any batch, compared on your pictures
  %(prog)s --weights best.pt --grid --end2end --max-wh 640          NMS inside, for ONNX Runtime
  %(prog)s --weights best.pt --grid --end2end                       NMS inside, for TensorRT

Exit code: 0, 2 wrong options or a package is missing, 3 pictures, 4 weights, 5 no room, 8 a file is not the network.
"""


def train_parser(prog: str = "flatout yolo train") -> FlagParser:
    """Reads the flags of train.py and train_aux.py, which are the same command."""
    parser = FlagParser(prog, TRAIN_DESCRIPTION, TRAIN_EPILOG, about=_about_key_of_hyp)
    for title, names, shortened in (
        ("flags of YOLOv7", TRAIN_YOLOV7, True),
        ("flags of its fork Yolov7fast", TRAIN_FORK, True),
        ("new, for speed", SPEED, False),
        ("new, for the recipe", RECIPE, False),
        ("new, for files", FILES, False),
    ):
        parser.add_flags(title, flags_of(TrainOptions, names), TrainOptions(), shortened=shortened)
    return parser


def _about_key_of_hyp(word: str) -> str | None:
    # From a file, because the class that knows them imports torch.
    keys = load_yaml(shipped_folder("data") / "hyp.scratch.p5.yaml")
    if not isinstance(keys, dict) or word not in keys:
        return None
    return f"{word} is a key of the hyp file: change it there, and name the file with --hyp."


def test_parser(prog: str = "flatout yolo test") -> FlagParser:  # noqa: PT028 - no test
    """Reads the flags of test.py."""
    parser = FlagParser(prog, TEST_DESCRIPTION, TEST_EPILOG)
    defaults = TestOptions()
    parser.add_flags("flags of YOLOv7", TEST_YOLOV7, defaults, shortened=True)
    parser.add_flags("flag of its fork Yolov7fast", TEST_FORK, defaults, shortened=True)
    parser.add_flags("new", TEST_OURS, defaults, shortened=False)
    return parser


def detect_parser(prog: str = "flatout yolo detect") -> FlagParser:
    """Reads the flags of detect.py."""
    parser = FlagParser(prog, DETECT_DESCRIPTION, DETECT_EPILOG)
    defaults = DetectOptions()
    parser.add_flags("flags of YOLOv7", DETECT_YOLOV7, defaults, shortened=True)
    parser.add_flags("new", DETECT_OURS, defaults, shortened=False)
    return parser


def export_parser(prog: str = "flatout yolo export") -> FlagParser:
    """Reads the flags of export.py."""
    parser = FlagParser(prog, EXPORT_DESCRIPTION, EXPORT_EPILOG)
    defaults = ExportOptions()
    parser.add_flags("flags of YOLOv7", EXPORT_YOLOV7, defaults, shortened=True)
    parser.add_flags("new", EXPORT_OURS, defaults, shortened=False)
    return parser


def options_from(given: Mapping[str, Any], environ: Mapping[str, str]) -> TrainOptions:
    """What was given by name and the environment ask for; ConfigError names every mistake."""
    values = {
        **from_environment(environ),
        "use_compile": _is_on(environ, "USE_COMPILE"),
        "diagnose_compile": _is_on(environ, "DIAGNOSE_COMPILE"),
        **{name: value for name, value in given.items() if (name, value) != ("local_rank", -1)},
    }
    if "img_size" in values:
        values["img_size"] = train_and_test_size(values["img_size"])
    from flatout.config import build_config  # now, because help does not need pydantic

    return build_config(values, TrainOptions)


def test_options(args: argparse.Namespace) -> TestOptions:
    """What parsed flags ask for; ConfigError names every mistake."""
    weights = [args.weights] if isinstance(args.weights, str) else args.weights
    from flatout.config import build_config

    return build_config(vars(args) | {"weights": weights}, TestOptions)


def detect_options(args: argparse.Namespace) -> DetectOptions:
    """What parsed flags ask for; ConfigError names every mistake."""
    weights = [args.weights] if isinstance(args.weights, str) else args.weights
    from flatout.config import build_config

    return build_config(vars(args) | {"weights": weights}, DetectOptions)


def export_options(args: argparse.Namespace) -> ExportOptions:
    """What parsed flags ask for; ConfigError names every mistake."""
    if len(args.img_size) > 2:
        raise ConfigError(f"--img-size {' '.join(map(str, args.img_size))}: give one size, or a height and a width.")
    from flatout.config import build_config

    return build_config(vars(args) | {"img_size": [args.img_size[0], args.img_size[-1]]}, ExportOptions)


def train_and_test_size(sizes: Sequence[int]) -> list[int]:
    """The first two of `--img-size`; one number stands for both."""
    if len(sizes) > 2:
        raise ConfigError(
            f"--img-size {' '.join(map(str, sizes))}: give one size, or one for training and one for tests."
        )
    return [sizes[0], sizes[-1]]


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") == "1"


# Flags of YOLOv7 and its fork that flatout does not obey yet: refused in a sentence each, never ignored.

_REASONS = {
    "bucket": "states are copied to any store, not only to Google's: --mirror gs://BUCKET/FOLDER",
    "compat_pt": "pickled files for old tools are not built yet; `flatout yolo convert` writes safetensors",
}


def refuse_what_is_not_built(options: TrainOptions) -> None:
    """ConfigError names every flag that cannot be obeyed."""
    if refusals := list(_refusals(options)):
        raise ConfigError("\n".join(refusals))


def _refusals(options: TrainOptions) -> Iterator[str]:
    defaults = TrainOptions()
    for name, reason in _REASONS.items():
        if getattr(options, name) != getattr(defaults, name):
            yield f"--{name.replace('_', '-')}: {reason}. Leave the flag out."
