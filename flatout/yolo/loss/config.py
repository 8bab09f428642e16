"""The knobs of the detection losses, under the names of YOLOv7's hyp files."""

from dataclasses import dataclass, fields, replace

_BALANCE = {3: (4.0, 1.0, 0.4)}
_BALANCE_OTHERWISE = (4.0, 1.0, 0.25, 0.06, 0.02)


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    """Gains and options of a loss; the defaults are those of the P5 recipes."""

    box: float = 0.05
    obj: float = 0.7
    cls: float = 0.3
    """Gains of the three terms, as they multiply: see `scaled` for those of a hyp file."""

    obj_pw: float = 1.0
    cls_pw: float = 1.0
    """Weight of the true side in the binary cross-entropies."""

    anchor_t: float = 4.0
    """A target and an anchor go together if no side differs by this factor or more."""

    fl_gamma: float = 0.0
    """Exponent of the focal loss; 0: plain cross-entropy."""

    label_smoothing: float = 0.0
    gr: float = 1.0
    """Share of the overlap in a matched cell's objectness target; the rest is 1."""

    def __post_init__(self) -> None:
        for field in fields(self):
            # Hyp files write 1 for 1.0, and a kernel would be compiled for the whole number.
            object.__setattr__(self, field.name, float(getattr(self, field.name)))
        for name in ("box", "obj", "cls", "obj_pw", "cls_pw", "fl_gamma"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"loss.{name}={getattr(self, name)} must not be negative.")
        if not self.anchor_t > 1:
            raise ValueError(f"loss.anchor_t={self.anchor_t} leaves no target: it must be larger than 1 (YOLOv7: 4).")
        for name in ("label_smoothing", "gr"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"loss.{name}={getattr(self, name)} is outside 0 to 1.")

    def scaled(self, *, num_layers: int, num_classes: int, image_size_px: int) -> "LossConfig":
        """The gains as a trainer applies them: relative to three layers, 80 classes and 640 px."""
        per_layer = 3 / num_layers
        return replace(
            self,
            box=self.box * per_layer,
            cls=self.cls * num_classes / 80 * per_layer,
            obj=self.obj * (image_size_px / 640) ** 2 * per_layer,
        )


def default_balance(num_layers: int) -> tuple[float, ...]:
    """Weight of each layer's objectness: the finest layer has most cells, and most easy ones."""
    return _BALANCE.get(num_layers, _BALANCE_OTHERWISE[:num_layers])
