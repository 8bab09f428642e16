"""Situations a training can be in, as measurements: recorded ones and constructed ones.

Each names the cause that a good engineer would name, and where it is known the gain that its remedy really gave.
"""

from dataclasses import replace
from typing import NamedTuple

from flatout.profiler.measurement import IDLE, HotLine, Lane, Limits, Measurement, NetworkRun, WaitBetween, WaitSite
from flatout.profiler.verdict import EndToEndTrial, Trial
from flatout.profiler.verdict.rules_host import CUDA_GRAPH
from flatout.profiler.verdict.rules_input import ON_DEVICE

NONE: dict[str, float] = {}


class Situation(NamedTuple):
    """A measurement, its cause, and the gain of the first remedy (None: not measured)."""

    measurement: Measurement
    cause: str
    gain: float | None = None
    trials: tuple[Trial, ...] = ()
    change: str = ""
    """Part of the first remedy's change."""
    end_to_end: tuple[EndToEndTrial, ...] = ()


def measured(step_ms, host, *, images=64, workers=NONE, num_workers=0, cores=16, main_cpu=1.0, **more):
    """`host` and `workers` are {stage: ms per step}; `main_cpu` in cores."""
    lanes = [Lane(place="host", stage_ms=host)]
    if num_workers:
        lanes.append(Lane(place="workers", stage_ms=workers, width=num_workers, rest=IDLE))
    return Measurement(
        wall_ms=[step_ms * factor for factor in (0.98, 1.0, 1.02)],
        images=images,
        lanes=lanes,
        main_cpu_ms=main_cpu * step_ms,
        num_workers=num_workers,
        usable_cores=cores,
        **more,
    )


def on_gpu(step_ms, host, busy_ms, **more):
    return measured(step_ms, host, has_device=True, device_busy_ms=busy_ms, **more)


def network(scale=1.0):
    """A healthy step of 100 ms."""
    return {"feed.wait": 0.5, "forward": 35 * scale, "loss": 6 * scale, "backward": 55 * scale, "optimizer": 3 * scale}


def input_bound(step_ms, num_workers, workers, **more):
    """A GPU step of 100 ms that gets its batches too late."""
    host = {**network(), "feed.wait": step_ms - 100}
    main_cpu = 100 / step_ms
    return on_gpu(step_ms, host, 95, num_workers=num_workers, workers=workers, main_cpu=main_cpu, **more)


LOOP = (
    HotLine(where="loop.py:20", ms=60, text="total += score.item()", function="score_all"),
    HotLine(where="loop.py:19", ms=9, text="for score in scores:", function="score_all"),
)
DECODE_LINE = HotLine(
    where="data.py:8", ms=420, text="image = cv2.imread(path)", function="__getitem__", in_worker=True
)
SLOW_LINE = HotLine(where="data.py:31", ms=2000, text="image = blur(image)", function="__getitem__", in_worker=True)


def batch_runs(per_image_ms, fixed_ms):
    """The network by itself, with batches of 4, 8, 16 and 32."""
    return tuple(NetworkRun(ms=fixed_ms + per_image_ms * images, images=images, threads=1) for images in (4, 8, 16, 32))


# The training that started this project: RTX 5090, yolov7-tiny, 320 px, batch 384, as its owner measured it (the
# numbers of workers and cores were not recorded: 48 and 64 are assumed). Replacing the loss with the plain one gave
# 171 ms: 6.9 times as fast.
RTX_5090 = on_gpu(
    1174,
    {"forward": 50, "loss": 1016, "backward": 103},
    0.34 * 1174,
    images=384,
    num_workers=48,
    workers={"read": 0.036 * 48 * 1174},
    cores=64,
    main_cpu=1.26,
)
# Its waits were not counted; a profile would have shown them like this.
RTX_5090_WITH_WAITS = replace(RTX_5090, waits=(WaitSite(where="loss.py:100", per_step=9_000, text="k = ks[g].item()"),))
PLAIN_LOSS = Trial(what="loss without a loop over images", change="loss_ota: 0", stage="loss", then_ms=11)

# `flatout demo` on an H200: 45 epochs of 8 steps, each followed by a validation. Its waits were counted in two steps,
# one of them the last of the first epoch: 165 waits, at lines that no step reaches. The wait of the main thread for the
# device at the end of an epoch (39 ms) had no mark yet.
DEMO_WAITS = tuple(
    WaitBetween(where=where, stage=stage, times=times, text=text)
    for where, stage, times, text in (
        ("flatout/yolo/nms/suppress.py:112", "validate", 120, "int(wanted_E.count_nonzero()) <= limit"),
        ("flatout/yolo/train/batch_pictures.py:41", "pictures", 8, "targets_T6 = targets_T6[targets_T6[:, 0] >= 0]"),
        ("flatout/yolo/train/batch_pictures.py:44", "pictures", 8, "images_BCHW.cpu().numpy(),"),
        ("flatout/yolo/metrics/match.py:69", "validate", 4, "torch.cat(column).cpu()"),
    )
)
H200_DEMO = on_gpu(
    17.7,
    {
        "validate": 4.97, "ahead": 0.69 + 4.89, "optimizer": 2.35, "feed.wait": 1.75, "graph": 1.11, "render": 0.47,
        "checkpoint": 0.39, "ema": 0.31, "backward": 0.26, "transfer": 0.22, "forward": 0.16,
    },
    10.3,
    num_workers=8,
    workers={"read": 1.5, "draw": 0.7},
    launches=42,
    launch_us=3.0,
    waits_between=DEMO_WAITS,
)  # fmt: skip
H200_DEMO = replace(
    H200_DEMO,
    lanes=[replace(H200_DEMO.lanes[0], stage_runs={"validate": 1 / 8, "checkpoint": 1 / 349}), *H200_DEMO.lanes[1:]],
)

# `flatout profile yolo --apply` on an H200: yolov7-tiny, 320 px, batch 32, two workers. With --fast it made
# 3,469 img/s, 4.77 times as much; treated as a graph around the same kernels, --fast was predicted to give 1,503. The
# parts of --fast were not measured by themselves then: the network's part is the measured result, the others are made
# up. The two workers are busy 92 % of the time: without launches, a step would wait 40 ms for them.
H200_BATCH_32 = on_gpu(
    44.0,
    {"backward": 17.17, "feed.wait": 11.68, "forward": 10.51, "assign": 1.06, "optimizer": 1.04, "loss": 0.55},
    20.2,
    images=32,
    num_workers=2,
    workers={"decode": 37.9, "warp": 18.46, "color": 12.78, "mosaic": 3.1, "read": 2.86, "deliver": 2.66, "draw": 2.92},
    launches=4298,
    launch_us=8.3,
    main_cpu=0.75,
)  # fmt: skip
ALL_OF_FAST = EndToEndTrial(
    what="everything that --fast switches on",
    change="--fast",
    compute_ms=9.2,
    device_ms=7.9,
    input_ms=1.6,
    input_device_ms=0.2,
    covers=(CUDA_GRAPH,),
    switch={"fast": True},
)

# The same flags in a later run (2026-11-16), on generated images: 4,439 img/s with --fast. Stages, launches and limits
# are recorded; the CPU share of the main thread is made up, and the network's part of --fast is the prediction for all
# of it.
H200_DECODES = on_gpu(
    45.8,
    {"forward": 13.98, "backward": 13.81, "feed.wait": 12.25, "optimizer": 1.49, "assign": 0.72, "loss": 0.54},
    11.4,
    images=32,
    num_workers=2,
    workers={"decode": 45.92, "warp": 14.36, "color": 14.08, "mosaic": 5.1, "read": 4.0, "deliver": 3.88, "draw": 0.98},
    launches=952,
    launch_us=7.3,
    main_cpu=0.75,
    limits=Limits(compute_ms=23.9, transfer_ms=24.3, input_ms=45.5),
)

SITUATIONS = {
    "RTX 5090: the assigner": Situation(RTX_5090, "assigner", 6.9),
    "RTX 5090: with its waits counted": Situation(RTX_5090_WITH_WAITS, "assigner", 6.9),
    "RTX 5090: a batched loss tried out": Situation(RTX_5090, "assigner", 6.9, (PLAIN_LOSS,)),
    # Recorded on one H200 with the original code; the gain is that of the plain loss there (shared figures).
    "H200: tiny 320 batch 384": Situation(
        on_gpu(3191, {"forward": 45, "loss": 3046, "backward": 97, "optimizer": 3}, 180, images=384, num_workers=16),
        "assigner",
        3191 / 178,
        (Trial(what="plain loss", change="loss_ota: 0", stage="loss", then_ms=31),),
    ),
    "H200: full 640 batch 64": Situation(
        on_gpu(816, {"forward": 93, "loss": 532, "backward": 186, "optimizer": 5}, 300, num_workers=16),
        "assigner",
        816 / 296,
        (Trial(what="plain loss", change="loss_ota: 0", stage="loss", then_ms=13),),
    ),
    "H200: full 320 batch 64": Situation(
        on_gpu(580, {"forward": 25, "loss": 488, "backward": 60, "optimizer": 5}, 120, num_workers=16), "assigner"
    ),
    "H200: tiny 640 batch 128": Situation(
        on_gpu(947, {"forward": 58, "loss": 766, "backward": 122}, 190, images=128, num_workers=16), "assigner"
    ),
    "marked assignment inside the loss": Situation(
        on_gpu(500, {"forward": 40, "loss": 10, "assign": 360, "backward": 85}, 140, num_workers=8), "assigner"
    ),
    "a healthy step": Situation(
        on_gpu(100, network(), 97, num_workers=8, workers={"read": 400}, limits=Limits(compute_ms=98)), "nothing"
    ),
    "a healthy step on a CPU": Situation(measured(100, network(), main_cpu=1.9, cores=2), "nothing"),
    "waits below three per cent": Situation(
        on_gpu(102, {**network(), "feed.wait": 2.5}, 97, num_workers=8, workers={"read": 780}), "nothing"
    ),
    "few workers, cores free": Situation(
        input_bound(400, 2, {"warp": 500, "color": 200, "read": 90}), "too few workers", 4.0, change="--workers 9"
    ),
    "few workers on a small machine": Situation(
        measured(
            300,
            {"feed.wait": 200, "forward": 40, "loss": 5, "backward": 50, "optimizer": 4},
            num_workers=1,
            workers={"augment": 295},
            cores=2,
            main_cpu=0.33,
        ),
        "too few workers",
        # Two cores, 394 ms of work for them: 197 ms at best.
        300 / 197,
        change="--workers 2",
    ),
    "workers that mostly decode": Situation(
        input_bound(400, 2, {"decode": 600, "warp": 190}, lines=(DECODE_LINE,)), "decode", change="--workers"
    ),
    "decode found by its line": Situation(
        input_bound(250, 2, {"fetch": 490}, lines=(DECODE_LINE,), cores=2), "decode", change="--cache-images"
    ),
    "large images, decoded and scaled each time": Situation(
        measured(
            400,
            {"feed.wait": 300, "forward": 40, "backward": 58},
            num_workers=2,
            workers={"fetch": 790},
            cores=2,
            main_cpu=0.25,
            lines=(
                HotLine(where="data.py:8", ms=500, text="i = cv2.imread(path)", function="__getitem__", in_worker=True),
                HotLine(where="data.py:9", ms=260, text="i = resize(i, s)", function="__getitem__", in_worker=True),
            ),
        ),
        "decode",
        # 30 ms of the rest, 46 of reading what is kept: the main thread's 100 ms remain.
        4.0,
    ),
    "the store misses": Situation(input_bound(200, 16, {"store miss": 2400, "warp": 700}), "decode"),
    "every core augments": Situation(
        input_bound(400, 16, {"mosaic": 3000, "warp": 2500, "decode": 500}), "input", change="--device-augment"
    ),
    "a slow disk": Situation(
        input_bound(400, 8, {"read": 3100}, worker_cpu_ms=600.0, worker_blocked_ms=2400.0, cores=8),
        "storage",
        change="--device-augment",
    ),
    "more workers than cores": Situation(
        input_bound(300, 64, {"read": 18_000}, worker_cpu_ms=4700.0), "too many workers", change="--device-augment"
    ),
    "workers idle, batches late": Situation(input_bound(150, 8, {"read": 300}), "hand-over", change="prefetch_factor"),
    "no workers": Situation(
        measured(300, {"feed.wait": 5, "fetch": 160, "collate": 25, "forward": 60, "backward": 45}, cores=4),
        "no workers",
        change="--workers",
    ),
    "no workers, and decoding": Situation(
        measured(
            300,
            {"feed.wait": 5, "fetch": 185, "forward": 60, "backward": 45},
            cores=4,
            lines=(HotLine(where="data.py:8", ms=170, text="image = cv2.imdecode(data)", function="__getitem__"),),
        ),
        "no workers",
        change="--workers",
    ),
    "no workers, and more decoding than workers can do": Situation(
        measured(
            300,
            {"feed.wait": 5, "fetch": 275, "forward": 10, "backward": 10},
            cores=2,
            lines=(HotLine(where="data.py:8", ms=260, text="image = cv2.imdecode(data)", function="__getitem__"),),
        ),
        "decode",
        change="--cache-images",
    ),
    "a Python loop with .item()": Situation(
        measured(
            170,
            {"forward": 40, "backward": 55},
            lines=LOOP,
            waits=(WaitSite(where="loop.py:20", per_step=640, text="total += score.item()"),),
        ),
        "python loop",
        170 / 103,
        change="loop.py:20",
    ),
    "one .item() that costs nothing": Situation(
        measured(
            100,
            network(),
            lines=(HotLine(where="loop.py:20", ms=0.4, text="loss.item()", function="main"),),
            waits=(WaitSite(where="loop.py:20", per_step=1, text="loss.item()"),),
        ),
        "nothing",
    ),
    "collections in every step": Situation(measured(125, {**network(), "gc": 25}), "garbage collector", 1.25),
    "a slow optimizer": Situation(
        measured(100, {"forward": 20, "backward": 30, "optimizer": 35, "ema": 14}), "optimizer", change="fused=True"
    ),
    "H200: the demo, epochs of 8 steps": Situation(H200_DEMO, "validation", change="--notest"),
    "validation after every few steps": Situation(measured(150, {**network(), "validate": 50}), "validation"),
    "checkpoints all the time": Situation(measured(130, {**network(), "checkpoint": 30}), "checkpoint"),
    "logging takes a quarter": Situation(measured(133, {**network(), "log": 33}), "logging"),
    "a copy from pageable memory": Situation(
        on_gpu(120, {**network(), "copy": 20}, 96), "blocking copy", 1.18, change="pin_memory=True"
    ),
    "loss.item() in every step": Situation(
        on_gpu(
            140,
            {"forward": 20, "loss": 4, "backward": 25, "optimizer": 5},
            100,
            launches=1500,
            launch_us=5.0,
            waits=(WaitSite(where="train.py:30", per_step=1, text="running += loss.item()"),),
        ),
        "logging sync",
        1.4,
        change="train.py:30",
    ),
    "a few waits in the model": Situation(
        on_gpu(
            140,
            {"forward": 60, "loss": 4, "backward": 65, "optimizer": 5},
            110,
            waits=(WaitSite(where="model.py:12", per_step=3, text="if mask.any():"),),
        ),
        "host-device waits",
    ),
    "kernels too small": Situation(
        on_gpu(
            25,
            {"forward": 9, "loss": 3, "backward": 10, "optimizer": 3},
            8,
            images=8,
            launches=4000,
            launch_us=6.0,
        ),
        "kernel launches",
        25 / 8.4,
        change="graphs",
    ),
    # bench/results/model_step_h200_202611.md: 34.8 ms eager, 5.1 ms as a graph (its kernels). How the 34.8 ms divide
    # into stages was not recorded, and the launches, as fast as they are one by one, would explain only 5 ms of them.
    "H200: tiny 320 batch 16, launched one by one": Situation(
        on_gpu(34.8, {"forward": 12, "loss": 2, "backward": 17.8, "optimizer": 3}, 4.9, images=16, launches=1200),
        "kernel launches",
        34.8 / 5.14,
        change="graphs",
    ),
    "H200: batch 32, --fast tried out part by part": Situation(
        H200_BATCH_32, "too few workers", 3469 / 727, change="--fast", end_to_end=(ALL_OF_FAST,)
    ),
    "H200: batch 32, launches and decoding, --fast tried out part by part": Situation(
        H200_DECODES, "decode", 4439 / 698, change="--fast", end_to_end=(replace(ALL_OF_FAST, compute_ms=7.1),)
    ),
    "H200: batch 32, launches, and workers that keep up": Situation(
        replace(H200_DECODES, num_workers=8, limits=Limits(compute_ms=23.9, transfer_ms=24.3, input_ms=11.4)),
        "kernel launches",
        change="--fast",
        end_to_end=(replace(ALL_OF_FAST, compute_ms=7.1),),
    ),
    "launches and augmentation, --fast is the answer to both": Situation(
        replace(H200_DECODES, usable_cores=2, limits=Limits()),
        "decode",
        change="--fast",
        end_to_end=(replace(ALL_OF_FAST, covers=(CUDA_GRAPH, ON_DEVICE)),),
    ),
    "input too slow, --fast tried out part by part": Situation(
        input_bound(400, 16, {"mosaic": 3000, "warp": 2500, "decode": 500}),
        "input",
        # 64 images whose parameters alone take 50 ms to draw: more than the network and its augmentation.
        400 / 50,
        change="--fast",
        end_to_end=(replace(ALL_OF_FAST, compute_ms=38, device_ms=37, input_device_ms=2, input_ms=50),),
    ),
    "a healthy step that --fast makes faster": Situation(
        on_gpu(100, network(), 97, num_workers=8, workers={"read": 400}),
        "everything that --fast switches on",
        100 / 42,
        change="--fast",
        end_to_end=(replace(ALL_OF_FAST, compute_ms=41, device_ms=40, input_device_ms=2),),
    ),
    "a healthy step that --fast does not make faster": Situation(
        on_gpu(100, network(), 97, num_workers=8, workers={"read": 400}),
        "nothing",
        end_to_end=(replace(ALL_OF_FAST, compute_ms=99, device_ms=97),),
    ),
    "channels_last tried out": Situation(
        on_gpu(100, network(), 97),
        "channels_last",
        100 / 80,
        (Trial(what="channels_last", change="--channels-last", stage="forward+backward", then_ms=70),),
        change="--channels-last",
    ),
    "a trial that is slower": Situation(
        on_gpu(100, network(), 97),
        "nothing",
        None,
        (Trial(what="compile", change="--compile on", stage="forward+backward", then_ms=95),),
    ),
    "unexplained time": Situation(measured(200, {"forward": 40, "backward": 55}), "unexplained"),
    "time outside of all stages, at one line": Situation(
        measured(
            200,
            {"forward": 40, "backward": 55},
            lines=(HotLine(where="mine.py:7", ms=99, text="rows.sort()", function="main"),),
        ),
        "slow code",
        200 / 97,
        change="mine.py:7",
    ),
    "a slow __getitem__ that no number of workers makes up for": Situation(
        measured(
            1203,
            {"feed.wait": 1120, "forward": 35, "loss": 3, "backward": 40, "optimizer": 3},
            num_workers=2,
            workers={"fetch": 2320, "collate": 40},
            cores=2,
            main_cpu=0.07,
            lines=(SLOW_LINE,),
        ),
        "slow input code",
        change="data.py:31",
    ),
    "a data set that sleeps, without workers": Situation(
        measured(
            300,
            {"feed.wait": 2, "fetch": 248, "forward": 20, "backward": 28},
            cores=2,
            main_cpu=0.2,
            worker_blocked_ms=240.0,
            lines=(HotLine(where="data.py:9", ms=240, stage="fetch", text="time.sleep(0.01)", function="__getitem__"),),
        ),
        "storage",
    ),
    "a main thread that sleeps": Situation(
        measured(
            150,
            network(),
            main_cpu=0.6,
            lines=(HotLine(where="train.py:40", ms=50, text="time.sleep(0.05)", function="main"),),
        ),
        "sleeping",
        1.5,
        change="train.py:40",
    ),
    "a loop of short operations, without reads": Situation(
        measured(
            200,
            {"forward": 40, "backward": 90},
            lines=(
                HotLine(where="ema.py:12", ms=50, text="a.mul_(d).add_(b)", function="update_average", runs=900),
                HotLine(where="ema.py:11", ms=18, text="for a, b in pairs:", function="update_average", runs=901),
            ),
        ),
        "python loop",
        200 / 132,
        change="ema.py:12",
    ),
    "a loop in the loss that backward() goes through": Situation(
        measured(
            200,
            {"forward": 20, "backward": 90},
            lines=(HotLine(where="loss.py:5", ms=90, text="t += f(a)", function="loss", runs=900, in_graph=True),),
        ),
        "python loop",
        # 90 ms of the loop, and 90 / 110 of the backward pass.
        200 / 36.4,
    ),
    "layers called in a loop are no bottleneck": Situation(
        measured(
            100,
            network(),
            lines=(HotLine(where="net.py:8", ms=35, stage="forward", text="x = f(x)", function="forward", runs=24),),
        ),
        "nothing",
    ),
    "every step is logged": Situation(
        measured(
            140,
            network(),
            lines=(HotLine(where="train.py:50", ms=40, text="writer.add_histogram(n, p)", function="main", runs=1),),
        ),
        "logging",
        1.4,
    ),
    "workers started for every short epoch": Situation(
        measured(150, {**network(), "feed.start": 50}, num_workers=2, workers={"fetch": 60}), "worker start", 1.42
    ),
    "batches of 4": Situation(
        measured(
            10, {"forward": 3, "loss": 0.3, "backward": 4, "optimizer": 2}, images=4, network_runs=batch_runs(1.0, 6.0)
        ),
        "small batches",
        # Per image 0.24 ms of the network; the other 3 ms stay.
        (32 / (7 * (6 + 32 * 1.0) / 10 + 3)) / (4 / 10),
        change="batch_size",
    ),
    "batches of 4 that are large enough": Situation(
        measured(
            10,
            {"forward": 4, "loss": 0.3, "backward": 5, "optimizer": 0.3},
            images=4,
            network_runs=batch_runs(2.2, 0.4),
        ),
        "nothing",
    ),
    "more threads than cores": Situation(
        measured(
            100,
            network(),
            num_threads=16,
            cores=2,
            network_runs=(NetworkRun(ms=90, images=64, threads=16), NetworkRun(ms=30, images=64, threads=2)),
        ),
        "too many threads",
        100 / 36,
        change="OMP_NUM_THREADS=2",
    ),
    "one thread, and more cores": Situation(
        measured(
            100,
            network(),
            num_threads=1,
            cores=2,
            network_runs=(NetworkRun(ms=90, images=64, threads=1), NetworkRun(ms=50, images=64, threads=2)),
        ),
        "too few threads",
        change="OMP_NUM_THREADS=2",
    ),
    "anomaly detection left on": Situation(
        measured(
            100,
            network(),
            network_runs=(
                NetworkRun(ms=90, images=64, threads=1),
                NetworkRun(ms=45, images=64, threads=1, without="anomaly detection"),
            ),
        ),
        "anomaly detection",
        100 / 55,
        change="set_detect_anomaly(False)",
    ),
    "gradients of a network that is never updated": Situation(
        measured(
            100,
            network(),
            network_runs=(
                NetworkRun(ms=90, images=64, threads=1),
                NetworkRun(ms=60, images=64, threads=1, without="unneeded gradients", detail="target.0.weight"),
            ),
        ),
        "unneeded gradients",
        100 / 70,
        change="torch.no_grad()",
    ),
    "statistics of a loop, written by another function": Situation(
        measured(
            130,
            network(),
            lines=(
                HotLine(
                    where="log.py:9", ms=30, text="counts = histogram(w)", function="all_weights", runs=200, writes=True
                ),
            ),
        ),
        "logging",
        1.3,
    ),
    "workers that open their files again for every short epoch": Situation(
        # 2 x 40 ms of two workers in a step of 60: without opening files, they need 20 ms.
        measured(
            60,
            {**network(0.2), "feed.start": 40},
            num_workers=2,
            workers={"fetch": 80},
            cores=2,
            main_cpu=0.33,
            worker_cpu_ms=80.0,
            worker_start_ms=60.0,
        ),
        "worker start",
        60 / 21,
    ),
}
