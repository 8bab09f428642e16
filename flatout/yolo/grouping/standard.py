"""Without looking at boxes: COCO's classes by kind of thing, those of other data sets in blocks."""

from collections.abc import Sequence

from flatout.yaml_strict import load_yaml
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.grouping.groups import Grouping, check_heads
from flatout.yolo.model.head_config import contiguous_heads, head_config_of

COCO_HEADS = "coco_320_1b4h_standard.yaml"
"""Shipped: four heads with weights of their own, and the names of COCO."""


def group_standard(names: Sequence[str], heads: int) -> Grouping:
    """Four heads by meaning where the names are COCO's; else blocks of neighbours, as equal as they can be."""
    check_heads(heads, len(names))
    path = shipped_folder("data") / COCO_HEADS
    content = load_yaml(path)
    assert isinstance(content, dict)
    coco = head_config_of(content, where=str(path))
    is_coco = [name.strip().lower() for name in names] == content["names"]
    config = coco if is_coco and coco.num_heads == heads else contiguous_heads(len(names), heads)
    return Grouping(config, ("",) * heads)
