"""Cases for `choose_input` with the expected first choice: tested, and shown in docs/fast.md.

A batch has 16 images at 640 px, 1.2 MB each when decoded; 64 GB of RAM are free. Images may take half of that, and half
of a GPU's free memory. A core decodes an image in 8 ms (with a store 6 % of that) and augments it in 4 ms; the device
augments a batch in 0.5 ms, and a core draws the parameters of a sample in 0.05 ms.
"""

from typing import Any, NamedTuple

from flatout.yolo.options import TrainOptions
from flatout.yolo.train.choose_input import Choice, Costs, Machine, Measured, choose_input

GB = 10**9
IMAGE_BYTES = 3 * 640 * 640
GPU = Measured(step_ms=40.0, main_cpu_ms=10.0, decode_ms=8.0, augment_ms=4.0, draw_ms=0.05, render_ms=0.5)
"""A network that takes 40 ms for a batch on a GPU."""
CPU = Measured(step_ms=40.0, main_cpu_ms=40.0, decode_ms=8.0, augment_ms=4.0, draw_ms=0.05, render_ms=0.5)
"""A small network that takes as long on one core."""
LARGE = Measured(step_ms=400.0, main_cpu_ms=400.0, decode_ms=8.0, augment_ms=4.0, draw_ms=0.05, render_ms=0.5)


class Case(NamedTuple):
    """A command on a machine, and the choice that comes first."""

    flags: str
    gpu_gb: int | None
    cores: int
    set_gb: float
    measured: Measured | None
    what: str
    why: str
    ranks: int = 1
    epochs: int = 100

    def choices(self) -> tuple[Choice, ...]:
        asked = TrainOptions(**options_of(self.flags)).asked
        return choose_input(asked, self._machine(), costs_of(self.set_gb, self.measured, epochs=self.epochs))

    def _machine(self) -> Machine:
        return machine_of(self.gpu_gb, self.cores, ranks=self.ranks)

    def row(self) -> str:
        """The row of the table in docs/fast.md."""
        gpu = f"{self.gpu_gb} GB" if self.gpu_gb else "none"
        ranks = f", {self.ranks} ranks" if self.ranks > 1 else ""
        run = {GPU: "", CPU: "small network", LARGE: "large network", None: "too short to measure"}[self.measured]
        run = ", ".join(filter(None, [run, "one epoch" if self.epochs == 1 else ""])) or "long"
        return (
            f"| `{self.flags}` | {gpu} | {self.cores}{ranks} | {self.set_gb:g} GB | {run} | {self.what} | {self.why} |"
        )


def options_of(flags: str) -> dict[str, Any]:
    """`--fast --workers 4` as options."""
    words = flags.replace("--", "").split()
    given: dict[str, Any] = {}
    for word in words:
        if word == "auto" or word.isdigit():
            given["workers"] = word if word == "auto" else int(word)
        elif word != "workers":
            given[word.replace("-", "_")] = True
    return given


def machine_of(gpu_gb: int | None, cores: int, *, ranks: int = 1) -> Machine:
    """A machine with 64 GB of free RAM; one with a GPU has nvJPEG, too."""
    return Machine(
        cores=cores,
        ram_free_bytes=64 * GB,
        gpu_free_bytes=None if gpu_gb is None else gpu_gb * GB,
        nvjpeg=gpu_gb is not None,
        ranks_here=ranks,
    )


def costs_of(set_gb: float, measured: Measured | None, *, epochs: int = 100) -> Costs:
    num = round(set_gb * GB / IMAGE_BYTES)
    return Costs(
        batch_size=16, num_pictures=num, decoded_bytes=num * IMAGE_BYTES, epochs=epochs, measured=measured
    )  # fmt: skip


DEVICE = "images kept on the device, augmented there"
PINNED = "in GPU memory, the rest in pinned RAM"
BY_GPU = "JPEG files decoded by the GPU"


def files(workers: int) -> str:
    return f"images decoded each time, augmented by {workers} worker{'s' if workers > 1 else ''}"


def ram(workers: int) -> str:
    return f"images kept decoded in RAM, augmented by {workers} workers"


CASES = [
    # No GPU. From a store a batch takes a core 71.7 ms, from files 192 ms.
    Case("--fast", None, 2, 3, CPU, ram(2),
         "287 img/s expected; all 3.0 GB fit in RAM"),
    Case("--fast", None, 16, 3, CPU, ram(2),
         "400 img/s expected; all 3.0 GB fit in RAM"),
    Case("--fast", None, 64, 200, CPU, files(5), "400 img/s expected"),
    Case("--fast", None, 2, 3, LARGE, files(1), "40 img/s expected"),
    Case("--fast", None, 2, 3, CPU, files(2), "138 img/s expected",
         epochs=1),
    Case("--fast", None, 16, 3, None, ram(8),
         "run too short to measure; all 3.0 GB fit in RAM"),
    # The set fits in GPU memory, in pinned RAM beside it, or only on the disk. The device takes 40.5 ms for a batch; if
    # workers would be slower than that, 41.3 ms without a worker that draws parameters are within the tolerance.
    Case("--fast", 8, 2, 3, GPU, DEVICE, "387 img/s expected; all 3.0 GB fit in GPU memory"),
    Case("--fast", 8, 16, 3, GPU, DEVICE, "395 img/s expected; all 3.0 GB fit in GPU memory"),
    Case("--fast", 8, 16, 12, GPU, DEVICE, f"395 img/s expected; 4.0 GB of 12.0 GB {PINNED}"),
    Case("--fast", 8, 64, 200, GPU, files(5), "400 img/s expected"),
    Case("--fast", 32, 2, 12, GPU, DEVICE, "387 img/s expected; all 12.0 GB fit in GPU memory"),
    Case("--fast", 32, 16, 40, GPU, DEVICE, f"395 img/s expected; 16.0 GB of 40.0 GB {PINNED}"),
    Case("--fast", 32, 2, 200, GPU, files(2), "158 img/s expected"),
    Case("--fast", 141, 64, 60, GPU, DEVICE, "395 img/s expected; all 60.0 GB fit in GPU memory"),
    Case("--fast", 141, 16, 100, GPU, DEVICE, f"395 img/s expected; 70.5 GB of 100.0 GB {PINNED}"),
    Case("--fast", 141, 16, 200, GPU, files(5), "400 img/s expected"),
    Case("--fast", 8, 16, 200, None, DEVICE,
         "run too short to measure; 4.0 GB of 200.0 GB in GPU memory, 32.0 GB in pinned RAM, "
         "the rest loaded by the workers"),
    # Ranks share the cores: two for each are too few to augment by workers.
    Case("--fast", 32, 16, 200, GPU, files(2), "158 img/s expected", ranks=8),
    Case("--fast", 32, 16, 12, GPU, DEVICE, "387 img/s expected; all 12.0 GB fit in GPU memory", ranks=8),
    # Parts that are left out.
    Case("--fast --no-device-augment", 32, 16, 12, GPU, ram(2),
         "400 img/s expected; all 12.0 GB fit in RAM"),
    Case("--fast --no-fast-dataloader", 32, 16, 12, GPU, DEVICE,
         "as the command says; all 12.0 GB fit in GPU memory"),
    Case("--fast --no-device-augment --no-fast-dataloader", 32, 16, 12, GPU,
         files(5), "400 img/s expected"),
    Case("--fast --gpu-decode", 8, 2, 3, GPU, DEVICE, f"387 img/s expected; {BY_GPU}; all 3.0 GB fit in GPU memory"),
    Case("--fast --gpu-decode", 8, 16, 12, GPU, DEVICE, f"395 img/s expected; 4.0 GB of 12.0 GB {PINNED}"),
    Case("--fast --no-scaled-decode", 8, 16, 3, GPU, DEVICE, "395 img/s expected; all 3.0 GB fit in GPU memory"),
    Case("--fast --workers 4", 8, 64, 200, GPU, files(4), "333 img/s expected"),
    # Without --fast the command decides.
    Case("--workers auto", 32, 16, 12, GPU, files(5), "400 img/s expected"),
    Case("--workers auto", 32, 16, 12, None, files(12),
         "run too short to measure"),
    Case("--cache-images --workers auto", 32, 16, 12, GPU, ram(2),
         "400 img/s expected; all 12.0 GB fit in RAM"),
    Case("--device-augment", 32, 16, 12, None, DEVICE, "as the command says; all 12.0 GB fit in GPU memory"),
    Case("--fast-dataloader", 32, 16, 200, None, ram(8),
         "as the command says; 32.0 GB of 200.0 GB fit in RAM, the rest is decoded each time"),
    Case("--workers 8", None, 16, 12, None, files(8), "as the command says"),
]  # fmt: skip
