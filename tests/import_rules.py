"""The import rules of flatout, as a pure function: source files -> broken rules.

The rules are the folder map: imports point down the list below, jobs never import each other, the engine does not
import the feed, and modules that feed workers import must not import torch.
"""

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import NamedTuple

# Part of flatout -> its height; a part imports only itself and lower ones.
HEIGHT = {
    "errors": 0,
    "lazy": 0,
    "findings": 1,
    "progress": 1,
    "cli": 1,
    "clock": 1,
    "yaml_strict": 2,
    "config": 3,
    "safefiles": 3,
    "kernels": 3,
    "demo_folder": 4,
    "doctor": 4,
    "feed": 4,
    "images": 5,
    "profiler": 5,
    "ranks": 5,
    "engine": 6,
    "runs": 7,
    "hub": 7,
    "charts": 7,
    "export": 7,
    "yolo": 8,
    "defect": 8,
    "spike": 8,
    "__init__": 9,
    "bootstrap": 10,
    "monitor": 10,
    "profile_any": 10,
    "profile_command": 10,
    "__main__": 11,
}
FORBIDDEN = {("engine", "feed")}
# Third-party packages allowed in parts that must stay light; other parts may use any.
THIRD_PARTY = {
    "errors": set(),
    "findings": set(),
    "progress": {"rich"},
    "cli": set(),
    "clock": {"numpy"},
    "profiler": {"numpy", "torch"},
    "yaml_strict": {"yaml"},
    "config": {"pydantic"},
    "__init__": set(),
    "__main__": set(),
}
LOADER_FILES = ("batch_parts", "loader", "passes", "slots", "source")
TORCH_AT_THE_TOP = {
    "flatout/feed/device.py",
    "flatout/feed/device_store.py",
    *(f"flatout/feed/loader/{name}.py" for name in LOADER_FILES),
}
TORCH_INSIDE_FUNCTIONS = TORCH_AT_THE_TOP | {"flatout/feed/feed.py"}


class Import(NamedTuple):
    """One imported module: a dotted name, its line, and when the import happens."""

    module: str
    line: int
    at_the_top: bool
    only_for_types: bool


def broken_rules(sources: Mapping[str, str]) -> list[str]:
    """One sentence per violation in {path like flatout/feed/ring.py: source text}."""
    return [sentence for path, source in sorted(sources.items()) for sentence in _broken_in(path, source)]


def _broken_in(path: str, source: str) -> Iterator[str]:
    part = part_of(path)
    if part not in HEIGHT:
        yield f"{path}: {part!r} is not on the folder map"
        return
    for found in imports_of(path, source):
        problem = _flatout_problem(part, found) if _root(found) == "flatout" else _foreign_problem(path, part, found)
        if problem:
            yield f"{path}:{found.line}: {problem}"


def _flatout_problem(part: str, found: Import) -> str | None:
    if found.module == "flatout.__version__":
        return None  # a number, not a part
    names = found.module.split(".")
    target = names[1] if len(names) > 1 and names[1] in HEIGHT else "__init__"
    if target == part:
        return None
    if HEIGHT[target] >= HEIGHT[part] or (part, target) in FORBIDDEN:
        return f"{part} must not import {found.module}"
    return None


def _foreign_problem(path: str, part: str, found: Import) -> str | None:
    package = _root(found)
    if package in sys.stdlib_module_names or found.only_for_types:
        return None
    if package not in THIRD_PARTY.get(part, {package}):
        return f"{part} must not import {package}"
    if package == "torch" and path.startswith(("flatout/images/", "flatout/yolo/data/")):
        return "data sets are read without torch: by workers, and by `flatout yolo check`"
    if package == "torch" and part in ("feed", "profiler"):
        if found.at_the_top and path not in TORCH_AT_THE_TOP:
            return "torch is imported at the top, so every worker would wait for it"
        if part == "feed" and path not in TORCH_INSIDE_FUNCTIONS:
            return "in the feed only device.py and feed.py may import torch"
    return None


def part_of(path: str) -> str:
    """`flatout/feed/ring.py` belongs to feed, `flatout/errors.py` to errors."""
    return PurePosixPath(path).with_suffix("").parts[1]


def imports_of(path: str, source: str) -> Iterator[Import]:
    """Every import statement of a file, at any level, with relative ones made absolute."""
    package = PurePosixPath(path).parent.parts
    yield from _imports_below(ast.parse(source, path), package, at_the_top=True, only_for_types=False)


def _imports_below(
    node: ast.AST, package: tuple[str, ...], *, at_the_top: bool, only_for_types: bool
) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for module in _modules_named(child, package):
                yield Import(module, child.lineno, at_the_top, only_for_types)
        is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _imports_below(
            child,
            package,
            at_the_top=at_the_top and not is_function,
            only_for_types=only_for_types or _checks_types(child),
        )


def _modules_named(node: ast.Import | ast.ImportFrom, package: tuple[str, ...]) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    above = package[: len(package) + 1 - node.level] if node.level else ()
    base = ".".join([*above, *([node.module] if node.module else [])])
    # `from flatout import config` names a module, `from flatout import Feed` does not; they are distinguished later, by
    # looking the name up in the map.
    return [f"{base}.{alias.name}" for alias in node.names] if base == "flatout" else [base]


def _checks_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _root(found: Import) -> str:
    return found.module.split(".")[0]
