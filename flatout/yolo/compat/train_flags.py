"""Every flag of a training and what it does, for people who read `--help`."""

from argparse import Action, ArgumentParser, ArgumentTypeError, Namespace
from typing import Any

from flatout.yolo.compat.flag import switch, value
from flatout.yolo.options import AUTO


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is neither a whole number nor {AUTO}") from None


class _Compile(Action):
    """Stores the value. A typed `off` is more than the default: --fast obeys it."""

    def __call__(
        self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: str | None = None
    ) -> None:
        namespace.compile = values
        namespace.no_compile = values == "off"


YOLOV7 = (
    value("--weights", "start from these weights; '' starts from scratch, and so does the default, a file nobody has"),
    value("--cfg", "config of the network: a file, or a name like yolov7-tiny; '' takes the one inside the weights"),
    value("--data", "data YAML: where pictures are, what classes are called"),
    value("--hyp", "hyper-parameters: learning rates, gains of the losses, augmentation"),
    value("--epochs", "passes over the training pictures", type=int),
    value("--batch-size", "pictures per step, over all GPUs together", type=int),
    value("--img-size", "size in training, then in validation; one number is both", type=int, nargs="+", metavar="PX"),
    switch("--rect", "batches of pictures with like proportions, little padding, no mosaic"),
    value("--resume", "go on with this checkpoint, or with the newest run below this folder", nargs="?", const=True),
    switch("--nosave", "save only after the last epoch"),
    switch("--notest", "validate only after the last epoch"),
    switch("--noautoanchor", "keep the anchors without asking whether they fit the data"),
    value(
        "--evolve",
        "search for better hyper-parameters in N whole trainings (300)",
        type=int,
        nargs="?",
        const=True,
        metavar="N",
    ),
    value("--bucket", "Google bucket to copy results to; refused: --mirror gs://bucket/folder does it"),
    switch("--cache-images", "decode every picture once and keep it in memory"),
    switch("--image-weights", "show pictures of badly recognised classes more often"),
    value("--device", "cpu, a GPU: 0, or several that train together: 0,1,2,3; '' is the first GPU, else the CPU"),
    switch("--multi-scale", "another picture size for every batch, 0.5 to 1.5 times --img-size"),
    switch("--single-cls", "treat all classes as one"),
    switch("--adam", "Adam instead of SGD"),
    switch("--sync-bn", "batch-norm statistics over the pictures of all GPUs, where several train together"),
    value("--local_rank", "set by launchers, as is $LOCAL_RANK", type=int, also="--local-rank", metavar="N"),
    value(
        "--workers",
        "processes that read and augment, at most; fewer where CPUs or batches are few; auto: measured",
        type=_number_or_auto,
    ),
    value("--project", "folder of the folders of runs", metavar="FOLDER"),
    value("--entity", "log to Weights & Biases, as this user or team"),
    value("--name", "name of the run; a number is added if that name is taken"),
    switch("--exist-ok", "use the folder of that name even if it exists"),
    switch("--quad", "a quarter of the batch: every four pictures become one, joined or enlarged"),
    switch("--linear-lr", "let the learning rate fall along a line instead of a cosine"),
    value("--label-smoothing", "how uncertain true classes are made, 0 to 1", type=float, metavar="EPS"),
    switch("--upload_dataset", "accepted for YOLOv7's sake: the data set is not sent anywhere"),
    value("--bbox_interval", "accepted for YOLOv7's sake: pictures go to W&B at the end", type=int, metavar="N"),
    value("--save_period", "send the weights to W&B every N epochs; -1: never", type=int, metavar="N"),
    value("--artifact_alias", "what weights sent to W&B are called besides", metavar="ALIAS"),
    value("--freeze", "N: leave layers 0 to N-1 as they are; several: exactly those", type=int, nargs="+", metavar="N"),
    switch("--v5-metric", "average precision as YOLOv5 computes it, with recall going on to 1"),
)

FORK = (
    value("--test-batch-size", "pictures per step of the validation (default: twice --batch-size)", type=int),
    value("--heads", "several heads, each for a block of classes, or as --head-config says", type=int, metavar="N"),
    value("--head-config", "file that says which head answers for which classes, and so how many heads there are"),
    switch("--transfer-weights", "take every tensor of --weights that fits by name and shape, and nothing else"),
    switch("--auto-lr", "above 64 pictures per batch, learning rate times sqrt(batch / 64); from 128, longer warm-up"),
    switch("--class-aware-aug", "turn and shear a mosaic as suits the head that most of its labels belong to, by lot"),
    value("--head-params", "file with the augmentation of each head's classes"),
)

SPEED = (
    switch("--fast", "all of the below that pay on this machine; prints what it chose; parts are left out by --no-..."),
    switch("--fast-dataloader", "decode every picture only once, and augment it in fewer passes: the same pixels"),
    switch("--persistent-workers", "keep the workers from epoch to epoch; accepted, since that is the default"),
    switch("--worker-tensor", "workers write straight into the batch; accepted, since they always do"),
    switch("--device-augment", "keep the decoded pictures on the GPU and augment them there"),
    switch("--store-420", "there with colours at half size: half of the memory, nearly the same pixels"),
    value(
        "--compile",
        "torch.compile, steps as CUDA graphs; auto: if it pays within this run (default: off, with --fast auto)",
        action=_Compile,
        choices=("on", "off", "auto"),
    ),
    switch("--channels-last", "the memory layout that convolutions on GPUs prefer"),
    switch("--no-fast-dataloader", "with --fast: decode in every epoch, and augment step by step"),
    switch("--no-persistent-workers", "end the workers after each epoch, and start new ones for the next"),
    switch("--no-device-augment", "with --fast: augment on the CPU"),
    switch("--no-channels-last", "with --fast: the usual memory layout"),
    switch("--no-compile", "the same as --compile off: also with --fast nothing is compiled"),
    switch("--no-graphs", "with --fast or --compile on: launch steps one by one instead of as CUDA graphs"),
    switch("--no-scaled-decode", "with --fast: decode large JPEG files at their full size"),
    switch("--no-gpu-decode", "with --fast: decode JPEG files on the CPU, also those that stay on the GPU"),
    value(
        "--profile",
        "time N steps (30), write profile.html into the run folder, and say what would be faster",
        type=int,
        nargs="?",
        const=30,
        metavar="N",
    ),
    value("--amp", "mixed precision (default: fp16 on a GPU, off on a CPU)", choices=("fp16", "bf16", "off")),
)

RECIPE = (
    switch("--sequential", "visit the pictures in YOLOv7's order, which is not shuffled on one GPU"),
    value("--ota-from", "use the plain loss before this epoch, OTA from it on", type=int, metavar="EPOCH"),
    value("--patience", "end after this many epochs without a better fitness; 0: never", type=int, metavar="N"),
    value("--price", "what an hour of this machine costs, in any currency", type=float, metavar="PER_HOUR"),
    value("--budget", "stop, saved, when this much is spent: money (with --price) or time, like 5.00 or 2h30m"),
    value("--seed", "of every random number (default: YOLOv7's, 1 on one GPU)", type=int, metavar="N"),
    switch("--head-attention", "with several heads: let each look at the maps through an attention of its own (CBAM)"),
    switch("--deterministic", "repeat a run bit by bit, at some cost in speed"),
)

FILES = (
    switch("--fresh", "begin anew even if a run of that name could be continued"),
    switch("--once", "exit with 0 if the run is complete, instead of beginning the next one; for what restarts always"),
    value("--save-every-minutes", "longest time between two checkpoints", type=float, metavar="MINUTES"),
    value("--save-every-steps", "most steps between two checkpoints", type=int, metavar="STEPS"),
    switch("--compat-pt", "also write checkpoints that old YOLOv7 tools can unpickle; not built yet, refused"),
    switch("--allow-data-change", "continue a run although its data is not what it was"),
    switch("--break-lock", "take over a run folder that another machine has locked; be sure that it is not at work"),
    switch("--strict-labels", "obey all label rules of YOLOv7: one bad line drops the picture"),
    switch("--allow-bad-labels", "go on although more than half of the labels cannot be used"),
    switch("--verify-cache", "compare decoded pictures in caches with their checksums"),
    value("--log-every", "steps between two lines of the log", type=int, metavar="STEPS"),
    value(
        "--log-to",
        "where numbers go besides the run folder (default: tensorboard, if it is installed)",
        nargs="+",
        choices=("tensorboard", "wandb", "mlflow", "none"),
    ),
    value("--mirror", "copy saved states to s3://bucket/folder or another URL, and go on from there", metavar="URL"),
    value("--on-done", "run this command when all is over; $FLATOUT_OUTCOME and others tell what", metavar="COMMAND"),
    switch("--no-preflight", "do not look at disk, memory and GPU before training"),
)

DESCRIPTION = """\
Train a detector. Every flag of YOLOv7's train.py is here, means the same and may be shortened as there (--img,
--batch); flags that are new are written in full. What is not built yet is refused, never ignored. The same command
typed again continues a run that was interrupted.
"""
EPILOG = """\
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
