"""Flags out of the fields of an options class: one per field, under its own name; values are checked later, together.

A YAML file given with --config holds the same names; flags come after it.
"""

import argparse
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_args, get_type_hints

from flatout.errors import ConfigError

Options = TypeVar("Options")

VERDICT_FLAGS = {
    r"--workers (\d+).*": r"--num_workers \1",
    r"--cache-images.*": "without --cache_size",
    r"--device-augment": "--device_strips on",
    r"flatout: --fast .*": "flatout: --graphs true",
    r"--log-every": "--log_every",
    r"--save-every-minutes": "--save_every_minutes",
    r".*--notest.*": "--use_mask false (no validation)",
}
"""What a profile advises -> the flag of a defect training for it."""


def parser_for(
    prog: str, description: str, epilog: str, model: type, *, hidden: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A parser whose namespace holds only what was typed."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [--NAME VALUE ...]",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="settings under the same names; flags come after it")
    about, kinds = _notes(model), get_type_hints(model)
    for field in fields(model):
        if field.name in hidden:
            continue
        default = "" if field.default in (MISSING, None, "") else f" (default: {_shown(field.default)})"
        help_text = f"{about.get(field.name, '')}{default}".strip().replace("%", "%%") or None
        if kinds[field.name] is bool:
            parser.add_argument(f"--{field.name}", nargs="?", const="true", metavar="BOOL", help=help_text)
        elif _is_many(kinds[field.name]):
            parser.add_argument(f"--{field.name}", nargs="+", metavar="VALUE", help=help_text)
        else:
            parser.add_argument(f"--{field.name}", metavar=field.name.upper(), help=help_text)
    return parser


def options_from(args: argparse.Namespace, model: type[Options], extra: Mapping[str, Any] | None = None) -> Options:
    """What a parsed command line and its YAML ask for; ConfigError names every mistake."""
    from flatout.config import build_config  # now, because help does not need pydantic
    from flatout.yaml_strict import load_yaml

    typed = dict(vars(args))
    path = typed.pop("config", None)
    values: dict[str, Any] = {}
    if path is not None:
        content = load_yaml(path)
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"{path}: write one `name: value` per line.")
        values = {str(key): value for key, value in (content or {}).items()}
        build_config(values, model, where=str(path))  # its own mistakes are told with its name
    typed = {name: _ranges(value) if name == "amplitudes" else value for name, value in typed.items()}
    return build_config(values | typed | dict(extra or {}), model)


def whole_number(environ: Mapping[str, str], name: str) -> int | None:
    """A number in the environment, if there is one."""
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise ConfigError(f"{name}={text}: write a whole number, or unset it.")
    return int(text) if text else None


def _ranges(words: Sequence[str]) -> list[list[str]]:
    """`60 8:12` means the magnitude 60, or a range from 8 to 12, each as likely."""
    return [[low, high or low] for low, _, high in (word.partition(":") for word in words)]


def _is_many(kind: Any) -> bool:
    return getattr(kind, "__origin__", None) is tuple or any(map(_is_many, get_args(kind)))


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(map(_shown, value))
    return str(value)


def _notes(model: type) -> dict[str, str]:
    """What stands as a string below each field, as Python itself does not keep it."""
    try:
        source = inspect.getsource(model)
    except OSError:  # installed without sources
        return {}
    found = re.findall(r'^    (\w+):[^\n]*\n    """(.*?)"""', source, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()).replace("None:", "default:") for name, text in found}
