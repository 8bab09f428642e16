"""Settings: what becomes a dataclass, and how every mistake is reported."""

import math
import re
import sys
from dataclasses import FrozenInstanceError, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatout.config import build_config, read_config
from flatout.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class FeedPart:
    slots: int = 4
    pinned: bool = True

    def __post_init__(self) -> None:
        if self.slots < 2:
            raise ValueError(f"slots={self.slots} is too small. Use 2 or more.")


@dataclass(frozen=True, kw_only=True)
class Job:
    name: str
    rate: float = 0.01
    epochs: int = 10
    workers: int | Literal["auto"] = "auto"
    folder: Path | None = None
    resume: bool | str = False
    feed: FeedPart = field(default_factory=FeedPart)
    stages: tuple[FeedPart, ...] = ()
    names: dict[int, str] = field(default_factory=dict)
    free: dict[str, Any] = field(default_factory=dict)


def problems(values: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        build_config(values, Job, where="f.yaml")
    return str(caught.value).splitlines()


def test_a_file_becomes_frozen_dataclasses(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("name: no\nrate: 1e-3\nfeed: {slots: 8}\nstages: [{slots: 3}]\nnames: {0: NO, 1: on}\n")
    job = read_config(path, Job)
    assert job == Job(
        name="no", rate=0.001, feed=FeedPart(slots=8), stages=(FeedPart(slots=3),), names={0: "NO", 1: "on"}
    )
    assert type(job) is Job
    assert type(job.feed) is FeedPart
    with pytest.raises(FrozenInstanceError):
        job.rate = 1.0


def test_an_empty_file_means_all_defaults(tmp_path):
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert read_config(path, FeedPart) == FeedPart()


@pytest.mark.parametrize(("word", "meaning"), [("no", False), ("off", False), ("yes", True), ("on", True), (1, True)])
def test_old_spellings_of_booleans_work_where_a_boolean_is_expected(word, meaning):
    assert build_config({"pinned": word}, FeedPart).pinned is meaning


def test_numbers_may_be_written_as_text():
    job = build_config({"name": "x", "rate": "1e-3", "epochs": "0300", "workers": "4"}, Job)
    assert (job.rate, job.epochs, job.workers) == (0.001, 300, 4)


def test_booleans_stay_booleans_where_text_is_allowed_too():
    assert build_config({"name": "x", "resume": True}, Job).resume is True
    assert build_config({"name": "x", "resume": "last.pt"}, Job).resume == "last.pt"


def test_all_mistakes_of_a_file_are_reported_at_once():
    values = {
        "nmae": "x",
        "rate": "fast",
        "epochs": True,
        "workers": "autoo",
        "feed": {"slot": 3, "pinned": "maybe"},
        "stages": [{"slots": 2}, {"slots": 1.5}],
        "names": {0: 7},
    }
    assert sorted(problems(values)) == [
        "f.yaml: epochs: wrong value (True) - write a number",
        "f.yaml: feed.pinned: wrong value ('maybe') - write true or false",
        "f.yaml: feed.slot: unknown key (3) - did you mean 'slots'?",
        "f.yaml: name: missing key - add it",
        "f.yaml: names.0: wrong value (7) - write text, in quotes",
        "f.yaml: nmae: unknown key ('x') - did you mean 'name'?",
        "f.yaml: rate: wrong value ('fast') - write a number",
        "f.yaml: stages.1.slots: wrong value (1.5) - write a whole number",
        "f.yaml: workers: wrong value ('autoo') - write a whole number or 'auto'",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"name": "x", "feed": {"slots": 1}}, "f.yaml: feed: slots=1 is too small. Use 2 or more."),
        ({"name": "x", "rate": math.nan}, "f.yaml: rate: wrong value (nan) - write a finite number"),
        ({"name": "x", "feed": None}, "f.yaml: feed: wrong value (None) - write a group of keys"),
        ({"name": "x", "names": {"a": "b"}}, "f.yaml: names.a: wrong value ('a') - write a whole number"),
        ({"name": "x", "feed": {"zebra": 1}}, "f.yaml: feed.zebra: unknown key (1) - known keys: slots"),
        ({"name": "x", 7: 1}, "f.yaml: 7: unknown key (7) - known keys: name, rate"),
        ({"name": "x", "free": 3}, "f.yaml: free: wrong value (3) - write a group of keys"),
        ({"name": "x" * 500, "rate": "y" * 500}, "f.yaml: rate: wrong value ('yyyyyyyyyyyy...yyyyyyyyyyyyy')"),
        ([1, 2], "f.yaml: wrong value ([1, 2]) - write a group of keys"),
        ("text", "f.yaml: wrong value ('text') - write a group of keys"),
    ],
)
def test_a_mistake_names_key_value_and_remedy(values, expected):
    (problem,) = problems(values)
    assert problem.startswith(expected)


def test_flags_are_validated_like_files():
    with pytest.raises(ConfigError, match=r"^command line: slot: unknown key \(3\) - did you mean 'slots'\?$"):
        build_config({"slot": 3}, FeedPart)


def test_free_values_are_left_as_they_are():
    free = {"a": True, "b": [1, "2", None], "c": {"d": 0.5}}
    assert build_config({"name": "x", "free": free}, Job).free == free


def test_the_example_in_the_docs_is_correct(tmp_path, monkeypatch):
    page = (Path(__file__).parent.parent / "docs/config.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    sound, broken = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (expected,) = re.findall(r"```text\n(job.yaml: .*?)\n```", page, re.DOTALL)
    module = ModuleType("docs_example")
    monkeypatch.setitem(sys.modules, "docs_example", module)
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(sound)
    exec(program, vars(module))
    assert f"`{module.job}`" in page
    Path("job.yaml").write_text(broken)
    with pytest.raises(ConfigError) as caught:
        module.read_config("job.yaml", module.Job)
    assert str(caught.value) == expected


PLAIN_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=10,
)
JOB_KEYS = st.sampled_from(["name", "rate", "epochs", "workers", "folder", "resume", "feed", "stages", "names", "free"])


@settings(max_examples=300, deadline=None)
@given(PLAIN_VALUES | st.dictionaries(JOB_KEYS, PLAIN_VALUES))
def test_any_values_are_a_job_or_a_config_error(values):
    try:
        job = build_config(values, Job)
    except ConfigError as error:
        message = str(error)
        assert all(line.startswith("command line: ") for line in message.splitlines()), message
    else:
        assert isinstance(job, Job)
