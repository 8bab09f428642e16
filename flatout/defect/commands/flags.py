"""The command lines of the defect job: words and a YAML file in, options out.

A YAML file given with --config holds the same names; flags come after it.
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
    r"--device-augment": "--device_strips on",
    r"flatout: --fast .*": "flatout: --graphs true",
    r".*--notest.*": "--use_mask false (no validation)",
}
"""What a profile advises -> the flag of a defect training for it."""


def judging_parser(prog: str, description: str, epilog: str, *, hidden: Sequence[str] = ()) -> FlagParser:
    """Reads the flags of a test or a prediction."""
    parser = FlagParser(prog, description, epilog)
    add_config(parser)
    names = [each.name for each in fields(TestOptions) if each.name not in hidden]
    parser.add_flags("flags", flags_of(TestOptions, names, converts=False, underscores=True), TestOptions())
    return parser


def options_from(given: Mapping[str, Any], model: type[Options]) -> Options:
    """What was given by name, and the YAML it names, ask for; ConfigError names every mistake."""
    from flatout.config import build_config  # now, because help does not need pydantic
    from flatout.yaml_strict import load_yaml

    given = dict(given)
    path = given.pop("config", None)
    values: dict[str, Any] = {}
    if path is not None:
        content = load_yaml(path)
        if content is not None and not isinstance(content, dict):
            raise ConfigError(f"{path}: write one `name: value` per line.")
        values = {str(key): value for key, value in (content or {}).items()}
        build_config(values, model, where=str(path))  # its own mistakes are told with its name
    given = {name: _ranges(value) if name == "amplitudes" else value for name, value in given.items()}
    return build_config(values | given, model)


def add_config(parser: FlagParser) -> None:
    parser.add_argument("--config", metavar="FILE.yaml", help="settings under the same names; flags come after it")


def _ranges(words: Sequence[str]) -> list[list[str]]:
    """`60 8:12` means the magnitude 60, or a range from 8 to 12, each as likely."""
    return [[low, high or low] for low, _, high in (word.partition(":") for word in words)]
