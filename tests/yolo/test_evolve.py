"""`--evolve`: mutation by key as in the table, searches that continue where they stopped, and their files."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest

from flatout.charts.evolution import plot_evolution
from flatout.errors import ConfigError, DivergedError, Interrupted
from flatout.runs.folder import RunRequest, choose_run
from flatout.yolo import evolve as module
from flatout.yolo.evolve import DECIMALS, GENES, KEYS, EvolutionLog, choose_parent, evolve, hyp_text, mutated, values_of
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import load_hyp
from flatout.yolo.metrics import YOLOV7_RESULTS, fitness
from flatout.yolo.options import GENERATIONS, TrainOptions
from flatout.yolo.run_config import identity
from tests.yolo.recipes import recipe


def scores_of(*numbers: float) -> dict[str, float]:
    return dict(zip(YOLOV7_RESULTS, numbers, strict=True))


def test_every_key_of_a_hyp_file_is_in_a_row_and_every_gene_has_its_own_gain():
    assert len(KEYS) == 31 and KEYS[-1] == "anchors"
    assert set(KEYS) == {*GENES, "loss_ota"}
    # Some rows of the specification's table, to notice rows that are off by one.
    assert GENES["momentum"] == (0.3, 0.6, 0.98) and GENES["anchors"] == (2, 2, 10) and GENES["degrees"] == (1, 0, 45)
    assert [name for name, gene in GENES.items() if gene.gain == 0] == ["iou_t", "fl_gamma", "perspective", "fliplr"]


@pytest.mark.parametrize("file", ["hyp.scratch.tiny.yaml", "hyp.scratch.p5.yaml", "hyp.scratch.p6.yaml"])
def test_children_stay_within_their_limits_and_fixed_values_stay(file: str):
    values = values_of(recipe(file, anchors=3))
    changed = set()
    for seed in range(200):
        child = mutated(values, np.random.default_rng(seed))
        assert child["loss_ota"] == values["loss_ota"]
        for name, (gain, low, high) in GENES.items():
            assert low <= child[name] <= high and child[name] == round(child[name], DECIMALS)
            assert gain > 0 or child[name] == values[name], name
        assert child != values, "a child equal to its parent would waste a training"
        changed |= {name for name in values if child[name] != values[name]}
    assert changed == {name for name in GENES if GENES[name].gain and values[name]}, "0 times anything is 0"


def test_factors_are_as_likely_as_the_table_says():
    ones = dict.fromkeys(("cls_pw", "obj_pw", "momentum"), 1.0)
    factor_N = np.array([mutated(ones, np.random.default_rng(seed))["cls_pw"] for seed in range(4000)])
    # 1 + mask * N * u * 0.2: a fifth is masked out, and the variance is 0.8 * (1/3) * 0.04.
    assert (factor_N == 1).mean() == pytest.approx(0.2, abs=0.03)
    assert factor_N.var() == pytest.approx(0.8 / 3 * 0.04, rel=0.15)


def test_parents_are_the_best_five_by_their_lead():
    fitness_N = np.array([0.9, 0.1, 0.5, 0.6, 0.7, 0.8, 0.2])
    chosen = [choose_parent(fitness_N, np.random.default_rng(seed)) for seed in range(3000)]
    assert set(chosen) == {0, 3, 4, 5}, "the fifth best has no lead over itself"
    assert np.mean([row == 0 for row in chosen]) == pytest.approx(0.4, abs=0.04)
    assert {choose_parent(np.zeros(3), np.random.default_rng(seed)) for seed in range(50)} == {0, 1, 2}
    assert choose_parent(np.array([0.3]), np.random.default_rng(0)) == 0


def test_an_incomplete_line_is_ignored(tmp_path: Path):
    log, values = EvolutionLog(tmp_path), values_of(recipe())
    for score in (0.1, 0.3, 0.2):
        log.add(scores_of(0, 0, score, score, 0, 0, 0), values)
    text = log.path.read_text()
    assert [len(line.split()) for line in text.splitlines()] == [7 + 31] * 3
    log.path.write_text(text[:-5])
    again = EvolutionLog(tmp_path)
    assert len(again) == 2 and again.best == 1 and again.values == log.values[:2]


def test_the_best_values_are_a_hyp_file(tmp_path: Path):
    hyp = recipe(warmup_iters=7)
    values = values_of(hyp) | {"lr0": 0.00001, "degrees": 44.99999}
    (tmp_path / "hyp.yaml").write_text(hyp_text(values, hyp, about="generation 3"))
    read = load_hyp(tmp_path / "hyp.yaml")
    assert read == replace(hyp, lr0=0.00001, degrees=44.99999)
    assert read.anchors is None, "a network that keeps its own anchors keeps them"


# Whole searches with a fake training


class FakeTraining:
    """Computes scores from the hyp file; raises the error that `script` has for its n-th call."""

    def __init__(self, script: dict[int, Exception] | None = None) -> None:
        self.calls = 0
        self._script = script or {}

    def __call__(self, options: TrainOptions, callbacks: Any = (), *, spending: Any) -> Any:
        self.calls += 1
        if error := self._script.get(self.calls):
            raise error
        assert (options.evolve, options.nosave, options.notest, options.exist_ok) == (False, True, True, True)
        hyp = load_hyp(options.hyp)
        Path(options.project, options.name).mkdir(exist_ok=True)
        score = 0.5 / (1 + abs(hyp.lr0 - 0.013) + abs(hyp.box - 0.07) + hyp.translate)
        outcome = SimpleNamespace(scores=scores_of(0.1, 0.2, score, score / 2, 1.0, 2.0, 3.0))
        return SimpleNamespace(finished=True, outcome=outcome, why="")


@pytest.fixture
def no_plot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the plot, which takes longer than everything else here."""
    monkeypatch.setattr("flatout.charts.plot_evolution", lambda table, parameters, file: file)


@pytest.fixture
def search(tmp_path: Path) -> TrainOptions:
    return TrainOptions(evolve=12, project=str(tmp_path / "runs"), data="data/coco320.yaml", seed=3, log_to=("none",))


@pytest.mark.usefixtures("no_plot")
def test_an_interrupted_search_ends_as_an_undisturbed_one(search: TrainOptions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "train", FakeTraining())
    undisturbed = evolve(replace(search, name="a"))
    for stop in (1, 2, 5):
        monkeypatch.setattr(module, "train", FakeTraining({stop: Interrupted.by("SIGTERM")}))
        with pytest.raises(Interrupted):
            evolve(replace(search, name="b"))
    monkeypatch.setattr(module, "train", trainer := FakeTraining())
    resumed = evolve(replace(search, name="b"))
    assert trainer.calls == 12 - (0 + 1 + 4), "generations that are complete are not trained again"
    assert (resumed.folder / "evolve.txt").read_bytes() == (undisturbed.folder / "evolve.txt").read_bytes()
    assert resumed.folder.name == "b" and resumed.finished and resumed.best_fitness == undisturbed.best_fitness
    assert json.loads((resumed.folder / "run.json").read_text())["finished"]


@pytest.mark.usefixtures("no_plot")
def test_the_files_of_a_search(search: TrainOptions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "train", FakeTraining())
    folder = evolve(replace(search, evolve=8)).folder
    plot = cv2.imread(str(plot_evolution(folder / "evolve.csv", KEYS)))
    assert plot is not None and (plot < 200).any(axis=2).mean() > 0.01, "an empty plot"
    rows = list(csv.DictReader((folder / "evolve.csv").open()))
    assert list(rows[0]) == ["generation", "fitness", *YOLOV7_RESULTS, *KEYS] and len(rows) == 8
    best = max(rows, key=lambda row: float(row["fitness"]))
    assert float(best["fitness"]) == pytest.approx(
        fitness(map50=float(best["mAP_0.5"]), map50_95=float(best["mAP_0.5:0.95"])), abs=1e-6
    )
    assert load_hyp(folder / "hyp_evolved.yaml").lr0 == float(best["lr0"])
    assert [path.name for path in folder.glob("generation_*")] == [f"generation_{int(best['generation']):03d}"]
    assert float(best["fitness"]) > float(rows[0]["fitness"]), "eight generations found nothing better"


@pytest.mark.usefixtures("no_plot")
def test_generations_depend_on_the_seed(search: TrainOptions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "train", FakeTraining())
    texts = [(evolve(replace(search, evolve=4, name=n, seed=seed)).folder / "evolve.txt").read_text()
             for n, seed in (("a", 1), ("b", 1), ("c", 2))]  # fmt: skip
    assert texts[0] == texts[1] != texts[2]
    assert texts[0].splitlines()[0] == texts[2].splitlines()[0], "the first generation is the hyp file as it is"


@pytest.mark.usefixtures("no_plot")
def test_a_generation_that_diverges_has_fitness_0(
    search: TrainOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(module, "train", FakeTraining({2: DivergedError("Loss is not finite.")}))
    result = evolve(replace(search, evolve=3))
    assert EvolutionLog(result.folder).fitness_N[1] == 0 and result.finished
    assert "Its fitness counts as 0" in caplog.text


@pytest.mark.usefixtures("no_plot")
def test_a_search_without_any_success_says_so_and_how_long_it_took(
    search: TrainOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO", "flatout")
    diverged = DivergedError("Loss is not finite.")
    monkeypatch.setattr(module, "train", FakeTraining({1: diverged, 2: diverged}))
    folder = evolve(replace(search, evolve=2)).folder
    assert "All generations have fitness 0" in caplog.text
    assert "Generation 1: fitness 0.00000, its folder is removed; the best is 0.00000 of generation 0." in caplog.text
    assert caplog.messages[-1].startswith(f"{folder}: 0:0"), "time and cost come last"
    monkeypatch.setattr(module, "train", FakeTraining())
    caplog.clear()
    evolve(replace(search, evolve=2, name="found"))
    assert "All generations have fitness 0" not in caplog.text


@pytest.mark.usefixtures("no_plot")
def test_a_training_does_not_continue_in_the_folder_of_a_search_nor_a_search_in_that_of_a_training(
    search: TrainOptions, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "train", FakeTraining({2: Interrupted.by("SIGTERM")}))
    with pytest.raises(Interrupted):
        evolve(search)
    training, hyp = replace(search, evolve=False), load_hyp(find_file(search.hyp))
    meant = identity(training, hyp, cuda=False, bf16=False)
    with choose_run(RunRequest(project=Path(search.project), name="exp", identity=meant)) as run:
        assert (run.folder.name, run.continues) == ("exp2", False)
    monkeypatch.setattr(module, "train", FakeTraining())
    assert evolve(search).folder.name == "exp"
    assert evolve(search).folder.name == "exp3", "exp2 is unfinished, and a training"


@pytest.mark.usefixtures("no_plot")
def test_a_search_started_by_an_older_version_continues(search: TrainOptions, monkeypatch: pytest.MonkeyPatch):
    """The older version saved more options, and lacks the newest."""
    monkeypatch.setattr(module, "train", FakeTraining({2: Interrupted.by("SIGTERM")}))
    with pytest.raises(Interrupted):
        evolve(search)
    path = Path(search.project, "exp/run.json")
    record = json.loads(path.read_text())
    for key in ("hyp.aspect", "hyp.gamma", "head_attention"):
        del record["config"][key]
    record["config"] |= {"hyp": search.hyp, "nosave": False, "fast_dataloader": False, "v5_metric": False}
    path.write_text(json.dumps(record))
    monkeypatch.setattr(module, "train", trainer := FakeTraining())
    assert evolve(search).folder.name == "exp" and trainer.calls == search.generations - 1


def test_a_search_runs_in_one_process(search: TrainOptions, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(ConfigError, match="without torchrun"):
        evolve(search)
    assert TrainOptions(evolve=True).generations == GENERATIONS == 300
    assert (TrainOptions().generations, TrainOptions(evolve=7).generations) == (0, 7)
