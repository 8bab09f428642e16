"""Untrusted YAML: what its scalars mean here, what is refused, and that nothing else can happen."""

import math
import os
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.errors import ConfigError
from flatout.yaml_strict import MAX_BYTES, MAX_DEPTH, MAX_NODES, _StrictLoader, dump_yaml, load_yaml, parse_yaml, quoted


def message(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, where="f.yaml")
    return str(caught.value)


# YAML: what the scalars mean (YAML 1.2, core schema)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2.5e+3", -2500.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.inf", -math.inf),
        ("0123", 123),
        ("0x1F", 31),
        ("0o17", 15),
        ("+7", 7),
        ("true", True),
        ("True", True),
        ("FALSE", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("!!int '7'", 7),
        ("!!str 7", "7"),
        *((word, word) for word in ("no", "NO", "yes", "on", "off", "y", "n", "tRUE")),
        *((word, word) for word in ("2024-01-01", "12:30", "1:30:00", "1_000", "0b11", "1e", "inf", "nan", "=", "0x")),
    ],
)
def test_scalars_follow_yaml_1_2(text, value):
    read = parse_yaml(f"key: {text}")["key"]
    assert (read, type(read)) == (value, type(value))


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789eE+-._xobfnaItrulyNF:<=~# ", max_size=6))
def test_text_is_read_as_it_was_written(text):
    assert parse_yaml(dump_yaml({"key": text})) == {"key": text}


@pytest.mark.parametrize("value", [7, 1e-5, 1e300, -math.inf, True, None, "1e3", "0o7", "-1.5E9", [1, "2"], {"a": "b"}])
def test_values_are_read_as_they_were_written(value):
    assert parse_yaml(dump_yaml({"key": value})) == {"key": value}


def test_an_alias_is_a_copy_not_a_shared_object():
    value = parse_yaml("a: &x [1, {b: 2}]\nc: *x")
    assert value["a"] == value["c"] == [1, {"b": 2}]
    assert value["a"] is not value["c"]
    assert value["a"][1] is not value["c"][1]


# YAML: where tabs and the names of anchors end (sections 6.2, 6.9.2)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a:\tb", {"a": "b"}),
        ("a: b\t# c", {"a": "b"}),
        ("a: b\t\nc:\t'd'\t\n", {"a": "b", "c": "d"}),
        ("a: b\tc", {"a": "b\tc"}),
        ("a\t: b", {"a": "b"}),
        ("a: b\n \tc", {"a": "b c"}),
        ("a: b\n\t\n c", {"a": "b\nc"}),
        ("a:\n \tb", {"a": "b"}),
        ("a: 1\n\t\nb: 2", {"a": 1, "b": 2}),
        ("a: 1\n\t# c\nb: 2\n\t", {"a": 1, "b": 2}),
        ("a: | \t# c\n  \tx\n", {"a": "\tx\n"}),
        ("-\t-1\n-\tb", [-1, "b"]),
        ("? a\n: -\tb\n  -  -\tc\n     - d", {"a": ["b", ["c", "d"]]}),
        ("- [\n\t\n b,\tc\t]", [["b", "c"]]),
        ("\t[\n\t]", []),
        ("---\ta", "a"),
        ("%YAML 1.2\n\t\n---\na: 1", {"a": 1}),
        ("a: &x\t1\nb:\t*x", {"a": 1, "b": 1}),
    ],
)
def test_a_tab_separates_where_it_does_not_indent(text, value):
    assert parse_yaml(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "a:\n\tb",
        "a:\n\tb: 1",
        "a: b\n\tc",
        "a:\n  b: 1\n  \tc: 2",
        "a:\n  - b\n\t- c",
        "a:\n \tb: 1",
        "\ta: 1",
        "-\t- a",
        "-\ta: 1",
        "- [\n\ta]",
    ],
)
def test_a_tab_that_indents_is_refused_as_such(text):
    assert "a tab cannot indent in YAML. Use spaces." in message(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: &an:chor value\nb: *an:chor", {"a": "value", "b": "value"}),
        ("a: &a: value\nb: *a:", {"a": "value", "b": "value"}),
        ("a: [&x:y 1, *x:y]", {"a": [1, 1]}),
        ("a: {b: &ü/1 c, d: *ü/1}", {"a": {"b": "c", "d": "c"}}),
        ("a: &x b\n*x : 1", {"a": "b", "b": 1}),
    ],
)
def test_the_name_of_an_anchor_ends_at_a_blank_or_a_bracket(text, value):
    assert parse_yaml(text) == value


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab:-#?,[]{}'\" \n"), max_size=40))
def test_without_tabs_and_anchors_text_is_split_as_pyyaml_does(text):
    """The changes to PyYAML's scanner concern only tabs and anchors."""

    def scalars(loader: type[yaml.SafeLoader]) -> list[tuple[str, str]] | None:
        try:
            tokens = list(yaml.scan(text, Loader=loader))
        except yaml.YAMLError:
            return None
        return [(type(token).__name__, getattr(token, "value", "")) for token in tokens]

    assert scalars(_StrictLoader) == scalars(yaml.SafeLoader)


def test_an_empty_document_is_nothing():
    assert parse_yaml("") is None
    assert parse_yaml("# only a comment\n") is None


# YAML: what is refused, in one sentence naming file and line


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: 2\na: 3", "f.yaml:3: key 'a' appears twice. Keep one of them."),
        ("1: a\n0x1: b", "f.yaml:2: key 1 appears twice."),
        ("a: 1\n<<: {b: 2}", "f.yaml:2: merge keys ('<<') are refused."),
        ("a:\n\t- 1", "f.yaml:2: a tab cannot indent in YAML. Use spaces."),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1: tag '!!python/object/apply:os.system' is refused"),
        ("a: !mine 3", "f.yaml:1: tag '!mine' is refused"),
        ("a: !!binary aGk=", "f.yaml:1: tag '!!binary' is refused"),
        ("a: !!int many", "f.yaml:1: 'many' does not match its tag !!int."),
        ("? [a, b]\n: c", "f.yaml:1: key ['a', 'b'] is neither text nor a whole number."),
        ("a: 1\ntrue: 2", "f.yaml:2: key True is neither text nor a whole number."),
        ("a: [1, 2", "f.yaml:1: not valid YAML: "),
        ("a: 'x", "f.yaml:1: not valid YAML: "),
        ("a: b: c", "f.yaml:1: not valid YAML: mapping values are not allowed here."),
        ("a: *missing", "f.yaml:1: not valid YAML: found undefined alias 'missing'."),
        ("--- a\n--- b", "f.yaml:2: not valid YAML: expected a single document"),
        ("a: b\nc: \x07", "f.yaml:2: character '\\x07' is not allowed."),
        ('a: "\\ud800"', "f.yaml:1: half of a surrogate pair"),
        ('a: "\\UFFFFFFFF"', "f.yaml:1: the \\U escape is not a Unicode character."),
        ("a: " + "9" * 5000, "f.yaml:1: a number of more than 64 digits."),
        ("%YAML " + "1" * 5000 + ".1\n--- a", "f.yaml:1: the %YAML version is invalid."),
    ],
)
def test_bad_yaml_is_one_sentence_with_file_and_line(text, expected):
    found = message(text)
    assert found.startswith(expected)
    assert "\n" not in found


def billion_laughs() -> str:
    rows = ["a0: &a0 [ha, ha, ha, ha, ha, ha, ha, ha, ha]"]
    rows += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    return "\n".join(rows)


@pytest.mark.parametrize(
    ("bomb", "expected"),
    [
        pytest.param("[" * 200_000, "nested deeper than", id="brackets"),
        pytest.param("{a: " * 200_000, "nested deeper than", id="braces"),
        pytest.param("- " * 200_000, "nested deeper than", id="dashes"),
        pytest.param("&a [*a]", "nested deeper than", id="a list inside itself"),
        pytest.param(billion_laughs(), f"more than {MAX_NODES:,} values", id="billion laughs"),
        pytest.param("[" + "a," * 400_000 + "]", f"more than {MAX_NODES:,} values", id="many values"),
        pytest.param("[" + "a: b," * 190_000 + "]", f"more than {MAX_NODES:,} values", id="many small mappings"),
        pytest.param("a" * (MAX_BYTES + 1), "larger than", id="too long"),
        pytest.param("ä" * (MAX_BYTES // 2 + 1), "larger than", id="too long in bytes only"),
    ],
)
def test_bombs_are_refused_in_time(bomb, expected):
    start = time.process_time()  # of this process alone, on a busy machine too
    assert expected in message(bomb)
    assert time.process_time() - start < 5


def test_nesting_up_to_the_limit_is_read():
    brackets = MAX_DEPTH - 1
    assert parse_yaml("[" * brackets + "1" + "]" * brackets) is not None
    assert "nested deeper" in message("[" * (brackets + 1) + "1" + "]" * (brackets + 1))


# Files


def test_a_file_of_the_largest_size_is_read_and_one_more_byte_is_not(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * MAX_BYTES)
    assert load_yaml(path) is None
    path.write_bytes(b"\xc3\xa4" * (MAX_BYTES // 2) + b"\xc3")
    with pytest.raises(ConfigError, match=r"big.yaml: larger than 1,000,000 bytes"):
        load_yaml(path)


def test_a_file_that_is_not_utf8_names_its_line(tmp_path):
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"a: 1\nb: \xe4\n")
    with pytest.raises(ConfigError, match=r"latin.yaml:2: not UTF-8 text"):
        load_yaml(path)
    path.write_bytes("a: 1".encode("utf-16"))
    with pytest.raises(ConfigError, match=r"latin.yaml:1: not UTF-8 text"):
        load_yaml(path)


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path):
    path = tmp_path / "bom.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert load_yaml(path) == {"a": 1, "b": 2}


def test_only_regular_files_are_read_and_others_are_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, text in (("none.yaml", ": no such file"), (".", " is a folder"), ("pipe.yaml", " is not a regular file")):
        with pytest.raises(ConfigError, match=text):
            load_yaml(tmp_path / name)


# Hostile text: a value or a ConfigError, within seconds

ODD_PIECES = st.sampled_from(
    [
        *"[]{}:,-?*&!|>%@`'\"#~<=\n \t\\",
        *(": ", "- ", "? ", "&a ", "*a", "<<: ", "!!python/x ", "!!map ", "!<", "---\n", "...\n", "%YAML 1.", "%TAG "),
        *('"\\x', '"\\U', "|+", ">-9", "0x", "1e", ".nan", "\ufeff", "\x85", "\u2028", "\0", "\r"),
    ]
)
SOUND_YAML = """\
name: bolts # a comment
rate: 1e-3
feed: &feed {slots: 4, pinned: no}
stages:
  - *feed
  - slots: 0x10
    pinned: "o\\u006e"
text: |
  two
  lines
names: {0: NO, 1: 'it''s'}
"""
EDITS = st.lists(st.tuples(st.integers(0, len(SOUND_YAML)), st.integers(0, 5), ODD_PIECES | st.just("")), max_size=8)


def loads_or_raises(text: str) -> None:
    start = time.monotonic()
    try:
        repr(parse_yaml(text))
    except ConfigError as error:
        str(error).encode()
    assert time.monotonic() - start < 5


@settings(max_examples=300, deadline=None)
@given(st.text() | st.lists(ODD_PIECES | st.text(max_size=3), max_size=60).map("".join))
def test_any_text_loads_or_is_a_config_error(text):
    loads_or_raises(text)


@settings(max_examples=300, deadline=None)
@given(EDITS)
def test_sound_yaml_with_odd_edits_loads_or_is_a_config_error(edits):
    text = SOUND_YAML
    for start, num_removed, piece in edits:
        text = text[:start] + piece + text[start + num_removed :]
    loads_or_raises(text)


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_in_a_file_load_or_are_a_config_error(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)
    try:
        load_yaml(path)
    except ConfigError as error:
        assert str(error).startswith(str(path))  # noqa: PT017


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_quoted_text_reads_as_itself_in_one_line(text):
    assert parse_yaml(f"key: {quoted(text)}  # comment") == {"key": text}
    assert "\n" not in quoted(text)
