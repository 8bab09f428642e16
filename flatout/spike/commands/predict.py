"""flatout spike predict: deblur a folder of frames, or one frame."""

from pathlib import Path

from flatout.cli import parser_of, show_log, switch, value
from flatout.errors import counted
from flatout.spike.commands.arguments import DEVICE, OTHER_CONFIG, advising_geometry, writing_to

DESCRIPTION = """\
Deblur a folder of frames with a folder of spike files of the same names, or one frame with its stream. Large frames are
processed in overlapping tiles that are blended, so that there are no seams.
"""
EPILOG = """\
examples:
  flatout spike predict --weights best.pt --input_blur clip/blur --input_spike clip/spike --output out --video --page

Exit code: 0, 2 wrong arguments, 3 unusable data, 4 unusable weights, 5 the output cannot be written.
"""
FLAGS = (
    value("--weights", "weights: best.pt or last.pt of a training", type=Path, required=True, metavar="FILE"),
    value("--input_blur", "folder of blurry frames, or one frame", type=Path, required=True, metavar="PATH"),
    value(
        "--input_spike",
        "folder of spike streams (.dat, .npz, .npy, .h5), or of precomputed voxels if the config has "
        "USE_PRECOMPUTED_VOXELS: true; or one such file",
        type=Path,
        required=True,
        metavar="PATH",
    ),
    value("--output", "folder to write sharp frames to", type=Path, required=True, metavar="DIR"),
    value(
        "--geometry",
        "width and height of spike frames, as in 400x250 (default: from the config, else from config.yaml beside "
        "the spikes, else 640x360)",
        default="",
        metavar="WxH",
    ),
    *OTHER_CONFIG,
    DEVICE,
    switch("--side_by_side", "also write images with the blurry and the restored frame"),
    switch("--video", "also write the restored frames as a video, restored.avi"),
    switch(
        "--page",
        "also write before_after.html, one file with a slider between blurry and restored frames, which works offline",
    ),
    value("--tile_size", "side of a tile in pixels (default: TEST.TILE_SIZE, which is 256)", type=int, metavar="PX"),
    value(
        "--tile_overlap",
        "pixels that neighbouring tiles share (default: TEST.TILE_OVERLAP, which is 32)",
        type=int,
        metavar="PX",
    ),
    switch("--enable_tiling", "accepted, but has no effect: frames larger than a tile are always tiled"),
    switch("--disable_tiling", "process whole frames in one pass, whatever their size"),
)


def main(argv: list[str]) -> int:
    """Deblur; returns the exit code."""
    args = parser_of("flatout spike predict", DESCRIPTION, EPILOG, FLAGS).parse_args(argv)
    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.spike.config import load_config
    from flatout.spike.data.geometry import parse_geometry
    from flatout.spike.predict import load_predictor, predict_folder

    height, width = parse_geometry(args.geometry) if args.geometry else (None, None)
    tile = 0 if args.disable_tiling else args.tile_size
    flags = {"DATA.SPIKE_H": height, "DATA.SPIKE_W": width}
    flags |= {"TEST.TILE_SIZE": tile, "TEST.TILE_OVERLAP": args.tile_overlap}
    overrides = [*args.set, *(f"{key}={value}" for key, value in flags.items() if value is not None)]
    config = load_config(args.config, overrides) if args.config else None
    predictor = load_predictor(args.weights, args.device, config, overrides=overrides)
    with advising_geometry("--geometry WxH"), writing_to(args.output):
        done = predict_folder(
            predictor, args.input_blur, args.input_spike, args.output,
            video=args.video, compare=args.side_by_side, page=args.page,
        )  # fmt: skip
    if done.video is not None:
        print(f"{done.video}: the restored frames as a video")
    if done.page is not None:
        print(f"{done.page}: open it in a browser")
    print(f"{counted(done.frames, 'frame')} in {done.folder}, {done.frames / done.seconds:.2f} frames/s")
    return 0
