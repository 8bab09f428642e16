"""flatout defect calibrate: choose the threshold by the number of false blobs."""

from flatout.defect.commands.flags import evaluation_parser, options_from
from flatout.defect.options import CalibrateOptions

DESCRIPTION = """\
Choose the threshold on images that are known to be good, or whose defects are labelled by masks or boxes: the lowest
one with at most so many false blobs per image. A false blob is a component that touches no labelled defect. Use other
images than those you test on.
"""
EPILOG = """\
examples:
  flatout defect calibrate --test_path boards/valid --settings boards.yaml
  flatout defect predict --test_path boards/new --settings boards.yaml
  flatout defect calibrate --model_path best.pt --test_path R/valid --false_blobs 0.5 --settings network.yaml

Exit code: 0, 2 wrong arguments, 3 unreadable or unlabelled images, 4 unreadable weights, 5 the file cannot be written.
"""
HIDDEN = (
    "output_dir", "use_ground_truth_mask", "threshold", "dead_pixels", "all_detections", "save_maps", "save_pictures",
    "save_masks", "report", "sweep",
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Choose a threshold; returns the exit code."""
    parser = evaluation_parser("flatout defect calibrate", DESCRIPTION, EPILOG, hidden=HIDDEN, model=CalibrateOptions)
    options = options_from(parser.parse_typed(argv), CalibrateOptions)
    from flatout.cli import show_log

    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.defect.predict import calibrate

    settings = calibrate(options)
    weights = f" --model_path {options.model_path}" if settings.method == "network" else ""
    print(
        f"threshold {settings.threshold:.4f} for the {settings.method} method: {options.settings}. Use it with: "
        f"flatout defect predict{weights} --test_path FOLDER --settings {options.settings}"
    )
    return 0
