"""Choosing the input for a machine: what `--fast` and `--workers auto` switch on here, and why.

    choose_input(asked, machine, costs)  -->  choices, best first: description, settings, reason

`open_input` tries the choices in this order, on all ranks together. Pure arithmetic: nothing is measured here, no file
is opened, and torch is not imported. docs/fast.md has a table of decisions, which a test compares with this function.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flatout.errors import counted
from flatout.feed import plan_workers
from flatout.profiler import KEPT_DECODED, Demands

ImagePlace = Literal["device", "ram", "off"]
"""Where decoded images are kept; off: nowhere, files are decoded each time."""
AUTO: Literal["auto"] = "auto"
"""`--workers auto`: as many workers as the input needs here, by measurement."""

TOLERANCE = 1.02
"""Candidates whose step takes at most this factor longer than the fastest count as equal; among them the one that takes
the fewest resources wins."""
MEMORY_SHARE = 0.5
"""Share of the free memory, of the GPU and of the host, that kept images may take."""
FEW_CORES = 8
"""With at most so many cores, the log mentions --gpu-decode. Sixteen were as fast as nvJPEG at 320 px, faster at 640
px (bench/results/augment_store_h200_202611.md); where fewer cores fall behind was not measured, only estimated."""
DEVICE_WORKERS = 2
"""Workers when the device augments: they only draw parameters and transform boxes, so two are enough for any GPU."""
SLOTS_AHEAD, MIN_SLOTS = 2, 4
"""Slots beyond one per worker, and the smallest number of slots."""

SUBSAMPLED_BYTES = 0.5
"""Size of a decoded image in 4:2:0, relative to RGB."""
SUBSAMPLED_RENDER_TIME = 1.38
"""Time to augment images in 4:2:0, relative to RGB (bench/results/augment_kornia_h200_202611.md)."""
TILES = 4
"""Images in a mosaic."""
PINNED_GB_S = 25.0
"""Bandwidth from pinned memory to the device: half of an H200's link, which is what the previous generation had."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of a command that concern the input: True, False, or None where flatout decides."""

    fast: bool = False
    device_augment: bool | None = False
    """Keep and augment images on the device. With `fast`, True applies only if nothing is measured: a measurement
    decides for the fastest candidate."""
    fast_dataloader: bool | None = False
    """Decode once."""
    cache_images: bool = False
    store_420: bool = False
    """Images on the device may be kept with colours at half resolution."""
    scaled_decode: bool | None = False
    """Decode large JPEG files at a half, a quarter or an eighth of their size."""
    gpu_decode: bool = False
    """Decode JPEG files on the GPU, if images are kept there. Never left to flatout: the pixels differ."""
    workers: int | Literal["auto"] = 8

    @property
    def leaves_choice(self) -> bool:
        """Whether anything is left to flatout."""
        return self.fast or self.workers == AUTO

    @property
    def flag(self) -> str:
        """The flag that leaves the choice, for the log."""
        return "--fast" if self.fast else "--workers auto"

    @property
    def decodes_once(self) -> bool:
        """Whether images are decoded once, unless a measurement decides otherwise; undecided means yes."""
        return self.fast_dataloader is not False

    @property
    def shrinks(self) -> bool:
        """Whether large JPEG files may be decoded at a part of their size; undecided means yes."""
        return self.scaled_decode is not False

    def on_device(self, *, gpu: bool) -> bool:
        """Whether the device augments, unless a measurement decides otherwise; undecided means yes if it is a GPU."""
        return gpu if self.device_augment is None else self.device_augment


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The resources of a rank after its network is built and before its input is opened."""

    cores: int
    """Cores that this process may use; the ranks on this machine share them."""
    ram_free_bytes: int
    gpu_free_bytes: int | None = None
    """Free memory of this rank's GPU; None: it trains on the CPU."""
    nvjpeg: bool = False
    """Whether the GPU can probably decode JPEG files."""
    ranks_here: int = 1
    """Ranks on this machine; those on other machines have cores of their own."""

    @property
    def has_gpu(self) -> bool:
        return self.gpu_free_bytes is not None

    @property
    def gpu_budget_bytes(self) -> float:
        """GPU memory for decoded images."""
        return MEMORY_SHARE * (self.gpu_free_bytes or 0)

    @property
    def ram_budget_bytes(self) -> float:
        """Host memory for decoded images, pinned ones included."""
        return MEMORY_SHARE * self.ram_free_bytes


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measured costs in milliseconds, of one core unless noted."""

    step_ms: float
    """Wall time of the network's part of a step, with its batch ready."""
    main_cpu_ms: float
    """CPU time of that: all of `step_ms` and more on a CPU, a fraction of it on a GPU."""
    decode_ms: float
    """Per sample."""
    augment_ms: float
    """Per sample."""
    draw_ms: float
    """Per sample: drawing parameters, which workers still do when the device augments."""
    render_ms: float
    """Per batch, on the device."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Memory that the images of a training need, and the time of its steps."""

    batch_size: int
    """Samples per batch of this rank."""
    num_pictures: int
    """Images in the data set."""
    decoded_bytes: int
    """Size of all images, decoded at the size of the training."""
    epochs: int
    """A store is built once and pays off from the second epoch on."""
    measured: Measured | None = None
    """None: the run is too short to measure, or no decision depends on it."""


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """How an input is set up."""

    keep: ImagePlace
    workers: int
    subsampled: bool = False
    """Keep images on the device as 4:2:0: half of the bytes, not quite the same pixels."""
    gpu_decode: bool = False
    shrunk: bool = False
    """Decode large JPEG files at a part of their size."""
    slots: int | None = None
    """Slots of the feed; None: the feed's own rule."""

    @property
    def on_device(self) -> bool:
        """Whether the device augments: it does with the images that are kept there, which workers cannot read."""
        return self.keep == "device"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way to run the input, described for the log."""

    what: str
    settings: InputSettings
    why: str
    img_s: float | None = None
    """Predicted speed; None if nothing was measured."""

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def choose_input(asked: Asked, machine: Machine, costs: Costs) -> tuple[Choice, ...]:
    """Ways to run the input, best first. Without `fast` there is only the one that the command asks for.

    A measurement decides if there is one and something is left open; else a rule does. Opening an input on a device may
    fail; one that workers augment can always be opened, so choices after the first of those are only for comparison.
    """
    if costs.measured is None or not depends_on_measurement(asked, gpu=machine.has_gpu):
        return tuple(_Chooser(asked, machine, costs).by_rule())
    return tuple(_Chooser(asked, machine, costs).by_measurement(costs.measured))


def depends_on_measurement(asked: Asked, *, gpu: bool) -> bool:
    """Whether a measurement could change the choice. Not if the command puts augmentation on the device: the workers
    then only draw parameters, and two are enough on any machine."""
    if asked.on_device(gpu=gpu):
        return asked.fast and asked.decodes_once
    return asked.leaves_choice


def num_workers(asked: int | str, batch_size: int, *, cores: int, ranks_here: int) -> int:
    """YOLOv7's rule: the smallest of cores per rank, samples per batch and `asked`; 0 for batches of one.

    "auto" without a measurement is 80 % of the cores.
    """
    wanted = plan_workers(asked, cores=cores, gpus=ranks_here).train if isinstance(asked, str) else asked
    return min(max(1, cores // ranks_here), batch_size if batch_size > 1 else 0, wanted)


def most_workers(asked: Asked, machine: Machine, costs: Costs) -> int:
    """The largest number of workers that `--workers` allows; `auto` allows one per core."""
    wanted = machine.cores if asked.workers == AUTO else asked.workers
    return num_workers(wanted, costs.batch_size, cores=machine.cores, ranks_here=machine.ranks_here)


def why_not_on_gpu(machine: Machine, costs: Costs) -> str:
    """Why the GPU cannot decode JPEG files; empty if it can."""
    if not machine.nvjpeg:
        return "that takes an NVIDIA GPU and torchvision"
    # Others would have to be in a store for the workers.
    if costs.decoded_bytes > min(machine.gpu_budget_bytes, machine.ram_budget_bytes):
        return "not all images fit into half of the free GPU memory and half of the free RAM"
    return ""


def remark_on_gpu_decode(asked: Asked, machine: Machine, costs: Costs, first: Choice) -> str:
    """For the log: why --gpu-decode has no effect, or when it might help; empty if there is nothing to say."""
    why_not = why_not_on_gpu(machine, costs) if first.settings.on_device else "images are not kept on the GPU"
    if asked.gpu_decode:
        return f"--gpu-decode has no effect: {why_not}." if why_not else ""
    if why_not or machine.cores > FEW_CORES:
        return ""
    return (
        f"With only {counted(machine.cores, 'core')}, --gpu-decode may decode JPEG files sooner; their pixels then "
        "differ slightly."
    )


def describe_rule(asked: Asked, first: Choice) -> str:
    """One line for the log of a run that is too short to measure."""
    if first.settings.on_device:
        what = "images are kept and augmented on the device"
    else:
        rule = " (80 % of the cores, at most one per image of a batch)" if asked.workers == AUTO else ""
        what = f"it gets {counted(first.settings.workers, 'worker')}{rule}"
    return f"{asked.flag}: the run is too short to measure, so {what}."


def required_location(asked: Asked) -> ImagePlace | None:
    """Where the command says that images are kept; None: flatout chooses."""
    if asked.fast and asked.decodes_once:
        return None
    return "ram" if asked.cache_images or asked.decodes_once else "off"


class _Candidate(NamedTuple):
    keep: ImagePlace
    subsampled: bool
    workers: int
    step_ms: float


def _ranked(candidates: Iterable[_Candidate]) -> Iterator[_Candidate]:
    """The best candidate of every location, best first."""
    candidates = list(candidates)
    while candidates:
        best = _best(candidates)
        yield best
        candidates = [each for each in candidates if each.keep != best.keep]


def _best(candidates: list[_Candidate]) -> _Candidate:
    """The candidate that takes the fewest resources among those that are about as fast as the fastest."""
    fastest_ms = min(each.step_ms for each in candidates)
    good = [each for each in candidates if each.step_ms <= TOLERANCE * fastest_ms]
    return min(good, key=lambda each: (each.subsampled, each.workers, each.keep != "off", each.step_ms))


class _Chooser(NamedTuple):
    """Makes the choices for a command on a machine."""

    asked: Asked
    machine: Machine
    costs: Costs

    def by_rule(self) -> Iterator[Choice]:
        """What the command says, and what --fast means if nothing is measured."""
        asked, gpu = self.asked, self.machine.has_gpu
        why = "run too short to measure" if depends_on_measurement(asked, gpu=gpu) else "as the command says"
        if asked.on_device(gpu=gpu):
            yield from self._on_device(why, subsampled=asked.store_420)
            if asked.fast:
                yield self._fallback()
            return
        yield self._by_workers("ram" if asked.decodes_once or asked.cache_images else "off", self._workers, why)

    def by_measurement(self, measured: Measured) -> Iterator[Choice]:
        """By the step time of every candidate, which is predicted by the model of the profiler's verdict."""
        best, *others = _ranked(self._candidates(measured))
        yield from self._choices_of(best)
        if best.keep == "device":
            yield self._fallback()
        for candidate in others:
            yield from self._choices_of(candidate)

    @property
    def _workers(self) -> int:
        """The number of workers if nothing is measured."""
        cores, ranks_here = self.machine.cores, self.machine.ranks_here
        return num_workers(self.asked.workers, self.costs.batch_size, cores=cores, ranks_here=ranks_here)

    def _fallback(self) -> Choice:
        return self._by_workers("ram", self._workers, "fallback if the device cannot augment")

    def _candidates(self, measured: Measured) -> Iterator[_Candidate]:
        cores = max(1.0, self.machine.cores / self.machine.ranks_here)
        most = min(int(cores), most_workers(self.asked, self.machine, self.costs))
        for keep in self._locations():
            for subsampled in (False, True) if keep == "device" and self.asked.store_420 else (False,):
                for workers in range(most + 1):
                    step_ms = self._step_ms(measured, keep, workers, cores, subsampled=subsampled)
                    yield _Candidate(keep, subsampled, workers, step_ms)

    def _locations(self) -> Iterator[ImagePlace]:
        asked, machine, costs = self
        if (given := required_location(asked)) is not None:
            yield given
            return
        yield "off"
        if costs.epochs < 2:
            return
        if costs.decoded_bytes <= machine.ram_budget_bytes:
            yield "ram"
        least_bytes = costs.decoded_bytes * (SUBSAMPLED_BYTES if asked.store_420 else 1)
        fits = least_bytes <= machine.gpu_budget_bytes + machine.ram_budget_bytes
        if machine.has_gpu and asked.device_augment is not False and fits:
            yield "device"

    def _step_ms(self, measured: Measured, keep: ImagePlace, workers: int, cores: float, *, subsampled: bool) -> float:
        if keep == "device":
            sample_ms, pinned_ms = measured.draw_ms, self._pinned_ms(subsampled=subsampled)
            render_ms = measured.render_ms * (SUBSAMPLED_RENDER_TIME if subsampled else 1)
        else:
            sample_ms = measured.decode_ms * (1.0 if keep == "off" else KEPT_DECODED) + measured.augment_ms
            render_ms = pinned_ms = 0.0
        input_ms = self.costs.batch_size * sample_ms
        demands = Demands(
            consumer_ms=measured.step_ms + render_ms,
            input_ms=input_ms,
            cpu_ms=measured.main_cpu_ms + input_ms,
            workers=workers,
            cores=cores,
        )
        return max(demands.step_ms, pinned_ms)

    def _pinned_ms(self, *, subsampled: bool) -> float:
        """Time to copy those images of a batch from pinned memory that do not fit on the device."""
        costs, share = self.costs, SUBSAMPLED_BYTES if subsampled else 1.0
        away = max(0.0, 1 - self.machine.gpu_budget_bytes / max(1.0, share * costs.decoded_bytes))
        image_bytes = costs.decoded_bytes / max(1, costs.num_pictures)
        return away * costs.batch_size * TILES * share * image_bytes / PINNED_GB_S / 1e6

    def _choices_of(self, candidate: _Candidate) -> Iterator[Choice]:
        img_s = 1e3 * self.costs.batch_size / candidate.step_ms
        why = f"{img_s:,.0f} img/s expected"
        if candidate.keep == "device":
            yield from self._on_device(why, subsampled=candidate.subsampled, img_s=img_s)
        else:
            slots = max(MIN_SLOTS, candidate.workers + SLOTS_AHEAD)
            yield self._by_workers(candidate.keep, candidate.workers, why, slots=slots, img_s=img_s)

    def _on_device(self, why: str, *, subsampled: bool, img_s: float | None = None) -> Iterator[Choice]:
        """Images on the device: first decoded by the GPU, if that may be faster, then by the CPU."""
        for gpu_decode in (True, False) if self._decodes_on_gpu() else (False,):
            decodes = ["JPEG files decoded by the GPU"] if gpu_decode else []
            yield Choice(
                what=f"images kept on the device{' as 4:2:0' if subsampled else ''}, augmented there",
                settings=InputSettings(
                    keep="device",
                    workers=min(DEVICE_WORKERS, self._workers),
                    subsampled=subsampled,
                    gpu_decode=gpu_decode,
                    shrunk=self.asked.shrinks,
                ),
                why="; ".join([why, *decodes, self._gpu_memory(subsampled=subsampled)]),
                img_s=img_s,
            )

    def _decodes_on_gpu(self) -> bool:
        return self.asked.gpu_decode and not why_not_on_gpu(self.machine, self.costs)

    def _by_workers(
        self, keep: ImagePlace, workers: int, why: str, *, slots: int | None = None, img_s: float | None = None
    ) -> Choice:
        where = "kept decoded in RAM" if keep == "ram" else "decoded each time"
        return Choice(
            what=f"images {where}, augmented by {_workers(workers)}",
            settings=InputSettings(keep=keep, workers=workers, shrunk=self.asked.shrinks, slots=slots),
            why="; ".join([why, *([self._ram()] if keep == "ram" else [])]),
            img_s=img_s,
        )

    def _gpu_memory(self, *, subsampled: bool) -> str:
        machine = self.machine
        if not machine.has_gpu:
            return "the device is the CPU"
        needed = self.costs.decoded_bytes * (SUBSAMPLED_BYTES if subsampled else 1)
        if needed <= machine.gpu_budget_bytes:
            return f"all {_size(needed)} fit in GPU memory"
        here = f"{_size(machine.gpu_budget_bytes)} of {_size(needed)} in GPU memory"
        if needed <= machine.gpu_budget_bytes + machine.ram_budget_bytes:
            return f"{here}, the rest in pinned RAM"
        return f"{here}, {_size(machine.ram_budget_bytes)} in pinned RAM, the rest loaded by the workers"

    def _ram(self) -> str:
        needed, budget = self.costs.decoded_bytes, self.machine.ram_budget_bytes
        if needed <= budget:
            return f"all {_size(needed)} fit in RAM"
        return f"{_size(budget)} of {_size(needed)} fit in RAM, the rest is decoded each time"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"


def _workers(count: int) -> str:
    return f"{count or 'no'} worker{'' if count == 1 else 's'}"
