"""flatout defect predict: heat maps and detections of any images."""

from flatout.defect.commands.flags import judging_parser, options_from
from flatout.defect.options import TestOptions

DESCRIPTION = """\
Run a network over the images of a folder: a heat map (float32 TIFF) and a picture for each, and all detections of all
images in one table, the surest first.
"""
EPILOG = """\
example:
  flatout defect predict --model_path runs/defect/exp/weights/best.pt --test_path /data/new --output_dir found

Exit code: 0, 2 wrong arguments, 3 images that cannot be read, 4 weights that cannot.
"""


def main(argv: list[str]) -> int:
    """Predict; returns the exit code."""
    parser = judging_parser("flatout defect predict", DESCRIPTION, EPILOG, hidden=("sweep", "use_ground_truth_mask"))
    options = options_from(parser.parse_typed(argv), TestOptions)
    from flatout.cli import show_log

    show_log()
    # Now, because help and mistakes are answered without torch.
    from flatout.defect.predict import predict

    outcome = predict(options)
    print(f"{len(outcome.rows)} images: {options.output_dir}/detections.csv")
    return 0
