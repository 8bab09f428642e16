"""Assignment where the maps are: by kernels on a GPU, by torch operations elsewhere. The same matches either way.

With `heads` the maps are the joined ones of several heads, and the targets are routed (heads.py).

Inside a compiled step these run as they are, between two compiled pieces: there is nothing left to fuse.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatout.yolo.assign.candidates import list_candidates
from flatout.yolo.assign.heads import Heads, route
from flatout.yolo.assign.joined_map import as_images
from flatout.yolo.assign.kernels_ready import kernels_ready
from flatout.yolo.assign.matches import Anchors, Matches, Search, check_maps
from flatout.yolo.assign.ota import torch_assign_ota


@torch.compiler.disable
@torch.no_grad()
def route_all(maps: Sequence[Tensor], targets_T6: Tensor, heads: Heads) -> Tensor:
    """Targets as the heads see them (`heads.route`)."""
    if kernels_ready(maps):
        from flatout.yolo.assign.on_device import route_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return route_on_device(targets_T6, heads)
    return route(targets_T6, heads)


@torch.compiler.disable
@torch.no_grad()
def assign_all(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Every candidate cell is matched with the target that brought it."""
    check_maps(maps, anchors, joined=heads is not None)
    if kernels_ready(maps):
        from flatout.yolo.assign.on_device import list_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return list_on_device(maps, targets_T6, anchors, search, heads)
    return list_candidates(as_images(maps, heads, anchors), targets_T6, anchors, search)


@torch.compiler.disable
@torch.no_grad()
def assign_ota(
    maps: Sequence[Tensor], targets_T6: Tensor, anchors: Anchors, search: Search, heads: Heads | None = None
) -> Matches:
    """Candidates are dealt out among the targets of an image by cost (ota.py says how)."""
    check_maps(maps, anchors, joined=heads is not None)
    if kernels_ready(maps):
        from flatout.yolo.assign.on_device import ota_on_device  # imports Triton

        with torch.cuda.device(maps[0].device):
            return ota_on_device(maps, targets_T6, anchors, search, heads)
    with torch.autocast(maps[0].device.type, enabled=False):
        own_HP = None if heads is None else heads.own_HP
        return torch_assign_ota(as_images(maps, heads, anchors), targets_T6, anchors, search, own_HP)
