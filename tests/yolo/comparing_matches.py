"""Comparison of matches with those of the reference implementation, without decisions that float32 cannot resolve."""

import torch

from flatout.yolo.loss import Matches, Search
from flatout.yolo.loss.matches import unpack_cells
from tests.reference.ota_twin import candidates, class_cost_in_closed_form, margin_of_image, pairs_of_image, twin_assign
from tests.yolo.detection_batch import DetectionBatch

MARGIN = 1e-4
"""Two correct float32 implementations differ by about 1e-6 of a cost near 30."""


def list_matches(matches: Matches, layer: int) -> torch.Tensor:
    """The matches of one layer in list order: int64 [n, 5] of image, anchor, row, column, target.

    Candidates listed on a GPU are sorted by image; within an image the order is the same as on the CPU.
    """
    cell = unpack_cells(matches.packed_M)
    (found_n,) = torch.nonzero((matches.target_M >= 0) & (cell.layer == layer), as_tuple=True)
    columns = (matches.image_M, cell.anchor, cell.row, cell.column, matches.target_M)
    return torch.stack([each[found_n].long() for each in columns], 1)


def assert_same_matches(found: Matches, batch: DetectionBatch, search: Search) -> None:
    """Same ordered lists in every image whose decisions are clear in float64; most images must be clear."""
    assert found.num_taken_T is not None
    maps = [one_map.detach().cpu() for one_map in batch.maps]
    here = DetectionBatch(maps, batch.targets.cpu(), batch.anchors._replace(size_LA2=batch.anchors.size_LA2.cpu()))
    size_LA2, strides_px = here.anchors
    twin = twin_assign(
        maps, here.targets, size_LA2, strides_px, anchor_t=search.anchor_t, reach=search.reach, top=search.top
    )
    margins = _margins(here, search)
    clear_I = torch.tensor([image for image, margin in enumerate(margins) if margin > MARGIN])
    assert len(clear_I) >= 0.8 * len(margins)
    for layer, expected in enumerate(twin.lists):
        listed = list_matches(found, layer).cpu()
        clearly_found, clearly_expected = (each[torch.isin(each[:, 0], clear_I)] for each in (listed, expected))
        assert torch.equal(clearly_found, clearly_expected)
    is_clear = torch.isin(here.targets[:, 0].long(), clear_I)
    assert torch.equal(found.num_taken_T.cpu()[is_clear], twin.num_taken[is_clear])


def _margins(batch: DetectionBatch, search: Search) -> list[float]:
    """For each image, the smallest margin by which one of its decisions was made."""
    size_LA2, strides_px = batch.anchors
    maps = [one_map.double() for one_map in batch.maps]
    layers = [
        candidates(one_map.shape, batch.targets, size_A2, search.anchor_t, search.reach)
        for one_map, size_A2 in zip(maps, size_LA2, strict=True)
    ]
    margins = []
    for image in range(maps[0].shape[0]):
        own = [each[each[:, 0] == image] for each in layers]
        rows = batch.targets[batch.targets[:, 0] == image].double()
        if len(rows) and sum(len(each) for each in own):
            pairs = pairs_of_image(own, maps, rows, size_LA2, strides_px, class_cost_in_closed_form)
            margins.append(margin_of_image(pairs, search.top))
        else:
            margins.append(float("inf"))
    return margins
