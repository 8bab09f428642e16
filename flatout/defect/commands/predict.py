"""flatout defect predict: compute heat maps and detections of any images."""

from flatout.defect.commands.flags import evaluation_parser, options_from
from flatout.defect.options import TestOptions
from flatout.errors import counted

DESCRIPTION = """\
Run a network over the images of a folder, or the classical method over pairs. Writes a heat map (float32 TIFF), a
binary mask (PNG) and a plot per image, and tables: pass or fail per image, and the boxes, areas and scores of
everything that reaches the threshold.
"""
EPILOG = """\
examples:
  flatout defect predict --model_path runs/defect/exp/weights/best.pt --test_path /data/new --output_dir found
  flatout defect predict --test_path /data/pairs --settings boards.yaml

Exit code: 0 (also if images fail), 2 wrong arguments, 3 unreadable images, 4 unreadable weights, 5 the results cannot
be written.
"""


def main(argv: list[str]) -> int:
    """Predict; returns the exit code."""
    parser = evaluation_parser("flatout defect predict", DESCRIPTION, EPILOG, hidden=("sweep", "use_ground_truth_mask"))
    options = options_from(parser.parse_typed(argv), TestOptions)
    from flatout.cli import show_log

    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.defect.predict import predict

    result = predict(options)
    num = sum(row.num_detections for row in result.rows)
    num_failed = sum(row.verdict == "fail" for row in result.rows)
    print(
        f"{counted(len(result.rows), 'image')}, {counted(num, 'detection')} at or above {result.threshold:.4g}: "
        f"{options.output_dir}/detections.csv"
    )
    print(f"{len(result.rows) - num_failed} pass, {num_failed} fail: {options.output_dir}/images.csv")
    return 0
