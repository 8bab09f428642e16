"""Logger for TensorBoard (pip install tensorboard): scalars, histograms and plots."""

from pathlib import Path
from typing import Any

from flatout.engine import Callback, End, RunStart, Scores

PLOTS = ("*.png", "*.jpg", "visuals/*.png")


class TensorBoard(Callback):
    """Writes an event file in the run folder, or in the subfolder `within`."""

    def __init__(self, within: str = "") -> None:
        self._within = within
        self._folder = Path()
        self._writer: Any = None

    def start(self, run: RunStart) -> None:
        self._folder = run.folder / self._within
        if not run.continues:
            for name, values in run.histograms.items():
                self._open().add_histogram(name, values, 0)

    def validation(self, scores: Scores) -> None:
        writer = self._open()
        from tensorboard.compat.proto.summary_pb2 import Summary

        # One event for all numbers: for every event, training waits for the thread that writes it.
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in scores.scalars.items()]
        writer.file_writer.add_summary(Summary(value=values), scores.at)
        writer.flush()

    def end(self, end: End) -> None:
        """Add the plots in the run folder as images, and close the event file."""
        if self._writer is None:
            return
        for path in (path for part in PLOTS for path in sorted(end.folder.glob(part))):
            name = path.relative_to(end.folder).with_suffix("").as_posix()
            if (summary := _summary(name, path)) is not None:
                self._writer.file_writer.add_summary(summary, end.epoch)
        self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        return self._writer


def _summary(name: str, path: Path) -> Any:
    """A plot as a summary, without decoding it, as torch's add_image would; None if the file is not an image."""
    from PIL import Image, UnidentifiedImageError
    from tensorboard.compat.proto.summary_pb2 import Summary

    try:
        with Image.open(path) as plot:
            width, height = plot.size
    except UnidentifiedImageError:
        return None
    image = Summary.Image(encoded_image_string=path.read_bytes(), width=width, height=height, colorspace=3)
    return Summary(value=[Summary.Value(tag=name, image=image)])
