"""What YOLOv7 saved, in its various forms, as Weights.

Forms: the dict of a training (full, or stripped when it ended), the dict of a converted network, the bare network
(`init.pt`), and a state_dict that somebody took out of one, alone or in a dict.
"""

from torch import Tensor

from flatout.engine.checkpoint.plain import PlainReader
from flatout.engine.checkpoint.refusal import Refusal, quoted
from flatout.yolo.compat.head_config_object import head_config_inside
from flatout.yolo.compat.legacy_names import ModuleStandIn
from flatout.yolo.compat.module_state import network_inside, state_of
from flatout.yolo.weights.weights import Kind, State, Weights, checked_state, checked_weights

_TOP_ENTRIES = ("epoch", "best_fitness", "training_results", "updates", "optimizer", "wandb_id")
_STATE_ENTRIES = ("state_dict", "model_state_dict")
"""Under which other programs save one; what they save beside it is theirs."""
_NETWORK_ATTRIBUTES = {"yaml": "config", "names": "names", "nc": "nc", "hyp": "hyp"}


def weights_from_legacy(objects: object) -> Weights:
    """Weights from the objects of a file; a Refusal says what it holds instead."""
    if isinstance(objects, ModuleStandIn):
        return _from_dict({"model": objects}, kind="model")
    if isinstance(objects, dict) and (objects.get("model") is not None or objects.get("ema") is not None):
        return _from_dict(objects, _kind_of(objects))
    if isinstance(objects, dict) and objects and all(isinstance(value, Tensor) for value in objects.values()):
        return _from_dict({"model": objects}, kind="state_dict")
    if isinstance(objects, dict):
        for state in map(objects.get, _STATE_ENTRIES):
            if isinstance(state, dict):
                return _from_dict({"model": state}, kind="state_dict")
    raise Refusal(f"holds no network but {_described(objects)}. Give a file with weights.")


def _from_dict(top: dict[object, object], kind: Kind) -> Weights:
    reader = PlainReader()
    model, ema = (_state_in(top.get(entry), entry, reader) for entry in ("model", "ema"))
    fields = {name: reader.plain(top.get(name), name) for name in _TOP_ENTRIES}
    fields |= _attributes(top.get("ema") if model is None else top["model"], reader)
    if model is None:
        assert ema is not None, "one of the two is there"
        return checked_weights(ema, None, fields, "ema", "legacy")
    return checked_weights(model, ema, fields, kind, "legacy")


def _state_in(value: object, entry: str, reader: PlainReader) -> State | None:
    if isinstance(value, ModuleStandIn):
        value = state_of(network_inside(value))
    return None if value is None else checked_state(reader.plain(value, entry), entry)


def _attributes(model: object, reader: PlainReader) -> dict[str, object]:
    if not isinstance(model, ModuleStandIn):
        return {}
    network = network_inside(model)
    fields = {field: reader.plain(network.attributes.get(name), field) for name, field in _NETWORK_ATTRIBUTES.items()}
    heads, config = head_config_inside(network, reader), fields["config"]
    if heads is not None and isinstance(config, dict):
        fields["config"] = config | {"head_config": heads.plain()}
    return fields


def _kind_of(top: dict[object, object]) -> Kind:
    epoch = top.get("epoch")
    if top.get("optimizer") is not None or (type(epoch) is int and epoch >= 0):
        return "full"
    # The conversion for inference leaves these out; a training that ended keeps them, emptied.
    return "stripped" if top.keys() & {"ema", "updates", "best_fitness", "wandb_id"} else "deploy"


def _described(objects: object) -> str:
    if isinstance(objects, dict):
        shown = ", ".join(quoted(str(key), 30) for key in list(objects)[:5])
        return f"a dict of {shown}" if objects else "an empty dict"
    return f"a value of type {type(objects).__name__}"
