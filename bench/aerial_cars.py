"""Prepare a real set of small objects: cars in aerial images, for `bench.tiles --training --data`.

The images are those of https://github.com/jekhor/aerial-cars-dataset (commit d2ed927), of two of its three sources:
aerial photos and videos of Minsk (CC-BY-SA, Yauhen Kharuzhy and the Minsk OpenStreetMap community) and the KIT AIS Data
Set (CC-BY 3.0). Frames of a video under YouTube's licence (harlem*) are left out. Nothing of it is part of flatout.

    git clone https://github.com/jekhor/aerial-cars-dataset CLONE
    .venv/bin/python -m bench.aerial_cars CLONE OUT      # writes OUT/aerial.yaml

Images are 684 to 4,000 px wide, objects 20 to 60 px long. They are split by place, since many are frames of the same
video: two places, one of each source, are for validation. Of five classes four have labels, three of them few, so all
become one: vehicle. Images that a clone lacks are left out and counted.
"""

import argparse
import os
import sys
from pathlib import Path

VAL = ("DJI_0762-", "MunichStreet02-")
"""Beginnings of the names of validation images: all images of two places that no training image shows."""
NO_LABELS = ("harlem", "full", "train", "test", "yakubava")
"""Beginnings of the names of text files to leave out: lists of images, and the labels of another licence."""


def one_class(text: str) -> str:
    """Label lines with class 0."""
    return "".join(f"0 {' '.join(line.split()[1:])}\n" for line in text.splitlines() if line.strip())


def write_set(clone: Path, out: Path) -> Path:
    """Link the images, write their labels and the data YAML."""
    counts = {"train": 0, "val": 0}
    missing = 0
    for label in sorted(clone.glob("*.txt")):
        if label.name.startswith(NO_LABELS):
            continue
        found = [path for suffix in (".jpg", ".JPG", ".png") if (path := label.with_suffix(suffix)).is_file()]
        if not found:
            missing += 1
            continue
        split = "val" if label.name.startswith(VAL) else "train"
        image = out / "images" / split / found[0].name.lower()
        for folder in (image.parent, out / "labels" / split):
            folder.mkdir(parents=True, exist_ok=True)
        os.link(found[0], image)
        (out / "labels" / split / f"{image.stem}.txt").write_text(one_class(label.read_text()))
        counts[split] += 1
    yaml = out / "aerial.yaml"
    lines = [f"{split}: {(out / 'images' / split).resolve()}\n" for split in counts]
    yaml.write_text("".join(lines) + "names: [vehicle]\n")
    print(f"{yaml}: {counts['train']} images to train, {counts['val']} to validate; {missing} labels without an image")
    return yaml


def main() -> int:
    parser = argparse.ArgumentParser(
        "bench.aerial_cars", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("clone", type=Path, help="a clone of jekhor/aerial-cars-dataset")
    parser.add_argument("out", type=Path, help="a new folder on the same disk")
    options = parser.parse_args()
    write_set(options.clone, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
