"""Spike-camera guided video deblurring: blurry frames and spike streams in, sharp frames out. See docs/spike.md.

    import flatout.spike

    model = flatout.spike.load("best.pt")         # or a config: "my.yaml"
    print(model.evaluate("test"))

The public names are those in `__all__`, each imported when it is first used.

Files:

    check      Is everything in order? Configuration, data, one sample, loader and network, each with what it found
    cli        flatout spike: finds the command and hands over to it
    config     The YAML of a spike training: every key, its type, default and meaning
    deblurrer  Deblurring in Python: the commands train, test and predict as methods of one object
    demo_data  A small data set out of nothing
    evaluate   How good is a network on a split? PSNR and SSIM of every frame
    input      Where batches of clips come from: files or the store -> workers -> slots -> device
    model      The deblurring network: frames and spikes of a clip in, sharp frames out
    options    What a training's command says beside its YAML
    pictures   Frames as files: results, before / after / truth side by side, and a short video
    predict    Weights in use: score a split, or deblur a folder
    profile    What `flatout spike train` would run, to be looked at
    step       What a step of the deblurring job computes
    train      Training a deblurring network: the recipe that `flatout spike train` hands to a run
    weights    Files of weights: what each holds, and how a network comes out of one
    commands/  The commands of `flatout spike`, one file each: `main(argv)` parses, calls the library, prints
    data/      Clips of frames and spikes: from trees of files and `.dat` streams to the samples that a feed reads
"""

from pathlib import Path
from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.spike.deblurrer import Deblurrer

__all__ = ["Deblurrer", "load"]


def load(path_or_config: str | Path, *, device: str = "") -> "Deblurrer":
    """A deblurrer from a file of weights, or an untrained one from a YAML config.

    `device` is "cpu", the number of a GPU, or "" for a GPU if there is one. CheckpointError if there is no such file.
    """
    from flatout.spike.deblurrer import Deblurrer

    return Deblurrer(path_or_config, device=device)


__getattr__, __dir__ = face(__name__)
