"""The flags of train.py, test.py, detect.py and export.py: help texts, parsers, and options from parsed arguments.

Flags of YOLOv7 and its fork keep every abbreviation that argparse allows. New flags match only when written in full;
otherwise `--de`, `--wo`, `--p`, `--f` and `--bu`, which people type, would become ambiguous.
"""

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flatout.cli import TRAINING_EXIT_CODES, Flag, FlagParser, flags_of, switch, value
from flatout.errors import ConfigError
from flatout.runs import from_environment
from flatout.yaml_strict import load_yaml
from flatout.yolo.export.options import ExportOptions
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.options import TestOptions, TrainOptions
from flatout.yolo.predict.options import DetectOptions

# train.py: the origin of each flag, and the text around the flags; their help is in `TrainOptions`

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
    "no_compile", "no_graphs", "no_scaled_decode", "gpu_decode", "no_gpu_decode", "decode_first", "profile", "amp",
)  # fmt: skip
RECIPE = (
    "sequential", "ota_from", "seed", "head_attention", "deterministic", "tiles", "tile_overlap", "tile_min_visible",
)  # fmt: skip
FILES = (
    "audit", "patience", "price", "budget", "fresh", "once", "save_every_minutes", "save_every_steps", "compat_pt",
    "allow_data_change", "break_lock", "strict_labels", "allow_bad_labels", "verify_cache", "log_every", "log_to",
    "mirror", "on_done", "no_preflight",
)  # fmt: skip

TRAIN_DESCRIPTION = """\
Train a detector. All flags of YOLOv7's train.py work as they do there, including abbreviations (--img, --batch); new
flags must be written in full. A flag that is not supported is refused, never ignored. If a run was interrupted, the
same command continues it.
"""
TRAIN_EPILOG = f"""\
examples:
  %(prog)s --data data/coco320.yaml --img 320 --cfg yolov7-tiny --batch 64 --epochs 100 --weights ''
  %(prog)s --data my.yaml --cfg yolov7 --weights yolov7.pt --fast    from weights, as fast as this machine can
  %(prog)s --resume                                                  continue the newest run
  %(prog)s --device 0,1,2,3 --batch 256 ...                          on four GPUs; torchrun works too

files: --data, --cfg and --hyp are used as given if the file exists. Otherwise a file of that name is searched for below
the working directory (exactly one may match), and then among the files that come with flatout (data/*.yaml,
cfg/training/*.yaml).

environment: USE_COMPILE=1 means --compile on. DIAGNOSE_COMPILE=1 reports where the network cannot be compiled, and does
not train. FLATOUT_STOP_AFTER=N stops cleanly after N steps, to try out a long command.

{TRAINING_EXIT_CODES}"""


# test.py

TEST_YOLOV7 = (
    "weights", "data", "batch_size", "img_size", "conf_thres", "iou_thres", "task", "device", "single_cls",
    "augment", "verbose", "save_txt", "save_hybrid", "save_conf", "save_json", "project", "name", "exist_ok",
    "no_trace", "v5_metric",
)  # fmt: skip
TEST_FORK = ("save_per_class_ap",)
TEST_OURS = (
    "workers", "strict_labels", "allow_bad_labels", "verify_cache", "tiles", "tile_overlap", "tile_full_view",
)  # fmt: skip

TEST_DESCRIPTION = """\
Evaluate weights: precision, recall, mAP@.5 and mAP@.5:.95, overall and per class, with curves and a confusion matrix.
All flags of YOLOv7's test.py work as they do there, including abbreviations (--img, --batch, --conf, --iou).
"""
TEST_EPILOG = """\
examples:
  %(prog)s --weights runs/train/exp/weights/best.pt --data data/coco320.yaml --img 320
  %(prog)s --weights yolov7.pt --data data/coco.yaml --img 640 --batch 32 --conf 0.001 --iou 0.65
  %(prog)s --weights a.pt b.pt --augment                        an ensemble, at three scales

Exit codes: 0 done, 2 wrong options, 3 unusable data, 4 unusable weights, 5 not enough disk, memory or GPUs.
"""


# detect.py


def number_or_name(text: str) -> int | str:
    """A class as it is typed: a number, or its name."""
    return int(text) if text.removeprefix("-").isdecimal() else text


DETECT_YOLOV7 = (
    value("--weights", "weights to detect with; several files form an ensemble", nargs="+"),
    value("--source", "image, folder, 'pattern*.jpg', video, .txt list, camera number, or URL of a stream"),
    value("--img-size", "longer side of the input, rounded up to a multiple of the stride", type=int, metavar="PX"),
    value("--conf-thres", "drop detections with a lower confidence", type=float, metavar="CONF"),
    value("--iou-thres", "NMS: of two boxes with a larger IoU, keep the more confident one", type=float, metavar="IOU"),
    value("--device", "cpu, or the number of a GPU; '' uses the first GPU, or the CPU if there is none"),
    switch("--view-img", "show results in windows as they come; press q to quit"),
    switch("--save-txt", "write detections as label files"),
    switch("--save-conf", "with --save-txt: also write the confidence of each detection"),
    switch("--nosave", "write no images and videos"),
    value(
        "--classes",
        "keep only these classes, by number or name: --classes 0 cat",
        type=number_or_name,
        nargs="+",
        metavar="CLASS",
    ),
    switch("--agnostic-nms", "NMS: let detections of different classes suppress each other"),
    switch("--augment", "detect at three scales, one of them mirrored, and merge the results"),
    switch("--update", "afterwards, rewrite the weights file without its training state"),
    value("--project", "folder that contains the result folders", metavar="FOLDER"),
    value("--name", "name of the result folder; a number is appended if it exists"),
    switch("--exist-ok", "write into that folder even if it exists"),
    switch("--no-trace", "accepted for compatibility with YOLOv7, no effect: nothing is traced"),
)

DETECT_OURS = (
    switch("--save-crop", "save a crop of every detection as crops/<class>/<image>_<number>.jpg"),
    switch("--save-json", "write detections as COCO JSON"),
    switch("--track", "give objects ids that stay the same from frame to frame; needs the extra `track`"),
    value(
        "--track-buffer",
        "with --track: frames for which an object that is not found keeps its id",
        type=int,
        metavar="N",
    ),
    switch("--allow-urls", "download images whose address (http, https) is the source or in a list"),
    value("--at-once", "images per forward pass (default: 16 on a GPU, 1 on a CPU)", type=int, metavar="N"),
    value("--workers", "maximum number of threads that read, and of threads that plot and write", type=int),
    value(
        "--tiles",
        "for large images: detect in tiles of this size, and merge their detections into those of the image",
        type=int,
        metavar="PX",
    ),
    value(
        "--tile-overlap",
        "with --tiles: part of its side, 0 to below 1, that a tile shares at least with each neighbour",
        type=float,
        metavar="SHARE",
    ),
    switch(
        "--tile-full-view", "with --tiles: also detect in the whole shrunk image, for objects longer than the overlap"
    ),
)

DETECT_DESCRIPTION = """\
Detect objects in images, videos, cameras and streams. Writes images with boxes, label files, crops or JSON. Reading,
plotting and writing run in parallel with the network. All flags of YOLOv7's detect.py work as they do there, including
abbreviations (--img, --conf, --iou).
"""
DETECT_EPILOG = """\
examples:
  %(prog)s --weights runs/train/exp/weights/best.pt --source images/ --img 640
  %(prog)s --weights best.pt --source 'shots/**/*.jpg' --save-txt --save-conf --nosave
  %(prog)s --weights best.pt --source video.mp4 --conf 0.4 --classes 0 2
  %(prog)s --weights yolov7-tiny --source street.mp4 --classes person bicycle --track
  %(prog)s --weights a.pt b.pt --source 0                       a camera and an ensemble; stop with Ctrl-C

A file that cannot be read is reported and skipped. Ctrl-C stops cleanly, and everything seen so far is written.
Exit codes: 0 done, 2 wrong options, 3 nothing could be read, 4 unusable weights, 5 not enough disk, memory or GPUs,
130 stopped early.
"""


# export.py


class OneFile(argparse.Action):
    """Stores one value; with several, the error says what to do."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given: Sequence[str] = values
        if len(given) > 1:
            parser.error(f"{option} {' '.join(given)}: an ensemble cannot be exported. Export each file by itself.")
        setattr(namespace, self.dest, given[0])


EXPORT_YOLOV7 = (
    value("--weights", "weights to export", nargs="+", action=OneFile, metavar="FILE"),
    value(
        "--img-size",
        "height and width of the input, to which images are letterboxed (detect pads them less); one number sets both",
        type=int,
        nargs="+",
        metavar="PX",
    ),
    value("--batch-size", "images per batch", type=int),
    switch("--dynamic", "accept any batch size and image size (not with NMS in the file)"),
    switch("--dynamic-batch", "accept any batch size"),
    switch("--grid", "output decoded boxes in pixels; without it, one raw feature map per level"),
    switch(
        "--end2end",
        "include NMS in the ONNX file: TensorRT's plugin, or ONNX's own operator with --max-wh; OpenCV reads neither",
    ),
    value(
        "--max-wh",
        "with --end2end: use ONNX's NMS, with classes offset by this many pixels; 0: NMS across classes",
        type=int,
        metavar="PX",
    ),
    value("--topk-all", "NMS: maximum number of boxes per image", type=int, metavar="N"),
    value("--iou-thres", "NMS: of two boxes with a larger IoU, keep the more confident one", type=float, metavar="IOU"),
    value("--conf-thres", "NMS: drop boxes with a lower confidence", type=float, metavar="CONF"),
    value("--device", "device on which torch's own speed is measured: cpu, or the number of a GPU"),
    switch("--simplify", "fold constants and remove unneeded nodes with onnxslim"),
    switch("--include-nms", "include NMS as older versions did: TensorRT's plugin, with boxes as corners"),
    switch("--fp16", "also write an ONNX file in half precision (in YOLOv7: a CoreML file)"),
    switch("--int8", "also write an ONNX file with 8-bit convolutions (in YOLOv7: a CoreML file)"),
)

EXPORT_OURS = (
    value(
        "--formats", "any of torchscript, onnx, openvino, ncnn (default: the first two)", nargs="+", metavar="FORMAT"
    ),
    value("--out", "path of the files without an ending, or a folder (default: beside the weights)", metavar="PATH"),
    value("--cfg", "model config, for weights that do not contain one"),
    value("--data", "data YAML; its validation images are used to verify the files (default: generated images)"),
    value(
        "--images",
        "images, folders or lists to verify the files with, instead of --data",
        nargs="+",
        metavar="PATH",
    ),
    value("--pictures", "number of images to verify the files with", type=int, metavar="N"),
    value("--opset", "version of the ONNX operator set", type=int, metavar="N"),
    value(
        "--tiles",
        "note in the files that large images are cut into tiles of this size (default: as the weights were trained)",
        type=int,
        metavar="PX",
    ),
    value(
        "--tile-overlap",
        "with --tiles: part of its side, 0 to below 1, that a tile shares at least with each neighbour",
        type=float,
        metavar="SHARE",
    ),
)

EXPORT_DESCRIPTION = """\
Export a network to ONNX, TorchScript, OpenVINO or ncnn, with a model card. Batch norms, RepConv branches and implicit
vectors are folded, auxiliary heads are left out. Before a file is written, its outputs are compared with those of the
network on some images; sizes and times are printed. All flags of YOLOv7's export.py are accepted, including
abbreviations.
"""
EXPORT_EPILOG = """\
examples:
  %(prog)s --weights best.pt --grid --simplify                      best.onnx, with boxes in pixels
  %(prog)s --weights best.pt --grid --dynamic-batch --data my.yaml  any batch size, verified with your images
  %(prog)s --weights best.pt --grid --end2end --max-wh 640          with NMS, for ONNX Runtime
  %(prog)s --weights best.pt --grid --end2end                       with NMS, for TensorRT

Exit codes: 0 done, 2 wrong options or a missing package, 3 unusable images, 4 unusable weights, 5 not enough disk,
memory or GPUs, 8 the outputs of a file differ from those of the network.
"""


# Parsers


def train_parser(prog: str = "flatout yolo train") -> FlagParser:
    """The parser of train.py and train_aux.py, which are the same command."""
    groups = {
        "flags of YOLOv7": flags_of(TrainOptions, TRAIN_YOLOV7),
        "flags of the fork Yolov7fast": flags_of(TrainOptions, TRAIN_FORK),
        "new flags for speed": flags_of(TrainOptions, SPEED),
        "new flags for the training recipe": flags_of(TrainOptions, RECIPE),
        "new flags for runs, files and logs": flags_of(TrainOptions, FILES),
    }
    parser = FlagParser(prog, TRAIN_DESCRIPTION, TRAIN_EPILOG, about=_about_key_of_hyp)
    return _with_flags(parser, TrainOptions(), groups)


def _with_flags(parser: FlagParser, defaults: object, groups: Mapping[str, Iterable[Flag]]) -> FlagParser:
    """Flags of YOLOv7 and of its fork may be abbreviated, new ones must be written in full."""
    for title, flags in groups.items():
        parser.add_flags(title, flags, defaults, shortened=not title.startswith("new"))
    return parser


def _about_key_of_hyp(word: str) -> str | None:
    # The keys are read from a file, because importing the class `Hyp` would import torch.
    keys = load_yaml(shipped_folder("data") / "hyp.scratch.p5.yaml")
    if not isinstance(keys, dict) or word not in keys:
        return None
    return f"{word} is a key of the hyp file: set it there, and give the file with --hyp."


def test_parser(prog: str = "flatout yolo test") -> FlagParser:  # noqa: PT028 - not a test
    """The parser of test.py."""
    groups = {
        "flags of YOLOv7": flags_of(TestOptions, TEST_YOLOV7),
        "flags of the fork Yolov7fast": flags_of(TestOptions, TEST_FORK),
        "new flags": flags_of(TestOptions, TEST_OURS),
    }
    return _with_flags(FlagParser(prog, TEST_DESCRIPTION, TEST_EPILOG), TestOptions(), groups)


def detect_parser(prog: str = "flatout yolo detect") -> FlagParser:
    """The parser of detect.py."""
    groups = {"flags of YOLOv7": DETECT_YOLOV7, "new flags": DETECT_OURS}
    return _with_flags(FlagParser(prog, DETECT_DESCRIPTION, DETECT_EPILOG), DetectOptions(), groups)


def export_parser(prog: str = "flatout yolo export") -> FlagParser:
    """The parser of export.py."""
    groups = {"flags of YOLOv7": EXPORT_YOLOV7, "new flags": EXPORT_OURS}
    return _with_flags(FlagParser(prog, EXPORT_DESCRIPTION, EXPORT_EPILOG), ExportOptions(), groups)


# Options from parsed arguments


def options_from(given: Mapping[str, Any], environ: Mapping[str, str]) -> TrainOptions:
    """The options of a training, from the given flags and the environment; ConfigError lists every mistake."""
    values = {
        **from_environment(environ),
        "use_compile": _is_on(environ, "USE_COMPILE"),
        "diagnose_compile": _is_on(environ, "DIAGNOSE_COMPILE"),
        **{name: value for name, value in given.items() if (name, value) != ("local_rank", -1)},
    }
    if "img_size" in values:
        values["img_size"] = train_and_test_size(values["img_size"])
    from flatout.config import build_config  # imported late, because help does not need pydantic

    return build_config(values, TrainOptions)


def test_options(args: argparse.Namespace) -> TestOptions:
    """The options of an evaluation; ConfigError lists every mistake."""
    from flatout.config import build_config

    return build_config(vars(args), TestOptions)


def detect_options(args: argparse.Namespace) -> DetectOptions:
    """The options of a detection; ConfigError lists every mistake."""
    from flatout.config import build_config

    return build_config(vars(args), DetectOptions)


def export_options(args: argparse.Namespace) -> ExportOptions:
    """The options of an export; ConfigError lists every mistake."""
    if len(args.img_size) > 2:
        raise ConfigError(f"--img-size {' '.join(map(str, args.img_size))}: give one size, or a height and a width.")
    from flatout.config import build_config

    return build_config(vars(args) | {"img_size": [args.img_size[0], args.img_size[-1]]}, ExportOptions)


def train_and_test_size(sizes: Sequence[int]) -> list[int]:
    """The values of `--img-size` as two numbers; a single one is used for both."""
    if len(sizes) > 2:
        raise ConfigError(
            f"--img-size {' '.join(map(str, sizes))}: give one size, or one for training and one for validation."
        )
    return [sizes[0], sizes[-1]]


def _is_on(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "0") == "1"


# Flags of YOLOv7 and its fork that are not supported: refused with a reason, never ignored

_REASONS = {
    "bucket": "use --mirror gs://BUCKET/FOLDER, which copies checkpoints to any object store",
    "compat_pt": "writing pickled files for old tools is not implemented; `flatout yolo convert` writes safetensors",
}


def refuse_unsupported(options: TrainOptions) -> None:
    """ConfigError that lists every unsupported flag in use."""
    defaults = TrainOptions()
    refusals = [
        f"--{name.replace('_', '-')} is not supported: {reason}. Leave the flag out."
        for name, reason in _REASONS.items()
        if getattr(options, name) != getattr(defaults, name)
    ]
    if refusals:
        raise ConfigError("\n".join(refusals))
