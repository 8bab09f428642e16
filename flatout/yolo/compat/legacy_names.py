"""The names that YOLOv7's pickled checkpoints contain, and the harmless things they mean here.

Modules of the network become placeholders that keep their attributes and can do nothing. NumPy's few names are
implemented again in `numpy_values.py`.
"""

import re
from functools import lru_cache

from torch import Tensor

from flatout.engine.checkpoint.refusal import DAMAGED, Budget, Refusal
from flatout.engine.checkpoint.storages import Storages
from flatout.engine.checkpoint.vocabulary import MAX_COPIED, Built, Make, Name, Vocabulary, plain_names
from flatout.yolo.compat.numpy_values import numpy_names

# Whatever the name: nothing of these packages is looked up or imported, so forks with blocks of their own load too.
_MODULE_PACKAGES = re.compile(r"models\.(common|experimental|yolo)|torch\.nn\.modules\.\w+|torch\.nn\.parallel\.\w+")
_CLASS_NAME = re.compile(r"[A-Za-z]\w*")
_MAX_NAME = 100
HEAD_CONFIG = "utils.head_config.HeadConfig"
"""What 1B4H networks keep beside their modules; compat/head_config_object.py reads its attributes."""


class ModuleStandIn(Built):
    """A pickled nn.Module without its class: the attribute dict and nothing else."""

    __slots__ = ("attributes", "type_name")

    def __init__(self, type_name: str) -> None:
        self.type_name = type_name
        """Such as models.common.Conv."""
        self.attributes: dict[object, object] = {}
        """As pickled, to be read only: it may be shared, cyclic or huge."""

    def build(self, state: object) -> None:
        if type(state) is not dict or self.attributes:
            raise Refusal(f"its {self.type_name} has no attributes, or has them twice. {DAMAGED}")
        self.attributes = state

    def plain(self) -> object:
        raise Refusal(f"a {self.type_name} is where plain data should be. {DAMAGED}")


def legacy_vocabulary(storages: Storages) -> Vocabulary:
    """All names of YOLOv7 checkpoints, those of our own files included."""
    budget = Budget(MAX_COPIED, "copied items")
    names = plain_names(storages) | numpy_names(budget) | _torch_names()
    return Vocabulary(names, family=_module_name)


# A network names the same few classes a thousand times.
@lru_cache(maxsize=256)
def _module_name(module: str, name: str) -> Name | None:
    type_name = f"{module}.{name}"
    if len(type_name) > _MAX_NAME:
        return None
    if not (_MODULE_PACKAGES.fullmatch(module) and _CLASS_NAME.fullmatch(name)) and type_name != HEAD_CONFIG:
        return None
    return Name(type_name, lambda arguments: ModuleStandIn(type_name))


def _torch_names() -> dict[str, Make | None]:
    def make_parameter(arguments: tuple[object, ...]) -> object:
        match arguments:
            # Then: backward hooks, and in _with_state a state of Python attributes.
            case (Tensor() as data, bool(requires_grad), *_):
                return data.detach().requires_grad_(requires_grad and data.is_floating_point())
        raise Refusal(f"its pickle makes a parameter in a way torch never does. {DAMAGED}")

    return {
        "torch._utils._rebuild_parameter": make_parameter,
        "torch._utils._rebuild_parameter_with_state": make_parameter,
        # Attributes of wrappers for several GPUs, and where a head configuration came from; nothing here reads them.
        "torch.device": lambda arguments: None,
        "pathlib.PosixPath": lambda arguments: None,
        "pathlib.WindowsPath": lambda arguments: None,
    }
