"""Matches and losses of a replayed step, for the weights that were saved nearest to it.

    weights file --> network, in training mode --> maps --assign--> matches with their costs
                                                       \\-> losses

The forward pass is that of a training step, with the statistics of this batch in its batch norms. With the weights that
the network had before the step, matches and losses are those of the training; other weights give other ones, and the
result says which weights they belong to.

Dimension key:  M matches, sorted by layer   T targets
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flatout.engine import DTYPES, Amp
from flatout.errors import CheckpointError, ConfigError, counted
from flatout.runs import read_position
from flatout.yolo.load_network import network_of
from flatout.yolo.loss import Matches, Search, assign_all, assign_ota, route_all
from flatout.yolo.loss.losses import AUX_TOP, ITEM_NAMES, LossConfig, as_images, sort_by_layer
from flatout.yolo.loss.matches import pack_cells
from flatout.yolo.loss.ota import match_costs
from flatout.yolo.model.network import Network
from flatout.yolo.multihead.joined_maps import Heads, heads_on
from flatout.yolo.multihead.layer import MultiHeadDetect
from flatout.yolo.replays.run import InputFacts, ReplayRun
from flatout.yolo.replays.step import Replayed, check_step, replay_step
from flatout.yolo.train.recipe import detection_loss
from flatout.yolo.train.step import DetectionLoss
from flatout.yolo.weights import read_weights

Position = tuple[int, int]
"""Epoch and step of the next step that a state would train."""


@dataclass(frozen=True)
class SavedState:
    """Weights in a file, and the step before which the network had them."""

    path: Path
    position: Position | None
    """None: unknown."""


class Match(NamedTuple):
    """A cell that must predict a target."""

    sample: int
    target: int
    """Row in the targets."""
    class_number: int
    output: str
    """"lead", or "aux" for an auxiliary output."""
    stride_px: int
    anchor: int
    row: int
    column: int
    iou: float
    """Overlap of the box that is predicted there with the target."""
    cost: float
    """The cost of OTA, by which the cell was chosen; for the plain loss, which takes every candidate, what it would
    be."""


@dataclass(frozen=True)
class StepLosses:
    """Losses and matches of a step."""

    weights: Path
    position: Position | None
    is_exact: bool
    """Whether these are the weights with which the network trained this step."""
    kind: str
    """"ota", "aux" or "plain"."""
    items: Mapping[str, float]
    matches: tuple[Match, ...]
    num_targets: int
    about_weights: str

    @property
    def unmatched(self) -> int:
        """Targets that no cell must predict."""
        return self.num_targets - len({match.target for match in self.matches})

    def lines(self) -> list[str]:
        """A summary, a line each for the weights, the losses and the matches."""
        targets = counted(self.num_targets, "target")
        without = f", {counted(self.unmatched, 'target')} without any" if self.unmatched else ""
        return [
            f"weights  {self.weights.name}, {self.about_weights}",
            f"losses   {'  '.join(f'{name} {value:.6g}' for name, value in self.items.items())}",
            f"matches  {counted(len(self.matches), 'cell')} for {targets} ({self.kind}){without}",
        ]

    def as_json(self) -> dict[str, object]:
        """Everything but the matches, as JSON values; JSON has no nan, so a loss that is not finite is null."""
        plain = {key: value for key, value in asdict(self).items() if key != "matches"}
        items = {name: value if math.isfinite(value) else None for name, value in self.items.items()}
        counts = {"num_matches": len(self.matches), "unmatched": self.unmatched}
        return plain | {"weights": str(self.weights), "items": items} | counts


def replay_with_losses(run: ReplayRun, epoch: int, step: int, *, weights: str = "", losses: bool = True) -> Replayed:
    """A step with its losses: for `weights`, or for the nearest saved state."""
    position = (epoch, step)
    state = None
    if losses:  # first, so that a wrong name is reported at once
        num_steps = run.plan(facts := run.facts_of(epoch, step)).epoch(0).num_steps
        check_step(run, facts, epoch, step)
        state = choose_state(run, weights, position, num_steps)
    replayed, inputs, facts = replay_step(run, epoch, step)
    if not losses:
        return replayed
    if state is None:
        return replace(replayed, why_no_losses=f"{run.folder}/weights has no state of a known step; give --weights")
    return replace(replayed, losses=step_losses(run, facts, inputs, state, position, num_steps))


# Saved states

_EPOCH_END = re.compile(r"epoch_(\d+)\.pt")
_BEFORE = re.compile(r"before_e(\d+)_s(\d+)\.pt")


def saved_states(folder: Path, steps_per_epoch: int, first: Position = (0, 0)) -> Iterator[SavedState]:
    """The states of a run whose position is known from their names, or from the note beside last.pt; `first` is the
    first step of the run."""
    for path in sorted((folder / "weights").glob("*.pt")):
        if path.name == "init.pt":
            yield SavedState(path, first)
        elif found := _EPOCH_END.fullmatch(path.name):
            yield SavedState(path, (int(found[1]) + 1, 0))
        elif found := _BEFORE.fullmatch(path.name):
            yield SavedState(path, (int(found[1]), int(found[2])))
        elif path.name == "last.pt" and (note := read_position(path)):
            epoch, step = note["epoch"], note["step"]
            yield SavedState(path, (epoch + 1, 0) if step >= steps_per_epoch else (epoch, step))


def nearest_state(states: Sequence[SavedState], position: Position, steps_per_epoch: int) -> SavedState | None:
    """The state nearest to a step, in steps; of two equally near ones the earlier."""

    def distance(state: SavedState) -> tuple[int, bool]:
        assert state.position is not None
        behind = _in_steps(position, steps_per_epoch) - _in_steps(state.position, steps_per_epoch)
        return abs(behind), behind < 0

    return min((state for state in states if state.position is not None), key=distance, default=None)


def _in_steps(position: Position, steps_per_epoch: int) -> int:
    return position[0] * steps_per_epoch + position[1]


def choose_state(run: ReplayRun, weights: str, position: Position, steps_per_epoch: int) -> SavedState | None:
    """The state that `weights` names, or the nearest one; None if no weights are left. ConfigError for a wrong name."""
    # A run that starts from an unfinished YOLOv7 checkpoint begins with a later epoch.
    states = list(saved_states(run.folder, steps_per_epoch, min(run.recorded.steps, default=(0, 0))))
    if not weights:
        return nearest_state(states, position, steps_per_epoch)
    for path in (Path(weights), run.folder / "weights" / weights, run.folder / weights):
        if path.is_file():
            known = [state for state in states if state.path.resolve() == path.resolve()]
            return known[0] if known else SavedState(path, None)
    raise ConfigError(f"--weights {weights}: no such file, neither here nor in {run.folder}/weights. Check the name.")


# Losses


def step_losses(
    run: ReplayRun,
    facts: InputFacts,
    inputs: Mapping[int, Mapping[str, Tensor]],
    state: SavedState,
    position: Position,
    steps_per_epoch: int,
) -> StepLosses:
    """Losses and matches of a step, for the weights of `state`; with several ranks the means over them.

    `inputs` are the tensors of each rank."""
    network, is_trained_with = _load(state, run)
    loss = detection_loss(network, run.options, run.hyp, size=facts.size)
    kind = loss.kind(position[0])
    amp: Amp = facts.amp if run.device.type == facts.device else "off"
    items, matches, num_targets, first_image, first_target = [], [], 0, 0, 0
    for tensors in inputs.values():
        maps = _forward(network, run, facts, tensors["images"], amp)
        with torch.no_grad(), torch.autocast(run.device.type, DTYPES[amp], enabled=amp != "off"):
            items.append(loss(kind, maps, tensors["targets"]).items)
        matches += [
            match._replace(sample=match.sample + first_image, target=match.target + first_target)
            for match in list_matches_with_costs(kind, loss, maps, tensors["targets"])
        ]
        num_targets += int((tensors["targets"][:, 0] >= 0).sum())
        first_image, first_target = first_image + len(tensors["images"]), first_target + len(tensors["targets"])
    mean = torch.stack(items).mean(0).tolist()
    exact = is_trained_with and state.position == position and amp == facts.amp
    return StepLosses(
        weights=state.path,
        position=state.position,
        is_exact=exact,
        kind=kind,
        items=dict(zip(ITEM_NAMES, mean, strict=True)),
        matches=tuple(matches),
        num_targets=num_targets,
        about_weights=_about(state, is_trained_with, position, steps_per_epoch),
    )


def _about(state: SavedState, is_trained_with: bool, position: Position, steps_per_epoch: int) -> str:
    """Which weights these are, relative to the step."""
    if not is_trained_with:
        return "averaged or rounded weights: matches and losses are those of this file, not of the training"
    if state.position is None:
        return "whose step is not known: matches and losses are those of this file, perhaps not of the training"
    away = _in_steps(position, steps_per_epoch) - _in_steps(state.position, steps_per_epoch)
    if away == 0:
        return "the state with which this step was trained"
    when = "before" if away > 0 else "after"
    return f"saved {counted(abs(away), 'step')} {when} this step: matches and losses are those of this file"


def _load(state: SavedState, run: ReplayRun) -> tuple[Network, bool]:
    """The network in training mode, on the device, and whether a training used these very weights."""
    weights = read_weights(state.path)
    if weights.kind == "deploy":
        raise CheckpointError(f"{state.path}: deployed weights have no losses. Use weights of a training.")
    network = network_of(weights, weights.for_training(), where=state.path).to(run.device).train()
    if network.nc != len(run.names):
        raise ConfigError(
            f"{state.path}: trained for {counted(network.nc, 'class')}, but {run.folder} for {len(run.names)}. Its "
            "losses would mean nothing: use weights of this run."
        )
    return network, weights.kind in ("full", "model")


@torch.no_grad()
def _forward(network: Network, run: ReplayRun, facts: InputFacts, images: Tensor, amp: Amp) -> list[Tensor]:
    """The raw maps, as a training step computes them."""
    images = run.step_inputs(facts).as_input(images)
    if amp == "off":
        images = images.float()
    with torch.autocast(run.device.type, DTYPES[amp], enabled=amp != "off"):
        maps: list[Tensor] = list(network(images))
    return maps


# Matches


def list_matches_with_costs(
    kind: str, loss: DetectionLoss, maps: Sequence[Tensor], targets_T6: Tensor
) -> Iterator[Match]:
    """Every match of a step, by output, layer and image."""
    num = loss.head.nl
    heads = heads_on(loss.head.groups, maps[0].device) if isinstance(loss.head, MultiHeadDetect) else None
    for output, search in _searches(kind, loss.config):
        # An auxiliary output is matched by the predictions of the lead.
        yield from _matches_of(output, kind, search, loss, maps[:num], targets_T6, heads)


def _searches(kind: str, config: LossConfig) -> list[tuple[str, Search]]:
    """The searches of a loss, as flatout.yolo.loss.losses makes them."""
    if kind == "aux":
        return [("lead", Search(config.anchor_t, 0.5, AUX_TOP)), ("aux", Search(config.anchor_t, 1.0, AUX_TOP))]
    return [("lead", Search(anchor_t=config.anchor_t))]


def _matches_of(
    output: str,
    kind: str,
    search: Search,
    loss: DetectionLoss,
    maps: Sequence[Tensor],
    targets_T6: Tensor,
    heads: Heads | None,
) -> Iterator[Match]:
    routed_T6 = targets_T6 if heads is None else route_all(maps, targets_T6, heads)
    assign = assign_all if kind == "plain" else assign_ota
    found = assign(maps, routed_T6, loss.anchors, search, heads)
    views = as_images(maps, heads, loss.anchors)
    entries = sort_by_layer(views, found)
    ordered = Matches(
        packed_M=pack_cells(*entries.cell),
        image_M=entries.image.to(torch.int32),
        target_M=entries.target.to(torch.int32),
    )
    own_HP = None if heads is None else heads.own_HP
    with torch.autocast(maps[0].device.type, enabled=False):
        iou_M, cost_M = match_costs(views, routed_T6, ordered, loss.anchors, own_HP)
    image_M = entries.image if heads is None else entries.image // heads.num
    class_M = targets_T6[entries.target, 1].long()
    columns = (image_M, entries.target, class_M, entries.cell.layer, entries.cell.anchor, entries.cell.row)
    rows = zip(*(each.tolist() for each in (*columns, entries.cell.column, iou_M, cost_M)), strict=True)
    for image, target, class_number, layer, anchor, row, column, iou, cost in rows:
        stride = round(loss.anchors.strides_px[layer])
        yield Match(image, target, class_number, output, stride, anchor, row, column, iou, cost)
