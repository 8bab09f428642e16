"""Read untrusted YAML into plain data, with errors of one sentence with file and line; and write what reads the same.

    bytes --decode--> text --scan, compose--> nodes --build--> dict, list, str, int, float, bool, None

Uses the pure-Python SafeLoader, because the C one crashes the process on deep nesting, and only up to its node graph:
nothing is ever constructed from a tag. Aliases are expanded into separate copies within a budget, so that the result is
a small tree that is safe to print and copy. Scalars follow the YAML 1.2 core schema (docs/config.md lists the
differences from YAML 1.1).
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import yaml

from flatout.errors import ConfigError

Yaml: TypeAlias = "dict[str | int, Yaml] | list[Yaml] | str | int | float | bool | None"

MAX_BYTES = 1_000_000
MAX_DEPTH = 64
MAX_NODES = 50_000
"""Limit before, and again after, aliases are expanded; 50,000 take about 1.5 s to read."""
MAX_DIGITS = 64
"""Limit for one number; Python refuses to print much longer integers."""

_TAG = "tag:yaml.org,2002:"
_BREAKS = "\r\n\x85\u2028\u2029"
_TAB = "a tab cannot indent in YAML. Use spaces."
_NOT_ALLOWED = ("mapping values are not allowed here", "sequence entries are not allowed here")
"""PyYAML's messages for a block that begins where none can; if a tab precedes it, the tab is the cause."""


def load_yaml(path: str | Path) -> Yaml:
    """The content of a YAML file; ConfigError names the file and, where there is one, the line."""
    path = Path(path)
    # Also excludes FIFOs and devices, which would block or never end.
    if not path.is_file():
        problem = " is a folder" if path.is_dir() else " is not a regular file" if path.exists() else ": no such file"
        raise ConfigError(f"{path}{problem}. Give the path of a YAML file.")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}. Check its permissions.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Content cut at the limit may end inside a character; then the size is the real problem.
        if len(content) <= MAX_BYTES:
            line = content.count(b"\n", 0, error.start) + 1
            raise ConfigError(f"{path}:{line}: not UTF-8 text. Save the file as UTF-8.") from None
        text = content.decode("utf-8-sig", errors="replace")
    return parse_yaml(text, where=str(path))


def dump_yaml(values: Mapping[str, object]) -> str:
    """Plain values as a YAML document that `parse_yaml` reads as these values."""
    dumped: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return dumped


def quoted(text: object) -> str:
    """A text, such as a path, as YAML in one line that reads as this text, whatever characters it has."""
    dumped: str = yaml.safe_dump(str(text), default_style='"', allow_unicode=True, width=float("inf"))
    return dumped.rstrip("\n")


def parse_yaml(text: str, *, where: str = "YAML text") -> Yaml:
    """The value of one YAML document, None if it is empty; ConfigError, which names `where`, if it is not valid."""
    if len(text) > MAX_BYTES or len(text.encode(errors="replace")) > MAX_BYTES:
        raise ConfigError(f"{where}: larger than {MAX_BYTES:,} bytes. Is this the right file?")
    try:
        root = _StrictLoader(text).get_single_node()
        return None if root is None else _Builder().build(root, depth=1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{where}:{mark.line + 1 if mark else 1}: {_one_sentence(error)}") from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(f"{where}:{line}: character {chr(error.character)!r} is not allowed. Remove it.") from None


class _Refusal(yaml.MarkedYAMLError):
    """An error of our own at this mark; the text is already a sentence."""

    def __init__(self, problem: str, mark: yaml.Mark) -> None:
        super().__init__(problem=problem, problem_mark=mark)


def _one_sentence(error: yaml.MarkedYAMLError) -> str:
    if isinstance(error, _Refusal):
        return str(error.problem)
    if error.problem in _NOT_ALLOWED and error.problem_mark and "\t" in _line_until(error.problem_mark):
        return _TAB
    if isinstance(error, yaml.composer.ComposerError):
        # The message is split between problem and context.
        return f"not valid YAML: {', '.join(filter(None, (error.context, error.problem)))}. Correct it."
    return f"not valid YAML: {error.problem}. Check the indentation and the quotes here."


def _line_until(mark: yaml.Mark) -> str:
    return str(mark.buffer or "")[mark.pointer - mark.column : mark.pointer]


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core schema and limited nesting; used up to `get_single_node`.

    Contrary to the specification, PyYAML's scanner refuses every tab outside of quotes and ends names of anchors at a
    colon. Here tabs may separate (6.2), and a name ends at the next blank or bracket (6.9.2).
    """

    _depth = 0
    _num_nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        self._num_nodes += 1
        # Checked before descending, because the composer recurses and must not reach a RecursionError.
        _check_size(self._depth, self._num_nodes, self.get_mark())
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def scan_to_next_token(self) -> None:
        super().scan_to_next_token()
        while self.peek() == "\t":
            self.forward(len(self._white()))
            # After a tab no block may begin: neither a key nor a list item.
            self.allow_simple_key = self.allow_simple_key and bool(self.flow_level)
            super().scan_to_next_token()
        before = self.buffer[self.pointer - self.column : self.pointer]
        if not before.strip(" \t") and "\t" in before[: self.indent + 1] and self.peek() != "\0":
            raise _Refusal(_TAB, self.get_mark())

    def scan_plain_spaces(self, indent: int, start_mark: yaml.Mark) -> list[str]:
        white = self._white()
        self.forward(len(white))
        if self.peek() not in _BREAKS:
            return [white] if white else []
        breaks = []
        while self.peek() in _BREAKS:
            breaks.append(self.scan_line_break())
            self.allow_simple_key = True
            if self.prefix(3) in ("---", "...") and self.peek(3) in f"\0 \t{_BREAKS}":
                return []
            white = self._white()
            if "\t" in white[:indent] and self.peek(len(white)) not in _BREAKS:
                # A tab that would indent is left to scan_to_next_token, which refuses it.
                white = white[: white.index("\t")]
            self.forward(len(white))
        first, *more = breaks
        folded = [] if more else [" "]
        return [*(folded if first == "\n" else [first]), *more]

    def scan_block_scalar_ignored_line(self, start_mark: yaml.Mark) -> None:
        self.forward(len(self._white()))
        super().scan_block_scalar_ignored_line(start_mark)

    def scan_anchor(self, token_class: Callable[[str, yaml.Mark, yaml.Mark], yaml.Token]) -> yaml.Token:
        start_mark = self.get_mark()
        self.forward()
        length = 0
        while self.peek(length) not in f"\0 \t,[]{{}}{_BREAKS}":
            length += 1
        if not length:
            raise _Refusal("an anchor (&) or alias (*) without a name. Quote the value, or name it.", start_mark)
        name = self.prefix(length)
        self.forward(length)
        return token_class(name, start_mark, self.get_mark())

    def _white(self) -> str:
        """The blanks and tabs from here on, without consuming them."""
        length = 0
        while self.peek(length) in (" ", "\t"):
            length += 1
        return str(self.prefix(length))

    def scan_flow_scalar_non_spaces(self, double: bool, start_mark: yaml.Mark) -> list[str]:
        try:
            return super().scan_flow_scalar_non_spaces(double, start_mark)
        except (ValueError, OverflowError):
            # The scanner passes any 8 hex digits to chr().
            raise _Refusal(r"the \U escape is not a Unicode character. Correct it.", self.get_mark()) from None

    def scan_yaml_directive_number(self, start_mark: yaml.Mark) -> int:
        try:
            return super().scan_yaml_directive_number(start_mark)
        except ValueError:
            raise _Refusal("the %YAML version is invalid. Remove the line.", self.get_mark()) from None


class _Dumper(yaml.SafeDumper):
    """Also quotes text that is a number only in YAML 1.2, such as 1e3."""


# The resolvers inherited from PyYAML are those of YAML 1.1.
_StrictLoader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first_characters in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    # Resolved only to be refused: a merge silently decides which of two values of a key wins.
    ("merge", r"<<", "<"),
):
    for _each in (_StrictLoader, _Dumper):
        _each.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), list(_first_characters))


def _float(text: str) -> float:
    # Python spells them without the dot: inf, nan.
    return float(re.sub(r"\.(?=[a-zA-Z])", "", text))


_SCALARS: dict[str, Callable[[str], Yaml]] = {
    _TAG + "str": str,
    _TAG + "int": lambda text: int(text, {"0x": 16, "0o": 8}.get(text[:2], 10)),
    _TAG + "float": _float,
    _TAG + "bool": lambda text: {"true": True, "false": False}[text.lower()],
    _TAG + "null": lambda text: None,
}


class _Builder:
    """Builds a tree of plain values from the node graph, and counts the nodes to stop alias bombs."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def build(self, node: yaml.Node, *, depth: int) -> Yaml:
        self._num_nodes += 1
        # Checked again, because an alias repeats a node, perhaps inside of itself.
        _check_size(depth, self._num_nodes, node.start_mark)
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._build_mapping(node, depth)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self.build(item, depth=depth + 1) for item in node.value]
        if isinstance(node, yaml.ScalarNode) and node.tag in _SCALARS:
            return _scalar(node)
        tag = node.tag.replace(_TAG, "!!")
        raise _Refusal(f"tag {tag!r} is refused: only plain data is allowed. Remove it.", node.start_mark)

    def _build_mapping(self, node: yaml.MappingNode, depth: int) -> dict[str | int, Yaml]:
        mapping: dict[str | int, Yaml] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                raise _Refusal("merge keys ('<<') are refused. Write the keys out.", key_node.start_mark)
            key = self.build(key_node, depth=depth + 1)
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise _Refusal(f"key {key!r} is neither text nor a whole number. Quote it.", key_node.start_mark)
            if key in mapping:
                raise _Refusal(f"key {key!r} appears twice. Keep one of them.", key_node.start_mark)
            mapping[key] = self.build(value_node, depth=depth + 1)
        return mapping


def _scalar(node: yaml.ScalarNode) -> Yaml:
    is_number = node.tag in (_TAG + "int", _TAG + "float")
    if is_number and len(node.value) > MAX_DIGITS:
        raise _Refusal(f"a number of more than {MAX_DIGITS} digits. Shorten or quote it.", node.start_mark)
    if any("\ud800" <= character <= "\udfff" for character in node.value):
        raise _Refusal("half of a surrogate pair, which cannot be printed or saved. Remove it.", node.start_mark)
    try:
        return _SCALARS[node.tag](node.value)
    except (ValueError, KeyError):
        tag = node.tag.replace(_TAG, "!!")
        raise _Refusal(f"{node.value[:40]!r} does not match its tag {tag}. Correct it.", node.start_mark) from None


def _check_size(depth: int, num_nodes: int, mark: yaml.Mark) -> None:
    if depth > MAX_DEPTH:
        raise _Refusal(f"nested deeper than {MAX_DEPTH} levels. Flatten it.", mark)
    if num_nodes > MAX_NODES:
        raise _Refusal(f"more than {MAX_NODES:,} values, aliases included. Make it smaller.", mark)
