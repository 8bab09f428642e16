"""Any model config gives a network that runs or one clear error message, quickly and without executing anything."""

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from flatout.errors import ConfigError
from flatout.yaml_strict import parse_yaml
from flatout.yolo.model.configs import find_config, load_config
from flatout.yolo.model.layers import make_layer
from flatout.yolo.model.module_specs import MODULE_SPECS
from flatout.yolo.model.network import Network
from flatout.yolo.model.spec import ModelSpec, Row, parse_model
from tests.yolo.model.hostile_configs import HOSTILE, config
from tests.yolo.model.mutated_configs import mutated_text, mutated_tree

ROOT = Path(__file__).parents[3]
MAX_SECONDS = 1.0
MAX_SENTENCE = 500
SHIPPED = ("yolov7-tiny", "yolov7", "yolov7x", "yolov7-w6", "yolov7-e6", "deploy/yolov7-tiny-silu")


# -- fixed cases ---------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """What the child process reported for every config."""

    outcomes: dict[str, dict[str, Any]]
    totals: dict[str, Any]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("configs")
    texts = {name: hostile.text for name, hostile in HOSTILE.items()} | {"valid": config()}
    for name, text in texts.items():
        (folder / f"{name}.yaml").write_text(text)
    ran = subprocess.run(
        [sys.executable, "-m", "tests.yolo.model.hostile_configs_child", str(folder)],
        input="\n".join(texts),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 0, f"after {lines[-1:]}: {ran.stderr[-3000:]}"
    *outcomes, totals = lines
    return Run({outcome["name"]: outcome for outcome in outcomes}, totals)


def test_every_wrong_config_is_refused_with_a_sentence_that_says_why(run: Run):
    assert len(HOSTILE) >= 45
    wrong = [
        f"{name}: {result}"
        for name, hostile in HOSTILE.items()
        if not is_good_refusal(result := run.outcomes[name]["result"], name, hostile.words)
    ]
    assert wrong == []


def is_good_refusal(result: str, name: str, words: tuple[str, ...]) -> bool:
    """Exit code 2 and one line that names the file and contains the words of this case."""
    one_line = result.startswith("refused (2): ") and result.endswith((".", "?")) and "\n" not in result
    return (
        one_line and len(result) < MAX_SENTENCE and f"{name}.yaml:" in result and all(word in result for word in words)
    )


def test_the_config_they_are_made_from_is_valid(run: Run):
    assert run.outcomes["valid"]["result"] == "parsed"


def test_nothing_but_the_file_itself_is_touched(run: Run):
    assert [outcome for outcome in run.outcomes.values() if outcome["noted"]] == []
    assert not run.totals["ran"]


def test_the_audit_hook_would_have_noticed(run: Run):
    assert run.totals["missed"] == []


@pytest.mark.timing
def test_no_config_takes_long(run: Run):
    slowest = max(run.outcomes.values(), key=lambda outcome: outcome["seconds"])
    assert slowest["seconds"] < MAX_SECONDS, slowest


# -- mutations -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accepted() -> list[ModelSpec]:
    """The specs of the valid ones among 2,000 mutated configs; all others raise a ConfigError of one line."""
    rng = random.Random(7)
    # Mostly the small config: it is parsed in a tenth of the time, and every row of it matters.
    trees: list[Any] = [*map(load_config, SHIPPED), *[parse_yaml(config())] * 9]
    texts = [find_config("yolov7-tiny").read_text(), *[config()] * 5]
    mutations: list[Callable[[], Any]] = [lambda: mutated_tree(rng.choice(trees), rng)] * 1600
    mutations += [lambda: parse_yaml(mutated_text(rng.choice(texts), rng))] * 400
    specs, sentences = [], []
    for mutation in mutations:
        try:
            specs.append(parse_model(mutation()))
        except ConfigError as error:
            sentences.append(str(error))
    assert [each for each in sentences if len(each) > MAX_SENTENCE or "\n" in each] == []
    return specs


def test_some_mutations_are_accepted_and_most_are_refused(accepted: list[ModelSpec]):
    assert 200 < len(accepted) < 1000


@torch.no_grad()
def test_every_row_of_an_accepted_mutation_does_what_the_blueprint_says(accepted: list[ModelSpec]):
    # Rows of the shipped configs are checked by the golden tests.
    known = {signature(row) for name in SHIPPED for row in parse_model(load_config(name)).rows}
    rows = {signature(row): row for spec in accepted for row in spec.rows}
    changed = [row for key, row in rows.items() if key not in known and row.repeats < 100]
    assert len(changed) > 200
    for row in changed:
        check_row(row)


def signature(row: Row) -> tuple[Any, ...]:
    return row.module, tuple(row.args.items()), row.ins, row.repeats


def check_row(row: Row) -> None:
    with torch.device("meta"):
        layers = [make_layer(row.module, row.ins[0].channels, row.args).eval() for _ in range(row.repeats)]
        maps = [torch.empty(2, *shape) for shape in row.ins]
    y = layers[0](maps if MODULE_SPECS[row.module].inputs != "one" else maps[0])
    for layer in layers[1:]:
        y = layer(y)
    assert y.shape[1:] == row.out, row
    assert sum(parameter.numel() for layer in layers for parameter in layer.parameters()) == row.num_weights, row


@torch.no_grad()
def test_accepted_mutations_build_and_run_in_training_mode(accepted: list[ModelSpec]):
    for spec in random.Random(1).sample(accepted, 12):
        head = spec.head
        with torch.device("meta"):
            outputs = Network(spec)(torch.empty(2, spec.channels, 256, 256))
        sides = [round(256 / stride) for stride in head.strides] * (len(head.sources) // head.num_levels)
        num_anchors = len(head.anchors_px[0]) // 2
        assert [tuple(y.shape) for y in outputs] == [
            (2, num_anchors, side, side, head.num_classes + 5) for side in sides
        ]
