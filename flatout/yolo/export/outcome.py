"""What an export wrote, how far it is from the network, and how fast it is."""

from dataclasses import dataclass
from pathlib import Path

from flatout.yolo.export.parity import Difference
from flatout.yolo.export.smaller import Loss


@dataclass(frozen=True, kw_only=True)
class ExportedFile:
    """One file."""

    path: Path
    kind: str
    """Such as `ONNX opset 12, simplified`."""
    num_bytes: int
    difference: Difference | None
    """To the network; None for a file that is not meant to be the same."""
    limit: Difference | None = None
    """What it may be."""
    loss: Loss | None = None
    """Of a file in lower precision that gives boxes."""
    until: str = ""
    """Where the comparison ends, if not at the end of the file."""
    median_ms: float | None = None
    """Of a call."""

    def line(self) -> str:
        if self.difference is not None and self.limit is not None:
            compared = f"largest difference {self.difference.text(self.limit)}{self.until}"
        else:
            compared = self.loss.text() if self.loss else "raw maps in lower precision: not compared"
        return f"{self.path}: {self.kind}, {self.num_bytes / 1e6:.1f} MB; {compared}"


@dataclass(frozen=True, kw_only=True)
class ExportOutcome:
    """All files of an export."""

    files: tuple[ExportedFile, ...]
    pictures: str
    """What they were compared on."""
    input_shapes: tuple[tuple[int, ...], ...]
    """Shapes that were compared, without repetition."""
    timed_shape: tuple[int, ...]
    torch_ms: float
    """Of the folded network, on `device`."""
    device: str
    threads: int

    def __str__(self) -> str:
        return self.text()

    def text(self) -> str:
        """What the command prints."""
        shapes = " and ".join(" x ".join(map(str, shape)) for shape in self.input_shapes)
        timed = " x ".join(map(str, self.timed_shape))
        lines = [f"compared with the network on {self.pictures}, given as {shapes}"]
        lines += [file.line() for file in self.files]
        lines += [f"median time of a call with {timed}, {_threads(self.threads)} of the CPU:"]
        lines.append(_time_line(f"torch on {self.device}, folded", self.torch_ms, self.torch_ms))
        lines += [
            _time_line(file.path.name, file.median_ms, self.torch_ms)
            for file in self.files
            if file.median_ms is not None
        ]
        return "\n".join(lines)


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _time_line(name: str, median_ms: float, torch_ms: float) -> str:
    faster = "" if median_ms == torch_ms else f"   {torch_ms / median_ms:.2f} x as fast as torch"
    return f"  {name:<28} {median_ms:9.2f} ms{faster}"
