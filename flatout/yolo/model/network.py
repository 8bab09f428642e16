"""A blueprint as a torch module: rows run in order, each reading the outputs it names.

picture [B, C, H, W], 0..1 --rows--> maps --head--> training: raw predictions; evaluation: Predictions
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Self

from torch import Tensor, nn

from flatout.yolo.model.blueprint import IMAGE, Blueprint, Head, Row, needed_rows
from flatout.yolo.model.draft import draw_blueprint
from flatout.yolo.model.head_config import HeadConfig
from flatout.yolo.model.heads import Detect, IAuxDetect, IDetect, Predictions
from flatout.yolo.model.kinds import KINDS
from flatout.yolo.model.layers import make_layer
from flatout.yolo.model.multihead import MultiHeadDetect, MultiHeadDetectAttention
from flatout.yolo.model.weight_casts import weights_cast

DETECTION_LAYERS: dict[str, type[Detect]] = {
    "Detect": Detect,
    "IDetect": IDetect,
    "IAuxDetect": IAuxDetect,
    "MultiHeadDetect": MultiHeadDetect,
    "MultiHeadDetectAttention": MultiHeadDetectAttention,
}
"""Detection layers by the name a config gives them."""


def build_network(
    config: object,
    *,
    nc: int | None = None,
    anchors: float | None = None,
    heads: HeadConfig | None = None,
    where: str = "model config",
) -> "Network":
    """A fresh network from the content of a model YAML; overrides as in `draw_blueprint`."""
    return Network(draw_blueprint(config, nc=nc, anchors=anchors, heads=heads, where=where))


class Network(nn.Module):
    """A detection network. Its state_dict names are `model.<row>.<inner name>`, as in YOLOv7's checkpoints."""

    def __init__(self, blueprint: Blueprint) -> None:
        super().__init__()
        self.blueprint = blueprint
        self.names = [str(index) for index in range(blueprint.head.num_classes)]
        self.model = nn.Sequential(
            *map(_make_row, blueprint.rows), DETECTION_LAYERS[blueprint.head.kind](blueprint.head)
        )
        head = blueprint.head
        self._training_steps = _schedule((*blueprint.rows, head))
        # Outside of training nobody reads the auxiliary outputs, so the rows that only serve them are left out.
        lead = needed_rows(blueprint.rows, head.lead_sources)
        kept = [row for row in blueprint.rows if row.index in lead]
        self._lead_steps = _schedule((*kept, replace(head, sources=head.lead_sources)))
        self.head.start()
        for module in self.modules():
            if isinstance(module, nn.BatchNorm2d):
                _start_batch_norm(module)
        self.train()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        # Not those of the head, which are put together from several weights before they are cast.
        rows = self.model[:-1].modules() if mode else ()
        self._convolutions = tuple(each for each in rows if isinstance(each, nn.Conv2d))
        return self

    @property
    def head(self) -> Detect:
        head = self.model[-1]
        assert isinstance(head, Detect)
        return head

    @property
    def nc(self) -> int:
        return self.head.nc

    @property
    def stride(self) -> Tensor:
        return self.head.stride

    @property
    def config(self) -> dict[str, object]:
        """The model YAML this network was built from, with overrides in force."""
        return self.blueprint.config

    def forward(self, x: Tensor) -> list[Tensor] | Predictions:
        if not self.training:
            return self._run(x)
        with weights_cast(self._convolutions, x.device):
            return self._run(x)

    def _run(self, x: Tensor) -> list[Tensor] | Predictions:
        maps = {IMAGE: x}
        result = None
        for step in self._training_steps if self.training else self._lead_steps:
            inputs = [maps[source] for source in step.sources]
            for source in step.released:
                del maps[source]
            # By name, because a Sequential walks to an index, and torch.compile would trace every step of the walk.
            result = getattr(self.model, str(step.row))(inputs if step.joins else inputs[0])
            maps[step.row] = result
        return result  # type: ignore[return-value]


class _Step(NamedTuple):
    """A row as it is run."""

    row: int
    sources: tuple[int, ...]
    released: tuple[int, ...]
    """Maps that nobody reads after this row."""
    joins: bool
    """Does it take the list of its inputs, and not just one?"""


def _schedule(rows: Sequence[Row | Head]) -> tuple[_Step, ...]:
    last_reader = {source: row.index for row in rows for source in row.sources}
    return tuple(
        _Step(
            row.index,
            row.sources,
            tuple(source for source in sorted(set(row.sources)) if last_reader[source] == row.index),
            joins=row.kind not in KINDS or KINDS[row.kind].inputs != "one",
        )
        for row in rows
    )


def _make_row(row: Row) -> nn.Module:
    layers = [make_layer(row.kind, row.ins[0].channels, row.args) for _ in range(row.repeats)]
    return layers[0] if len(layers) == 1 else nn.Sequential(*layers)


def _start_batch_norm(norm: nn.BatchNorm2d) -> None:
    """As after one training step on a black picture, which is how YOLOv7 measures its strides."""
    assert norm.running_var is not None and norm.num_batches_tracked is not None
    norm.running_var.fill_(0.9)
    norm.num_batches_tracked.fill_(1)
    norm.eps, norm.momentum = 1e-3, 0.03
