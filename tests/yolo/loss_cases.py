"""Golden cases of the losses: records with arrays, and predictions that are drawn from a seed instead of stored."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from flatout.yolo.loss import (
    Anchors,
    LossConfig,
    LossParts,
    Matches,
    Search,
    assign_all,
    assign_ota,
    aux_ota_loss,
    ota_loss,
    plain_loss,
)
from tests.yolo.detection_batch import DetectionBatch


class LossCase(NamedTuple):
    """A record of a golden JSON file, and its arrays from the NPZ file of the same name."""

    record: dict[str, Any]
    arrays: dict[str, np.ndarray]


def loss_cases(path: Path) -> Iterable[tuple[str, LossCase]]:
    """Every record of a file, with the arrays whose names begin with the name of the record."""
    arrays: dict[str, np.ndarray] = {}
    if path.with_suffix(".npz").exists():
        with np.load(path.with_suffix(".npz")) as stored:
            arrays = {name: stored[name] for name in stored.files}
    for record in json.loads(path.read_text()):
        begin = f"{record['name']}/"
        own = {name.removeprefix(begin): array for name, array in arrays.items() if name.startswith(begin)}
        yield record["name"], LossCase(record, own)


def build(case: LossCase, device: str) -> DetectionBatch:
    """The input of a case; for `aux` the auxiliary maps follow the lead maps."""
    record, arrays = case
    if "targets" not in arrays:
        pytest.skip("no targets are stored for this case")
    generator = np.random.Generator(np.random.PCG64(record["seed"]))
    strides = record["strides"] * (2 if record["kind"] == "aux" else 1)
    maps = []
    for stride in strides:
        shape = (record["B"], 3, int(record["h"] / stride), int(record["w"] / stride), 5 + record["nc"])
        one_map = generator.standard_normal(shape, dtype=np.float32)
        one_map[..., 4] -= 3.0
        one_map[..., 5:] -= 2.0
        maps.append(one_map)
    for index, (layer, *cell) in enumerate(arrays.get("plant_idx", ())):
        maps[layer][*cell, :5] = arrays["plant_val"][index]
        maps[layer][*cell, 5 + arrays["plant_cls"][index]] = arrays["plant_clsval"][index]
    for one_map, (total, first, last) in zip(maps, arrays.get("input_check", ()), strict="input_check" in arrays):
        made = (one_map.sum(dtype=np.float64), one_map.flat[0], one_map.flat[-1])
        np.testing.assert_allclose(
            made,
            (total, first, last),
            rtol=1e-6,
            err_msg="the input differs from the one that the golden was made with",
        )
    size_px = torch.tensor(record["anchors"], dtype=torch.float32).view(len(record["anchors"]), -1, 2)
    size_LA2 = size_px / torch.tensor(record["strides"])[:, None, None]
    return DetectionBatch(
        [torch.from_numpy(one_map).to(device).requires_grad_() for one_map in maps],
        torch.from_numpy(arrays["targets"]).to(device),
        Anchors(size_LA2.to(device), tuple(record["strides"])),
    )


def assign_case(case: LossCase, batch: DetectionBatch) -> dict[str, Matches]:
    """The assignments of a case: `match`, and `match_aux` if there is an auxiliary head."""
    anchor_t, num_layers = case.record["hyp"]["anchor_t"], len(batch.anchors.strides_px)
    lead = (batch.maps[:num_layers], batch.targets, batch.anchors)
    match case.record["kind"]:
        case "std":
            return {"match": assign_all(*lead, Search(anchor_t))}
        case "ota":
            return {"match": assign_ota(*lead, Search(anchor_t))}
        case "aux":
            searches = {"match": Search(anchor_t, 0.5, 20), "match_aux": Search(anchor_t, 1.0, 20)}
            return {name: assign_ota(*lead, search) for name, search in searches.items()}
    raise KeyError(f"unknown kind of loss {case.record['kind']!r}")


def loss_of_case(case: LossCase, batch: DetectionBatch, balance_L: torch.Tensor | None) -> LossParts:
    """The loss of a case."""
    config = LossConfig(gr=case.record["gr"], **case.record["hyp"])
    num_layers = len(batch.anchors.strides_px)
    match case.record["kind"]:
        case "std":
            return plain_loss(*batch, config, balance_L)
        case "ota":
            return ota_loss(*batch, config, balance_L)
        case "aux":
            maps, targets, anchors = batch
            return aux_ota_loss(maps[:num_layers], maps[num_layers:], targets, anchors, config, balance_L)
    raise KeyError(f"unknown kind of loss {case.record['kind']!r}")
