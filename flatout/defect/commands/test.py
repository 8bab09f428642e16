"""flatout defect test: compute heat maps of test images and score them."""

from flatout.defect.commands.flags import evaluation_parser, options_from
from flatout.defect.options import TestOptions

DESCRIPTION = """\
Run a network over test images, or the classical method over pairs. Writes a heat map, a binary mask, a plot, pass or
fail and detections per image. Where masks or boxes exist: pixel and image AUROC, AU-PRO, average precision, F1, IoU,
recall, and false blobs per image.
report.html shows what was missed and what was found wrongly.
"""
EPILOG = """\
examples:
  flatout defect test --model_path runs/defect/exp/weights/best.pt --test_path demo
  flatout defect test --model_path old.pth --test_path R/test --img_format png_jpg --gpu_id 0

Exit code: 0, 2 wrong arguments, 3 unreadable images, 4 unreadable weights, 5 the results cannot be written.
"""


def main(argv: list[str]) -> int:
    """Evaluate; returns the exit code."""
    parser = evaluation_parser("flatout defect test", DESCRIPTION, EPILOG)
    options = options_from(parser.parse_typed(argv), TestOptions)
    from flatout.cli import show_log

    show_log()
    # Imported here so that help and argument errors do not load torch.
    from flatout.defect.predict import predict

    result = predict(options)
    print(result)
    if not result.num_labelled:
        print("Nothing was scored: no image has a mask or boxes, or is in a folder named good (docs/defect.md).")
    if result.pixels.best_f1() is not None:
        print(
            "pixel_best_F1 is an upper bound: its threshold is chosen on these images. pixel_F1 is the one to compare."
        )
    if options.sweep:
        from flatout.defect.evaluate.sweep import sweep_table

        print(sweep_table(options))
    return 0
