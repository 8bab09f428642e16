"""Lazy packages: an `__init__` lists the names that other packages may use, and each is imported on first use.

    if TYPE_CHECKING:
        from flatout.feed.feed import Feed
        from flatout.feed.plan import Plan
    __getattr__, __dir__ = face(__name__)

The block under `if TYPE_CHECKING` is the list: type checkers and readers see plain imports, and nothing is imported
before it is used. So a worker that needs one name of a package does not wait for another that imports torch.
"""

import ast
import sys
import warnings
from collections.abc import Callable
from importlib import import_module


def face(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for the package whose `__init__` is being executed."""
    module = sys.modules[package]
    homes = listed_names(module.__loader__.get_source(package))  # type: ignore[union-attr]

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:  # a package inside of this one
            return import_module(f"{package}.{name}")
        # Not cached, so that replacing a name in its module, as tests do, takes effect here too.
        return getattr(import_module(homes[name]), name)

    return get, lambda: sorted({*vars(module), *homes})


def renamed(module: str, **new_names: str) -> Callable[[str], object]:
    """`__getattr__` for a module with renamed public names: old ones work for one release, with a warning."""

    def get(name: str) -> object:
        if name not in new_names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now called {new_names[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[module], new_names[name])

    return get


def listed_names(source: str) -> dict[str, str]:
    """The module of each name in the blocks under `if TYPE_CHECKING`."""
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    listed = [each for block in blocks for each in block.body if isinstance(each, ast.ImportFrom)]
    return {name.name: each.module for each in listed for name in each.names if each.module}
