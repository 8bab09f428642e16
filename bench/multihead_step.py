"""How long is a whole training step with several heads, compared with a single head?

yolov7-tiny, yolov7-tiny-1b4h and its attention variant with the `standard` grouping (four heads of 20 classes), plain
and OTA, 320 px, batch 384: loop, augmentation and graphs as in bench/train_step.py. Needs a GPU.
Answer: bench/results/multihead_step_<machine>_<yyyymm>.md (rewritten with --write).
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from bench import train_step
from bench.measure import arguments, facts_line, report


def main() -> int:
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("bench/multihead_step.py needs a GPU, and this machine has none.")
        return 0
    print(facts_line(), flush=True)
    numbers: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    lines = [numbers["device"], "", *whole_steps(numbers, options)]
    report("multihead_step", "\n".join(lines), numbers, options)
    return 0


def whole_steps(numbers: dict[str, Any], options: argparse.Namespace) -> Iterator[str]:
    torch.backends.cudnn.benchmark = True
    batch = 16 if options.quick else 384
    yield f"{'whole step, 320 px, batch ' + str(batch):40}{'ms':>9}{'img/s':>9}{'busy':>8}{'waits':>7}{'GiB':>7}"
    for name in ("yolov7-tiny", "yolov7-tiny-1b4h", "yolov7-tiny-1b4h-attn"):
        for kind, ota in (("plain", False), ("OTA", True)):
            case = train_step.Case(name, 320, batch, None, None)
            row = train_step.measure(case, kind, train_step.device_input, ota=ota)
            numbers[f"step {name} {kind}"] = asdict(row)
            yield (
                f"{name + ', ' + kind:40}{row.step_ms:9.2f}{row.images_per_s:9.0f}{100 * row.busy:7.1f}%{row.waits:7d}"
                f"{row.peak_gib:7.1f}"
            )


if __name__ == "__main__":
    raise SystemExit(main())
