"""Settings from YAML files and flags: validated into frozen dataclasses, with all mistakes reported at once.

    file.yaml --load_yaml--> plain values --pydantic--> frozen dataclass

pydantic is used only here: the rest of the program sees plain dataclasses.
A line of a ConfigError reads `file.yaml: key.path: what (value) - what to do`.
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from flatout.errors import ConfigError, did_you_mean
from flatout.yaml_strict import load_yaml

Config = TypeVar("Config")
KeyPath: TypeAlias = tuple[str | int, ...]

_RULES = ConfigDict(extra="forbid", allow_inf_nan=False)

# What to write instead, by pydantic's type of error; for types not listed, pydantic's own message is shown.
_EXPECTED = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text, in quotes",
    "path_type": "a path, in quotes",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a group of keys",
    "dataclass_type": "a group of keys",
    "none_required": "null",
}
_UNKNOWN_KEY = ("unexpected_keyword_argument", "invalid_key")


def read_config(path: str | Path, model: type[Config]) -> Config:
    """The settings in a YAML file as an instance of `model`, a dataclass; an empty file means all defaults.

    ConfigError if the file cannot be read or has mistakes, as in `build_config`.
    """
    values = load_yaml(path)
    return build_config({} if values is None else values, model, where=str(path))


def build_config(values: object, model: type[Config], *, where: str = "command line") -> Config:
    """Validate plain values, nested like `model`, and return an instance of it; `where` names them in errors.

    Text is accepted for numbers ("1e-3") and for booleans (yes/no, on/off), so that YAML 1.1
    files keep working. Booleans are not accepted for numbers. Raises ConfigError with all problems, one per line;
    unknown keys are problems, too.
    """
    problems = list(_booleans_for_numbers(values, [model]))
    try:
        # A list of one, because pydantic applies its rules to plain dataclasses only inside of a container.
        (config,) = TypeAdapter(list[model], config=_RULES).validate_python([values])  # type: ignore[valid-type]
    except ValidationError as error:
        problems = [*_problems(error, values, model), *problems]
    if problems:
        raise ConfigError("\n".join(f"{where}: {problem}" for problem in problems))
    return config


def _problems(error: ValidationError, values: object, model: type) -> Iterator[str]:
    """One line per key; errors of the alternatives of a union are joined."""
    by_key: dict[KeyPath, list[Any]] = {}
    for detail in error.errors(include_url=False):
        by_key.setdefault(_path_in(values, detail["loc"][1:], detail["type"]), []).append(detail)
    for path, details in by_key.items():
        yield _line(path, _what(details, path, model))


def _path_in(values: Any, location: Sequence[str | int], kind: str) -> KeyPath:
    """pydantic's location without its labels of union members: the keys that the user wrote."""
    path: KeyPath = ()
    ends_in_key = kind == "missing" or kind in _UNKNOWN_KEY
    for key in location[:-1] if ends_in_key else location:
        inside = key in values if isinstance(values, Mapping) else isinstance(values, Sequence) and isinstance(key, int)
        if inside:
            path, values = (*path, key), values[key]
    return (*path, location[-1]) if ends_in_key else path


def _what(details: Sequence[Any], path: KeyPath, model: type) -> str:
    first = details[0]
    shown = f"({reprlib.repr(first['input'])})"
    if first["type"] == "missing":
        return "missing key - add it"
    if first["type"] in _UNKNOWN_KEY:
        known = _known_keys(model, path[:-1])
        advice = did_you_mean(str(path[-1]), known, f"known keys: {', '.join(known)}")
        return f"unknown key {shown} - {advice}"
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    expected = [_expected(detail) for detail in details]
    if all(expected):
        return f"wrong value {shown} - write {' or '.join(expected)}"
    return f"wrong value {shown} - {'; '.join(detail['msg'] for detail in details)}"


def _expected(detail: Any) -> str:
    """What to write instead; empty if only pydantic's message says it."""
    if detail["type"] in ("literal_error", "enum"):
        return str(detail["ctx"]["expected"])
    return _EXPECTED.get(detail["type"], "")


def _line(path: KeyPath, what: str) -> str:
    # A key that contains a line break must not break the line.
    keys = [str(key) if str(key).isprintable() else repr(key) for key in path]
    return f"{'.'.join(keys)}: {what}" if keys else what


def _leaf_types(hint: Any) -> list[Any]:
    """The plain types inside a hint: int and NoneType for `list[int] | None`."""
    inner = get_args(hint)
    return [leaf for part in inner for leaf in _leaf_types(part)] if inner else [hint]


def _types_below(types: list[Any], key: str | int) -> list[Any]:
    """The types below a key; an index, or a key of a dict, leads to the same item types."""
    hints = [get_type_hints(kind).get(str(key)) for kind in types if is_dataclass(kind)]
    return [leaf for hint in hints if hint is not None for leaf in _leaf_types(hint)] or types


def _known_keys(model: type, path: KeyPath) -> list[str]:
    types = reduce(_types_below, path, [model])
    return [field.name for kind in types if is_dataclass(kind) for field in fields(kind) if field.init]


def _booleans_for_numbers(values: object, types: list[Any], path: KeyPath = ()) -> Iterator[str]:
    """Messages about `true` where a number is expected, which pydantic would read as 1."""
    if isinstance(values, bool) and bool not in types and (int in types or float in types):
        yield _line(path, f"wrong value ({values}) - write a number")
    elif isinstance(values, Mapping):
        for key, value in values.items():
            yield from _booleans_for_numbers(value, _types_below(types, key), (*path, key))
    elif isinstance(values, list):
        for index, value in enumerate(values):
            yield from _booleans_for_numbers(value, types, (*path, index))
