"""Head configurations assign every class to exactly one head, or are refused with a clear message."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatout.errors import ConfigError
from flatout.yolo.multihead.head_config import HeadConfig, HeadGroup, contiguous_heads, head_config_of, read_head_config
from tests.golden_cases import golden_cases

DATA = Path(__file__).parents[3] / "data"
SMALL: dict[str, Any] = {
    "nc": 6,
    "heads": 3,
    "head_assignments": {
        "head_0": {"classes": [5, 0]},
        "head_1": {"classes": [2], "weight": 0.5, "name": "alone"},
        "head_2": {"classes": [1, 4, 3]},
    },
}


def records(path: Path):
    return list(json.loads(path.read_text()).items())


@pytest.mark.parametrize("case", golden_cases("yolov7-1b4h/head_configs.json", records))
def test_golden_configs_are_parsed(case):
    config = head_config_of(case, where="golden")
    assert config.nc == case["nc"] and config.num_heads == case["heads"]
    for head in range(config.num_heads):
        written = case["head_assignments"][f"head_{head}"]
        assert list(config.heads[head].classes) == written["classes"]
        assert config.heads[head].weight == written["weight"]
        assert config.heads[head].name == written.get("name", f"Head {head}")
        for local, class_id in enumerate(written["classes"]):
            assert (config.head_C[class_id], config.local_C[class_id]) == (head, local)
    assert config.full_head == case.get("full_head", False)


@pytest.mark.parametrize("name", ["standard", "geometry", "anticonfusion"])
def test_shipped_files_are_the_golden_groupings(name):
    golden = next(iter(golden_cases("yolov7-1b4h/head_configs.json", lambda path: [("all", records(path))]))).values[0]
    if golden is None or name not in dict(golden):
        pytest.skip(f"no golden grouping {name}")
    expected = head_config_of(dict(golden)[name], where="golden")
    assert read_head_config(DATA / f"coco_320_1b4h_{name}.yaml") == expected


def test_the_position_in_the_list_is_the_local_id():
    config = head_config_of(SMALL, where="small")
    assert config.head_C == (0, 2, 1, 2, 2, 0)
    assert config.local_C == (1, 0, 0, 2, 1, 0)
    assert config.outputs_H == (7, 6, 8)
    assert config.weight_H == (1.0, 0.5, 1.0)
    assert [group.name for group in config.heads] == ["Head 0", "alone", "Head 2"]


def test_a_full_head_predicts_every_class_and_an_argument_overrides_the_file(tmp_path):
    file = tmp_path / "heads.yaml"
    file.write_text(yaml.safe_dump(SMALL | {"full_head": True}))
    assert read_head_config(file).outputs_H == (11, 11, 11)
    assert read_head_config(file, full_head=False).outputs_H == (7, 6, 8)


def test_other_keys_and_heads_beyond_the_number_are_ignored():
    more = {"train": "x", "names": ["a"], "generated_by": "y"}
    extra = {"head_3": {"classes": [0, 0, 99]}}
    assert head_config_of(
        SMALL | more | {"head_assignments": SMALL["head_assignments"] | extra}, where="x"
    ) == head_config_of(SMALL, where="x")


@pytest.mark.parametrize("full_head", [False, True])
def test_a_config_is_the_same_after_its_plain_form(full_head):
    config = head_config_of(SMALL, where="small", full_head=full_head)
    assert head_config_of(yaml.safe_load(yaml.safe_dump(config.plain())), where="again") == config


def without(key: str, inner: str | None = None):
    if inner is None:
        return {name: value for name, value in SMALL.items() if name != key}
    assignments = {name: value for name, value in SMALL["head_assignments"].items() if name != inner}
    return SMALL | {"head_assignments": assignments}


def with_head(head: int, **changes):
    key = f"head_{head}"
    changed = SMALL["head_assignments"][key] | changes
    return SMALL | {"head_assignments": SMALL["head_assignments"] | {key: changed}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "a head configuration is a mapping"),
        (without("head_assignments"), "head_assignments is missing; it must be a mapping of head_0, head_1"),
        (SMALL | {"head_assignments": [1, 2]}, r"head_assignments is \[1, 2\]; it must be a mapping of head_0, head_1"),
        (without("head_assignments", "head_1"), r"head_assignments\.head_1 is missing. 3 heads need head_0 to head_2"),
        (with_head(1, classes=[]), r"head_1\.classes is empty"),
        (with_head(1, classes=None), r"head_1\.classes is empty"),
        (with_head(1, classes=["person"]), r"head_1\.classes contains 'person'"),
        (with_head(1, classes=[True]), r"head_1\.classes contains True"),
        # Reported first, although classes 1 and 3 are missing then as well.
        (with_head(2, classes=[4, 5]), "class 5 is assigned twice: to head_0 and head_2"),
        (with_head(2, classes=[1, 4, 3, 4]), "class 4 is assigned twice"),
        (with_head(2, classes=[1, 4]), "class 3 belongs to no head; 1 of 6 classes are not assigned"),
        (with_head(2, classes=[1, 4, 3, 6]), "class 6 is outside 0 to 5"),
        (with_head(2, classes=[1, 4, 3, -1]), "class -1 is outside 0 to 5"),
        (with_head(1, weight="heavy"), r"head_1\.weight='heavy' must be a number"),
        (with_head(1, weight=float("nan")), r"head_1\.weight=nan must be a number"),
        (with_head(1, weight=-1), r"head_1\.weight=-1 must be a number, 0 or more"),
        (SMALL | {"nc": 0}, "nc=0 must be a whole number from 1"),
        (SMALL | {"heads": 10**9}, "heads=1000000000 must be a whole number"),
        (SMALL | {"full_head": "yes"}, "full_head='yes' must be true or false"),
    ],
)
def test_a_wrong_configuration_is_refused_with_the_reason(content, message):
    with pytest.raises(ConfigError, match=f"small.yaml: .*{message}"):
        head_config_of(content, where="small.yaml")


def test_a_missing_file_is_both_a_file_not_found_error_and_a_config_error(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        read_head_config(tmp_path / "none.yaml")
    assert isinstance(raised.value, ConfigError)
    assert "none.yaml: no such head configuration" in str(raised.value)


def test_blocks_of_classes_are_as_equal_as_possible():
    assert [len(group.classes) for group in contiguous_heads(80).heads] == [20, 20, 20, 20]
    assert [group.classes for group in contiguous_heads(5, 2).heads] == [(0, 1), (2, 3, 4)]
    assert contiguous_heads(2).num_heads == 2


def test_groups_made_in_python_follow_the_same_rules():
    with pytest.raises(ConfigError, match="class 0 is assigned twice"):
        HeadConfig(2, (HeadGroup((0,)), HeadGroup((0, 1))))
