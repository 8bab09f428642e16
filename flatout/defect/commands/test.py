"""flatout defect test: heat maps of test images, and how good they are."""

from flatout.defect.commands.flags import judging_parser, options_from
from flatout.defect.options import TestOptions

DESCRIPTION = """\
Run a network over test images: a heat map, a picture and detections for each, and where masks are there, pixel and
image AUROC, average precision, F1, IoU and the share of defects found at a few false detections per image.
"""
EPILOG = """\
examples:
  flatout defect test --model_path runs/defect/exp/weights/best.pt --test_path demo
  flatout defect test --model_path old.pth --test_path R/test --img_format png_jpg --gpu_id 0

Exit code: 0, 2 wrong arguments, 3 images that cannot be read, 4 weights that cannot.
"""


def main(argv: list[str]) -> int:
    """Evaluate; returns the exit code."""
    parser = judging_parser("flatout defect test", DESCRIPTION, EPILOG)
    options = options_from(parser.parse_typed(argv), TestOptions)
    from flatout.cli import show_log

    show_log()
    # Now, because help and mistakes are answered without torch.
    from flatout.defect.predict import predict

    print(predict(options))
    if options.sweep:
        from flatout.defect.evaluate.sweep import sweep_table

        print(sweep_table(options))
    return 0
