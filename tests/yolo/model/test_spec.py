"""Model configs are parsed by the rules of the format: channels, repeats, overrides and sources of rows."""

import copy
import logging
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import ConfigError
from flatout.yaml_strict import parse_yaml
from flatout.yolo.model.configs import load_config, shipped_folder
from flatout.yolo.model.spec import IMAGE, MAX_LAYERS, ModelSpec, needed_rows, parse_model
from tests.yolo.model.hostile_configs import config

SHIPPED = sorted(path.relative_to(shipped_folder()).as_posix() for path in shipped_folder().glob("*/*.yaml"))


def one_conv(channels: int, *, nc: int = 80, num_anchors: int = 3, gw: float = 1.0) -> int:
    """Output channels of a lone Conv row."""
    anchors = [list(range(1, 2 * num_anchors + 1))]
    rows = [[-1, 1, "Conv", [channels, 3, 8]]]
    head = [[[0], 1, "Detect", ["nc", "anchors"]]]
    made = {"nc": nc, "anchors": anchors, "width_multiple": gw, "backbone": rows, "head": head}
    return parse_model(made).rows[0].out.channels


def small(**top: object) -> dict[Any, Any]:
    made: Any = parse_yaml(config())
    return made | top


def parsed(rows: dict[int, str] | None = None, **top: str) -> ModelSpec:
    return parse_model(parse_yaml(config(rows, **top)))


# -- width ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("channels", "gw", "expected"),
    [
        (64, 1.0, 64),
        (65, 1.0, 72),
        (30, 1.0, 32),
        (1, 1.0, 8),
        (24, 0.5, 16),
        (72, 0.5, 40),
        (120, 0.5, 64),
        (48, 0.25, 16),
    ],
)
def test_channels_are_scaled_and_rounded_up_to_eight(channels, gw, expected):
    assert one_conv(channels, gw=gw) == expected


@given(st.integers(1, 4096), st.floats(0.01, 8))
def test_scaled_channels_are_the_next_multiple_of_eight(channels, gw):
    scaled = one_conv(channels, gw=gw)
    if channels != 255:
        assert scaled % 8 == 0
        assert 0 <= scaled - channels * gw < 8


@pytest.mark.parametrize(("nc", "outputs"), [(3, 24), (5, 30), (59, 192), (80, 255)])
@pytest.mark.parametrize("gw", [0.5, 1.0, 2.0])
def test_as_many_channels_as_outputs_of_a_level_are_not_scaled(nc, outputs, gw):
    assert one_conv(outputs, nc=nc, gw=gw) == outputs
    assert one_conv(outputs, nc=nc + 1, gw=gw) % 8 == 0


def test_the_exception_follows_an_override_of_nc():
    made = small(width_multiple=0.5, anchors=[[1, 2, 3, 4, 5, 6]] * 2)
    made["backbone"][3] = [-1, 1, "Conv", [30, 3, 1]]
    assert parse_model(made).rows[3].out.channels == 16
    assert parse_model(made, nc=5).rows[3].out.channels == 30


def test_modules_without_a_width_keep_or_sum_their_inputs():
    spec = parsed(width_multiple="2", nc="4")
    channels = [row.out.channels for row in spec.rows]
    assert channels == [16, 32, 32, 32, 32, 32, 64, 32]


# -- repeats -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "gd", "repeats"),
    [
        (1, 64, 1),
        (3, 1.0, 3),
        (3, 0.33, 1),
        (9, 0.33, 3),
        (2, 0.1, 1),
        # Half goes to the even neighbour.
        (3, 0.5, 2),
        (5, 0.5, 2),
        (7, 0.5, 4),
        (9, 0.5, 4),
    ],
)
def test_repeats_are_scaled_by_depth(number, gd, repeats):
    row = parsed({3: f"[-1, {number}, Conv, [16, 3, 1]]"}, depth_multiple=str(gd)).rows[3]
    assert row.repeats == repeats
    assert row.num_weights == repeats * (16 * 16 * 9 + 2 * 16)


def test_repeats_shrink_the_map_each_time():
    assert parsed({2: "[-1, 3, MP, []]", 4: "[-1, 1, MP, []]"}).rows[2].out[1:] == (8, 8)


@pytest.mark.parametrize("module", ["SPPCSPC", "DownC"])
def test_some_modules_take_the_count_as_an_argument(module):
    replaced = {3: f"[-1, 4, {module}, [16]]", 4: "[3, 1, Conv, [16, 1, 1]]", 5: "[-1, 1, MP, [1]]"}
    row = parsed(replaced, depth_multiple="0.5").rows[3]
    assert (row.repeats, row.args["n"]) == (1, 2)


# -- overrides -----------------------------------------------------------------------------------------------------


def test_overrides_are_kept_in_a_copy_of_the_config():
    made = small()
    before = copy.deepcopy(made)
    spec = parse_model(made, nc=7, anchors=2.4)
    assert made == before
    assert spec.config == before | {
        "nc": 7,
        "anchors": 2,
        "ch": 3,
        "depth_multiple": 1.0,
        "width_multiple": 1.0,
    }
    assert (spec.head.num_classes, spec.head.num_outputs) == (7, 2 * 12)


def test_a_number_of_anchors_gives_placeholders_on_every_level():
    assert parsed(anchors="3").head.anchors_px == ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0),) * 2


def test_a_number_of_anchors_does_not_fit_auxiliary_heads():
    with pytest.raises(ConfigError, match="8 inputs for 8 levels of anchors; IAuxDetect needs 2 per level"):
        parse_model(load_config("yolov7-w6"), anchors=3)


@pytest.mark.parametrize("nc", [0, -1, True, 2.0, "3", 10**9])
def test_a_wrong_override_of_nc_is_refused(nc):
    with pytest.raises(ConfigError, match=r"nc=.* must be a whole number from 1 to 20000"):
        parse_model(small(), nc=nc)


@pytest.mark.parametrize("anchors", [0, -3, 65, float("nan"), float("inf"), "3", True])
def test_a_wrong_override_of_anchors_is_refused(anchors):
    with pytest.raises(ConfigError, match=r"anchors=.* must be"):
        parse_model(small(), anchors=anchors)


def test_input_channels_come_from_the_config():
    spec = parsed(ch="1")
    assert spec.channels == spec.rows[0].ins[0].channels == 1


# -- anchors -------------------------------------------------------------------------------------------------------


def test_anchors_that_shrink_while_strides_grow_are_reversed(caplog):
    large_first = "[[100, 100, 200, 200], [10, 10, 20, 20]]"
    with caplog.at_level(logging.INFO):
        head = parsed(anchors=large_first).head
    assert head.anchors_px == ((10, 10, 20, 20), (100, 100, 200, 200))
    assert "Reversing anchor order" in caplog.text


def test_anchors_of_levels_with_shrinking_strides_are_taken_as_they_are():
    large_first = "[[100, 100, 200, 200], [10, 10, 20, 20]]"
    head = parsed({8: "[[4, 7], 1, Detect, [nc, anchors]]"}, anchors=large_first).head
    assert (head.anchors_px[0], head.strides) == ((100, 100, 200, 200), (16, 8))


# -- sources -------------------------------------------------------------------------------------------------------


def test_sources_are_absolute():
    spec = parsed()
    assert [row.sources for row in spec.rows] == [(IMAGE,), (0,), (1,), (2,), (3,), (4,), (5, 3), (6,)]
    assert spec.head.sources == (7, 4)


def test_needed_rows_are_those_that_the_wanted_ones_depend_on():
    rows = parsed().rows
    assert needed_rows(rows, [4]) == {IMAGE, 0, 1, 2, 3, 4}
    assert needed_rows(rows, [6]) == {IMAGE, *range(7)}


@pytest.mark.parametrize("name", SHIPPED)
def test_the_spec_of_every_shipped_config_gives_back_its_rows(name):
    spec = parse_model(load_config(shipped_folder() / name))
    written = [list(row.written) for row in (*spec.rows, spec.head)]
    assert written == spec.config["backbone"] + spec.config["head"]
    assert parse_model(spec.config) == spec


# -- limits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [MAX_LAYERS, 10**5])
def test_too_many_rows_are_refused_at_once(count):
    made = small(backbone=[[-1, 1, "MP", [1]]] * count)
    start = time.perf_counter()
    with pytest.raises(ConfigError, match=r"rows; a network has 2 to|layers in all"):
        parse_model(made)
    assert time.perf_counter() - start < 1


def test_numbers_beyond_floats_are_refused():
    with pytest.raises(ConfigError, match=r"width_multiple=1000.* must be a number"):
        parse_model(small(width_multiple=10**400))


@pytest.mark.parametrize("made", [None, 7, "text", [], [[-1, 1, "Conv", [8]]]])
def test_a_config_that_is_not_a_mapping_is_refused(made):
    with pytest.raises(ConfigError, match=r"^f\.yaml: a model config is a mapping with nc, anchors, backbone and head"):
        parse_model(made, where="f.yaml")
