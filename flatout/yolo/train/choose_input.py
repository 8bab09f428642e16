"""What `--fast` and `--workers auto` mean on this machine: one function decides it, and says why.

    choose_input(asked, machine, costs)  -->  choices, best first: what it is, how it is set up, why

Whoever opens the input tries them in this order, on all ranks together. Pure arithmetic: nothing is measured here, no
file is opened, and there is no torch. docs/fast.md has a table of decisions, which a test compares with this function.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flatout.feed import plan_workers
from flatout.profiler import KEPT_DECODED, Demands

Place = Literal["device", "ram", "off"]
"""Where decoded pictures stay; off: nowhere, files are decoded each time."""
AUTO: Literal["auto"] = "auto"
"""`--workers auto`: as many as the input needs here, by measurement."""

WITHIN = 1.02
"""Ways this close to the fastest are as good; the one that takes least of the machine is chosen among them."""
ROOM = 0.5
"""Share of free memory, of the GPU and of the host, that kept pictures may take."""
FEW_CORES = 8
"""With more, nvJPEG is left alone. Sixteen cores were as fast at 320 px and faster at 640 px
(bench/results/augment_store_h200_202611.md); where fewer cores fall behind was not measured, only estimated."""
DEVICE_WORKERS = 2
"""Where the device augments they only draw numbers and move boxes: two are enough for any GPU."""
SLOTS_AHEAD, FEWEST_SLOTS = 2, 4

HALF_BYTES = 0.5
"""What 4:2:0 leaves of a decoded picture."""
RENDER_4_2_0 = 1.38
"""How much longer augmenting takes from it (bench/results/augment_kornia_h200_202611.md)."""
TILES = 4
"""Pictures of a mosaic."""
PINNED_GB_S = 25.0
"""From pinned memory to the device: half of what an H200's link gives, as the generation before it had."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command says about the input: yes (True), no (False), or let flatout decide (None)."""

    fast: bool = False
    device_augment: bool | None = False
    """Yes beside `fast` counts where nothing is measured; where something is, the fastest way is taken."""
    fast_dataloader: bool | None = False
    """Decode once and augment in fewer passes."""
    cache_images: bool = False
    store_420: bool = False
    """Pictures on the device may be kept with colours at half size."""
    scaled_decode: bool | None = False
    """Decode large JPEG files at a half, a quarter or an eighth of their size."""
    gpu_decode: bool | None = False
    """Decode JPEG files by the GPU, where pictures stay there."""
    workers: int | Literal["auto"] = 8

    @property
    def leaves_something_open(self) -> bool:
        return self.fast or self.workers == AUTO

    @property
    def flag(self) -> str:
        """The flag that leaves it open, for the log."""
        return "--fast" if self.fast else "--workers auto"

    @property
    def decodes_once(self) -> bool:
        """Unless measuring says otherwise: nobody loses by it, so what is left to us is a yes."""
        return self.fast_dataloader is not False

    @property
    def shrinks(self) -> bool:
        return self.scaled_decode is not False

    def on_device(self, *, gpu: bool) -> bool:
        """Whether the device augments, unless measuring says otherwise: left to us, wherever there is a GPU."""
        return gpu if self.device_augment is None else self.device_augment


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a rank finds when the network is built and the input is not."""

    cores: int
    """That this process may use; ranks on this machine share them."""
    ram_free_bytes: int
    gpu_free_bytes: int | None = None
    """Of this rank's GPU; None: it trains on the CPU."""
    nvjpeg: bool = False
    """Whether there seems to be a decoder on the GPU."""
    ranks: int = 1
    ranks_here: int = 1

    @property
    def has_gpu(self) -> bool:
        return self.gpu_free_bytes is not None

    @property
    def gpu_room_bytes(self) -> float:
        return ROOM * (self.gpu_free_bytes or 0)

    @property
    def ram_room_bytes(self) -> float:
        """For decoded pictures, pinned ones too."""
        return ROOM * self.ram_free_bytes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Milliseconds of one core where nothing else is said."""

    step_ms: float
    """The network's part of a step, with its batch ready, on the clock."""
    main_cpu_ms: float
    """CPU time of it: all of `step_ms` and more on a CPU, a fraction of it on a GPU."""
    decode_ms: float
    augment_ms: float
    """Per picture."""
    draw_ms: float
    """Per picture: what workers still do when the device augments."""
    render_ms: float
    """A batch, augmented on the device."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What the pictures of a training take, and what they and a step cost."""

    batch_size: int
    """Of this rank."""
    num_pictures: int
    decoded_bytes: int
    """All pictures, at the size of the training."""
    epochs: int
    """A store is built once and pays from the second epoch on."""
    measured: Measured | None = None
    """None: the run is too short to measure, or nothing depends on it."""


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """How an input is set up."""

    keep: Place
    workers: int
    subsampled: bool = False
    """Kept on the device as 4:2:0: half of the bytes, not quite the same pixels."""
    gpu_decode: bool = False
    shrunk: bool = False
    """Large JPEG files are decoded at a part of their size."""
    painter: Literal["fast", "classic"] = "classic"
    slots: int | None = None
    """Batches under way; None: the feed's own rule."""

    @property
    def on_device(self) -> bool:
        """Pictures that are kept on the device are no use to workers: the device augments them."""
        return self.keep == "device"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run the input."""

    what: str
    settings: InputSettings
    why: str
    img_s: float | None = None
    """Predicted speed; None where nothing was measured."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def choose_input(asked: Asked, machine: Machine, costs: Costs) -> tuple[Choice, ...]:
    """Ways to run the input, best first. Without `fast` there is one: what the command says, or an error.

    What was measured decides where something is left open; else a rule does. A device may turn out to be unable; what
    workers augment always can be built, so choices after the first of those are for comparison.
    """
    if costs.measured is None or not is_worth_measuring(asked, gpu=machine.has_gpu):
        return tuple(_by_rule(asked, machine, costs))
    return tuple(_by_measurement(asked, machine, costs, costs.measured))


def is_worth_measuring(asked: Asked, *, gpu: bool) -> bool:
    """Whether a measurement could change anything: workers that only draw numbers are two on any machine."""
    if asked.on_device(gpu=gpu):
        return asked.fast and asked.decodes_once
    return asked.leaves_something_open


def num_workers(asked: int | str, batch_size: int, *, cores: int, ranks_here: int) -> int:
    """YOLOv7's rule: no more than cores per rank, pictures per batch, or were asked for; one picture needs none.

    "auto" that nobody has measured is 80 % of the cores.
    """
    wanted = plan_workers(asked, cores=cores, gpus=ranks_here).train if isinstance(asked, str) else asked
    return min(max(1, cores // ranks_here), batch_size if batch_size > 1 else 0, wanted)


def most_workers(asked: Asked, machine: Machine, costs: Costs) -> int:
    """What `--workers` allows; `auto` allows a worker for every core."""
    wanted = machine.cores if asked.workers == AUTO else asked.workers
    return num_workers(wanted, costs.batch_size, cores=machine.cores, ranks_here=machine.ranks_here)


# By rule: what the command says, and what --fast stands for where nothing is measured.


def _by_rule(asked: Asked, machine: Machine, costs: Costs) -> Iterator[Choice]:
    is_open = is_worth_measuring(asked, gpu=machine.has_gpu)
    why = "too short a run to measure" if is_open else "as the command says"
    if asked.on_device(gpu=machine.has_gpu):
        yield from _on_device(asked, machine, costs, why, subsampled=asked.store_420)
        if asked.fast:
            yield _instead_of_device(asked, machine, costs)
        return
    keep: Place = "ram" if asked.decodes_once or asked.cache_images else "off"
    yield _by_workers(keep, workers_by_rule(asked, machine, costs), asked, machine, costs, why)


def _instead_of_device(asked: Asked, machine: Machine, costs: Costs) -> Choice:
    workers = workers_by_rule(asked, machine, costs)
    return _by_workers("ram", workers, asked, machine, costs, "if the device cannot augment")


def workers_by_rule(asked: Asked, machine: Machine, costs: Costs) -> int:
    """What `--workers` stands for where nothing is measured."""
    return num_workers(asked.workers, costs.batch_size, cores=machine.cores, ranks_here=machine.ranks_here)


def rule_in_words(asked: Asked, first: Choice) -> str:
    """What holds where nothing is measured, in one line."""
    if first.settings.on_device:
        what = "pictures are kept and augmented on the device"
    else:
        rule = " (80 % of the cores, no more than pictures of a batch)" if asked.workers == AUTO else ""
        count = first.settings.workers
        what = f"{count} worker{'' if count == 1 else 's'}{rule}"
    return f"{asked.flag}, too short a run to measure: {what}."


# By measurement: every way is predicted by the model of the profiler's verdict.


def _by_measurement(asked: Asked, machine: Machine, costs: Costs, measured: Measured) -> Iterator[Choice]:
    best, *others = _ranked(_ways(asked, machine, costs, measured))
    yield from _choices_of(best, asked, machine, costs)
    if best.keep == "device":
        yield _instead_of_device(asked, machine, costs)
    for way in others:
        yield from _choices_of(way, asked, machine, costs)


class _Way(NamedTuple):
    keep: Place
    subsampled: bool
    workers: int
    step_ms: float


def _ranked(ways: Iterable[_Way]) -> Iterator[_Way]:
    """The best way of every place, best first."""
    ways = list(ways)
    while ways:
        best = _best(ways)
        yield best
        ways = [way for way in ways if way.keep != best.keep]


def _best(ways: list[_Way]) -> _Way:
    """The fastest, and of those that are about as fast the one that takes least."""
    fastest_ms = min(way.step_ms for way in ways)
    good = [way for way in ways if way.step_ms <= WITHIN * fastest_ms]
    return min(good, key=lambda way: (way.subsampled, way.workers, way.keep != "off", way.step_ms))


def _ways(asked: Asked, machine: Machine, costs: Costs, measured: Measured) -> Iterator[_Way]:
    cores = max(1.0, machine.cores / machine.ranks)
    for keep in _places(asked, machine, costs):
        for subsampled in (False, True) if keep == "device" and asked.store_420 else (False,):
            for workers in range(min(int(cores), most_workers(asked, machine, costs)) + 1):
                step_ms = _step_ms(keep, subsampled, workers, cores, machine, costs, measured)
                yield _Way(keep, subsampled, workers, step_ms)


def _places(asked: Asked, machine: Machine, costs: Costs) -> Iterator[Place]:
    if (given := place_given(asked)) is not None:
        yield given
        return
    yield "off"
    if costs.epochs < 2:
        return
    if costs.decoded_bytes <= machine.ram_room_bytes:
        yield "ram"
    least_bytes = costs.decoded_bytes * (HALF_BYTES if asked.store_420 else 1)
    if (
        machine.has_gpu
        and asked.device_augment is not False
        and least_bytes <= machine.gpu_room_bytes + machine.ram_room_bytes
    ):
        yield "device"


def place_given(asked: Asked) -> Place | None:
    """Where pictures have to be kept because the command says so; None: that is for us to choose."""
    if asked.fast and asked.decodes_once:
        return None
    return "ram" if asked.cache_images or asked.decodes_once else "off"


def _step_ms(
    keep: Place, subsampled: bool, workers: int, cores: float, machine: Machine, costs: Costs, measured: Measured
) -> float:
    if keep == "device":
        picture_ms, pinned_ms = measured.draw_ms, _pinned_ms(machine, costs, subsampled=subsampled)
        render_ms = measured.render_ms * (RENDER_4_2_0 if subsampled else 1)
    else:
        picture_ms = measured.decode_ms * (1.0 if keep == "off" else KEPT_DECODED) + measured.augment_ms
        render_ms = pinned_ms = 0.0
    input_ms = costs.batch_size * picture_ms
    demands = Demands(
        consumer_ms=measured.step_ms + render_ms,
        input_ms=input_ms,
        cpu_ms=measured.main_cpu_ms + input_ms,
        workers=workers,
        cores=cores,
    )
    return max(demands.step_ms, pinned_ms)


def _pinned_ms(machine: Machine, costs: Costs, *, subsampled: bool) -> float:
    """What a batch takes to come from pinned memory, as far as its pictures do not fit on the device."""
    share = HALF_BYTES if subsampled else 1.0
    away = max(0.0, 1 - machine.gpu_room_bytes / max(1.0, share * costs.decoded_bytes))
    picture_bytes = costs.decoded_bytes / max(1, costs.num_pictures)
    return away * costs.batch_size * TILES * share * picture_bytes / PINNED_GB_S / 1e6


def _choices_of(way: _Way, asked: Asked, machine: Machine, costs: Costs) -> Iterator[Choice]:
    img_s = 1e3 * costs.batch_size / way.step_ms
    why = f"{img_s:,.0f} img/s expected"
    if way.keep == "device":
        yield from _on_device(asked, machine, costs, why, subsampled=way.subsampled, img_s=img_s)
    else:
        slots = max(FEWEST_SLOTS, way.workers + SLOTS_AHEAD)
        yield _by_workers(way.keep, way.workers, asked, machine, costs, why, slots=slots, img_s=img_s)


# Choices in words.


def _on_device(
    asked: Asked, machine: Machine, costs: Costs, why: str, *, subsampled: bool, img_s: float | None = None
) -> Iterator[Choice]:
    """Decoded by the GPU where that may pay, and by the CPU."""
    workers = workers_by_rule(asked, machine, costs)
    for gpu_decode in (True, False) if _decodes_on_gpu(asked, machine, costs) else (False,):
        decodes = [f"JPEG files decoded by the GPU, as {_cores(machine.cores)} few"] if gpu_decode else []
        yield Choice(
            what=f"pictures kept on the device{' as 4:2:0' if subsampled else ''}, augmented there",
            settings=InputSettings(
                keep="device",
                workers=min(DEVICE_WORKERS, workers),
                subsampled=subsampled,
                gpu_decode=gpu_decode,
                shrunk=asked.shrinks,
                painter="fast" if asked.decodes_once else "classic",
            ),
            why="; ".join([why, *decodes, _device_room(machine, costs, subsampled=subsampled)]),
            img_s=img_s,
        )


def _decodes_on_gpu(asked: Asked, machine: Machine, costs: Costs) -> bool:
    """Only if all fit: pictures that stay behind must be where workers find them, in a store."""
    fits = costs.decoded_bytes <= min(machine.gpu_room_bytes, machine.ram_room_bytes)
    return asked.gpu_decode is not False and machine.nvjpeg and machine.cores <= FEW_CORES and fits


def _by_workers(
    keep: Place,
    workers: int,
    asked: Asked,
    machine: Machine,
    costs: Costs,
    why: str,
    *,
    slots: int | None = None,
    img_s: float | None = None,
) -> Choice:
    where = "kept decoded in RAM" if keep == "ram" else "decoded each time"
    painter: Literal["fast", "classic"] = "fast" if asked.decodes_once else "classic"
    return Choice(
        what=f"pictures {where}, augmented by {_workers(workers)}",
        settings=InputSettings(keep=keep, workers=workers, shrunk=asked.shrinks, painter=painter, slots=slots),
        why="; ".join([why, *([_ram_room(machine, costs)] if keep == "ram" else [])]),
        img_s=img_s,
    )


def _device_room(machine: Machine, costs: Costs, *, subsampled: bool) -> str:
    if not machine.has_gpu:
        return "the device is the CPU"
    needed = costs.decoded_bytes * (HALF_BYTES if subsampled else 1)
    if needed <= machine.gpu_room_bytes:
        return f"all {_size(needed)} fit into GPU memory"
    here = f"{_size(machine.gpu_room_bytes)} of {_size(needed)} in GPU memory"
    if needed <= machine.gpu_room_bytes + machine.ram_room_bytes:
        return f"{here}, the others in pinned RAM"
    return f"{here}, {_size(machine.ram_room_bytes)} in pinned RAM, the others brought by the workers"


def _ram_room(machine: Machine, costs: Costs) -> str:
    if costs.decoded_bytes <= machine.ram_room_bytes:
        return f"all {_size(costs.decoded_bytes)} fit into RAM"
    fitting = f"{_size(machine.ram_room_bytes)} of {_size(costs.decoded_bytes)} fit into RAM"
    return f"{fitting}, the others are decoded each time"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def _workers(count: int) -> str:
    return f"{count or 'no'} worker{'' if count == 1 else 's'}"


def _cores(count: int) -> str:
    return "1 core is" if count == 1 else f"{count} cores are"
