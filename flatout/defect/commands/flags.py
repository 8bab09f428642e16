"""Command-line parsing of the defect job: arguments and a YAML file to options.

A YAML file given with --config uses the names of the flags; flags override it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from flatout.cli import FlagParser, flags_of
from flatout.defect.options import TestOptions
from flatout.errors import ConfigError

Options = TypeVar("Options")

VERDICT_FLAGS = {
    r"--workers (\d+).*": r"--num_workers \1",
    r"--cache-images.*": "without --cache_size",
    r"--device-augment.*": "--device_strips on",
    r"flatout: --fast .*": "flatout: --graphs true",
    r".*--notest.*": "--use_mask false (no validation)",
}
"""Advice in a profile (regular expression) -> the corresponding flag of `flatout defect train`."""


def evaluation_parser(
    prog: str, description: str, epilog: str, *, hidden: Sequence[str] = (), model: type[TestOptions] = TestOptions
) -> FlagParser:
    """The parser of `flatout defect test`, `predict` and `calibrate`; options in `hidden` get no flag."""
    parser = FlagParser(prog, description, epilog)
    add_config(parser)
    names = [each.name for each in fields(model) if each.name not in hidden]
    parser.add_flags("flags", flags_of(model, names, converts=False, underscores=True), model())
    return parser


def options_from(given: Mapping[str, Any], model: type[Options]) -> Options:
    """Build options from values by name and from the YAML file under `config`; ConfigError lists every mistake."""
    from flatout.config import build_config  # imported here because help does not need pydantic
    from flatout.yaml_strict import load_yaml

    given = dict(given)
    path = given.pop("config", None)
    values: dict[str, Any] = {}
    if path is not None:
        content = load_yaml(path)
        if content is not None and not isinstance(content, dict):
            found = "a list" if isinstance(content, list) else f"only the value {content!r:.50}"
            raise ConfigError(f"{path}: expected one `name: value` per line, found {found}. Is this the right file?")
        values = {str(key): value for key, value in (content or {}).items()}
        build_config(values, model, where=str(path))  # so that mistakes in the file are reported with its name
    given = {name: _ranges(value) if name == "amplitudes" else value for name, value in given.items()}
    return build_config(values | given, model)


def add_config(parser: FlagParser) -> None:
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="YAML file with options under the names of the flags; flags override it"
    )


def _ranges(words: Sequence[str]) -> list[list[str]]:
    """Parse amplitudes: `60 8:12` is the value 60 and the range from 8 to 12, each equally likely."""
    return [[low, high or low] for low, _, high in (word.partition(":") for word in words)]
