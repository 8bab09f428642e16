"""Spike-camera guided video deblurring: blurry frames and spike streams in, sharp frames out. See docs/spike.md.

    import flatout.spike

    model = flatout.spike.load("best.pt")         # or a config: "my.yaml"
    print(model.evaluate("test"))
    stream = flatout.spike.open_stream("000001.dat")
    image = flatout.spike.tfp(stream[:], centre=28, window=16)

The public names are those in `__all__`, each imported when it is first used.

Files:

    check      Checks a configuration before training: packages, data, one sample, loader and network
    cli        flatout spike: dispatches to the commands
    config     The YAML file of a spike training: every key, its type, default and meaning
    deblurrer  Deblurring in Python: train, evaluate and predict as methods of one object
    demo_data  Simulates a small data set: moving shapes, filmed by a slow camera and by a spike camera
    evaluate   Evaluates a network on a split: PSNR and SSIM of every frame, large frames in tiles
    export     Export of a deblurring network as an ONNX file for whole frames
    input      Batches of clips: loader plan, feeds for training and evaluation, and rendering on the GPU
    lpips      LPIPS, a learned distance of images, with weights from a file that the user provides
    model      The deblurring network: maps the frames and spikes of a clip to sharp frames
    options    Options of `flatout spike train` beside its YAML file
    predict    Inference with trained weights: score a split, or deblur a folder
    profile    The spike training as `flatout profile` runs it
    sensor     A simulated spike camera: light in, spikes out; and the moments between two frames of a video
    simulate   Makes a training set from videos: blurry and sharp frames, and the spikes of a simulated camera
    step       One training step: batch to clip, network, loss; optimizer steps and learning rate
    train      Training of a deblurring network: the recipe that `flatout spike train` hands to a run
    view       Images, sheets and videos from spike streams: what `view` and `reconstruct` write
    visuals    Writes frames: images, images side by side, sheets, videos, and pages with a slider
    weights    Loads networks from the weights files of a spike training
    commands/  The commands of `flatout spike`: each parses, calls the library and prints its result
    data/      Clips of frames and spikes: from folders of files and `.dat` streams to the samples of a feed
"""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.spike.data.representations import raw, tfi, tfp, voxel
    from flatout.spike.data.stream_files import SpikeStream, open_stream
    from flatout.spike.deblurrer import Deblurrer
    from flatout.spike.sensor import SensorConfig
    from flatout.spike.simulate import SimulateConfig, SimulatedSet, simulate_set

__all__ = [
    "Deblurrer",
    "SensorConfig",
    "SimulateConfig",
    "SimulatedSet",
    "SpikeStream",
    "load",
    "open_stream",
    "raw",
    "simulate_set",
    "tfi",
    "tfp",
    "voxel",
]


def load(path_or_config: str | Path, *, device: str = "") -> "Deblurrer":
    """Load a deblurrer from a weights file, or create an untrained one from a YAML config.

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one. Raises CheckpointError if the weights file
    does not exist, ConfigError if the config does not.
    """
    from flatout.spike.deblurrer import Deblurrer

    return Deblurrer(path_or_config, device=device)


__getattr__, __dir__ = face(__name__)
