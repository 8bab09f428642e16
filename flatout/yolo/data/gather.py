"""All pictures of a split with their labels, whatever form they are kept in: the one way to a scanned table.

folders, lists, VOC folders --find--> pictures --scan--> table
COCO files                  --read--> pictures and labels --scan--> table, with the labels put in
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flatout.yolo.data.coco_json import read_coco
from flatout.yolo.data.find import Found, Pair, find_images, pair_up
from flatout.yolo.data.label_cache import scan_cached
from flatout.yolo.data.scan import ScanConfig
from flatout.yolo.data.scan_table import ScanTable, join, with_labels


class Gathered(NamedTuple):
    """What was found, picture by picture."""

    found: Found
    pairs: list[Pair]
    table: ScanTable


def gather(entries: Sequence[str], config: ScanConfig, *, cache_folder: Path | None) -> Gathered:
    """Find and scan the pictures of some entries; COCO files come last."""
    plain = [entry for entry in entries if not entry.lower().endswith(".json")]
    found = find_images(plain)
    pairs = pair_up(found.paths)
    # Other labels say numbers: giving a class another name must not cost a scan.
    needs_names = any(pair.label.endswith(".xml") for pair in pairs)
    plain_config = config if needs_names else replace(config, names=())
    table = scan_cached(pairs, plain_config, folder=cache_folder, family=repr(plain))
    for entry in entries:
        if entry not in plain:
            coco = read_coco(entry, config.names)
            # The file itself takes the place of the label files: the cached headers do not depend on it.
            headers = scan_cached(
                [Pair(path, "") for path in coco.paths], replace(config, names=()), folder=cache_folder, family=entry
            )
            pairs += [Pair(path, entry) for path in coco.paths]
            table = join([table, with_labels(headers, coco.labels)])
            found.paths.extend(coco.paths)
            found.absent.extend(coco.absent)
    return Gathered(found, pairs, table)
