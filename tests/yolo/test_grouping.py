"""Grouping of classes into heads: properties of every method, and the command `flatout yolo group`."""

import json
from collections.abc import Sequence
from itertools import pairwise, product
from pathlib import Path

import cv2
import numpy as np
import pytest
import yaml

from flatout.__main__ import main as flatout
from flatout.errors import ConfigError
from flatout.yolo.data.data_yaml import open_data_yaml
from flatout.yolo.demo_data.files import DemoDataConfig, write_demo_data
from flatout.yolo.find_file import shipped_folder
from flatout.yolo.multihead.grouping.chart import ratio_ticks
from flatout.yolo.multihead.grouping.choose import GroupConfig, as_yaml, group_classes, open_source
from flatout.yolo.multihead.grouping.methods import (
    HybridConfig,
    balanced,
    group_apart,
    group_by_geometry,
    group_by_hybrid,
    group_standard,
    in_order_of_occurrence,
    k_means,
    k_means_on_a_line,
    known_pairs,
    num_confused_together,
    sum_of_squares,
)
from flatout.yolo.multihead.grouping.statistics import (
    BoxTable,
    ClassStatistics,
    images_together,
    make_grouping,
    statistics_of,
)
from flatout.yolo.multihead.head_config import head_config_of, read_head_config

DATA = shipped_folder("data")
COCO_NAMES = yaml.safe_load((DATA / "coco.yaml").read_text())["names"]
BOXES_OF_COCO = [
    262465, 7113, 43867, 8725, 5135, 6069, 4571, 9973, 10759, 12884, 1865, 1983, 1285, 9838, 10806, 4768, 5508, 6587,
    9509, 8147, 5513, 1294, 5303, 5131, 8720, 11431, 12354, 6496, 6192, 2682, 6646, 2685, 6347, 9076, 3276, 3747, 5543,
    6126, 4812, 24342, 7913, 20650, 5479, 7770, 6165, 14358, 9458, 5851, 4373, 6399, 7308, 7852, 2918, 5821, 7179, 6353,
    38491, 5779, 8652, 4192, 15714, 4157, 5805, 4970, 2262, 5703, 2855, 6434, 1673, 3334, 225, 5610, 2637, 24715, 6334,
    6613, 1481, 4793, 198, 1954,
]  # fmt: skip
"""Annotations per class of train2017, crowds included: 860,001 in all."""


def random_statistics(num_classes: int, *, seed: int = 0) -> ClassStatistics:
    rng = np.random.default_rng(seed)
    num_boxes = 40 * num_classes
    size_T2 = np.exp(rng.normal(3, 0.5, (num_boxes, 2)) + np.linspace(-1, 1, num_boxes)[:, None] * (0.5, -0.5))
    class_T = np.arange(num_boxes) * num_classes // num_boxes
    return statistics_of(BoxTable(rng.integers(0, 30, num_boxes), class_T, size_T2), num_classes)


# Exact k-means on a line


def every_labelling(num_values: int, num_groups: int):
    for label_n in product(range(num_groups), repeat=num_values):
        if len(set(label_n)) == num_groups:
            yield np.array(label_n)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_the_grouping_of_a_line_is_optimal(seed: int, num_groups: int):
    value_n = np.random.default_rng(seed).normal(size=7).round(1)  # rounded, so that some are equal
    found = sum_of_squares(value_n[:, None], k_means_on_a_line(value_n, num_groups))
    best = min(sum_of_squares(value_n[:, None], label_n) for label_n in every_labelling(7, num_groups))
    assert found == pytest.approx(best, abs=1e-12)


@pytest.mark.parametrize("num_groups", [1, 4, 9, 60])
def test_groups_of_a_line_are_intervals_numbered_upwards(num_groups: int):
    value_n = np.random.default_rng(3).normal(size=60)
    label_n = k_means_on_a_line(value_n, num_groups)
    assert set(label_n.tolist()) == set(range(num_groups))
    assert (np.diff(label_n[np.argsort(value_n)]) >= 0).all()


def test_seeded_restarts_are_never_better_than_the_exact_groups():
    value_n = np.random.default_rng(5).normal(size=80)
    seeded = k_means(value_n[:, None], 4, seed=42)
    exact = k_means_on_a_line(value_n, 4)
    assert sum_of_squares(value_n[:, None], exact) <= sum_of_squares(value_n[:, None], seeded) + 1e-12


# Properties of every method


@pytest.mark.parametrize("num_classes", [1, 2, 7, 80])
@pytest.mark.parametrize("heads", [1, 2, 5, 7])
def test_every_class_has_exactly_one_head(num_classes: int, heads: int):
    statistics = random_statistics(num_classes)
    confused_CC = np.random.default_rng(1).random((num_classes, num_classes)) < 0.1
    ways = [
        lambda: group_by_geometry(statistics, heads),
        lambda: group_by_hybrid(statistics, heads, HybridConfig()),
        lambda: group_by_hybrid(statistics, heads, HybridConfig(alpha=0.2, beta=2, balance=True)),
        lambda: group_apart(statistics.num_boxes_C, confused_CC | confused_CC.T, heads),
        lambda: group_apart(np.zeros(num_classes, np.int64), confused_CC | confused_CC.T, heads),
        lambda: group_standard([str(number) for number in range(num_classes)], heads),
    ]
    for group in ways:
        if heads > num_classes:
            with pytest.raises(ConfigError, match=rf"--heads {heads}: {num_classes} classes"):
                group()
        else:
            config = group().config  # HeadConfig itself refuses classes that are missing or assigned twice
            assert (config.nc, config.num_heads) == (num_classes, heads)


def test_the_same_boxes_in_another_order_give_the_same_heads():
    rng = np.random.default_rng(2)
    image_T, class_T = rng.integers(0, 5000, 9000), rng.integers(0, 9, 9000)
    size_T2 = rng.uniform(2, 60, (9000, 2))
    shuffled_T = rng.permutation(9000)
    one = statistics_of(BoxTable(image_T, class_T, size_T2), 9)
    other = statistics_of(BoxTable(image_T[shuffled_T] * 3 + 10, class_T[shuffled_T], size_T2[shuffled_T]), 9)
    np.testing.assert_array_equal(one.together_CC, other.together_CC)
    assert group_by_hybrid(one, 3, HybridConfig()) == group_by_hybrid(other, 3, HybridConfig())


def test_an_image_counts_a_class_once_for_boxes_of_any_size():
    together_CC = images_together(np.array([5, 5, 5, 9, 2]), np.array([0, 0, 1, 0, 2]), 4)
    assert together_CC.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_shapes_of_tiny_boxes_do_not_count():
    size_T2 = np.array([[8.0, 4.0], [1.0, 50.0], [90.0, 0.5]])
    statistics = statistics_of(BoxTable(np.arange(3), np.zeros(3, np.int64), size_T2), 2)
    assert statistics.log_ratio_C.tolist() == [pytest.approx(np.log(2)), 0.0]
    assert statistics.num_boxes_C.tolist() == [3, 0]


# k-means and balancing


@pytest.mark.parametrize("problem", range(5))
def test_other_seeds_do_not_find_tighter_clusters(problem):
    point_N2 = np.random.default_rng(problem).random((40, 2))
    found = sum_of_squares(point_N2, k_means(point_N2, 6, seed=42))
    best = min(sum_of_squares(point_N2, k_means(point_N2, 6, seed=seed, restarts=100)) for seed in range(3))
    assert found <= best * 1.0005


def test_clusters_are_numbered_in_the_order_of_their_first_points():
    assert in_order_of_occurrence(np.array([7, 3, 7, 0, 3])).tolist() == [0, 1, 0, 2, 1]


def test_identical_points_still_fill_every_cluster():
    label_N = k_means(np.zeros((5, 2)), 3, seed=0)
    assert set(label_N.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("seed", range(6))
def test_balancing_ends_within_bounds_on_one_side(seed: int):
    rng = np.random.default_rng(seed)
    similarity_CC = rng.random((60, 60))
    label_C = np.minimum(rng.integers(0, 9, 60), 3) if seed % 2 else np.repeat([0, 1, 2, 3], [45, 9, 3, 3])
    size_K = np.bincount(balanced(label_C, similarity_CC, 4), minlength=4)
    assert size_K.sum() == 60
    assert size_K.max() <= 20 or size_K.min() >= 10


def test_balancing_moves_the_class_that_is_most_similar_to_the_small_cluster():
    similarity_CC = np.eye(15)
    similarity_CC[4, 14] = similarity_CC[9, 14] = 0.5  # equal, so the lower class moves
    label_C = np.repeat([0, 1], [14, 1])
    moved = np.flatnonzero(balanced(label_C, similarity_CC, 2) != label_C)
    assert moved[0] == 4
    assert len(moved) == 2  # 12 is no longer too large: 15 / 2 + 5


# Anti-confusion and standard


def test_the_shipped_anticonfusion_heads_follow_from_the_boxes_of_coco():
    assert sum(BOXES_OF_COCO) == 860_001
    found = group_apart(np.array(BOXES_OF_COCO), known_pairs(COCO_NAMES), 4)
    shipped = read_head_config(DATA / "coco_320_1b4h_anticonfusion.yaml")
    assert [head.classes for head in found.config.heads] == [head.classes for head in shipped.heads]
    assert found.comments[0] == "262465 boxes (30.5 %)"
    assert [comment.split()[0] for comment in found.comments[1:]] == ["199806", "198854", "198876"]
    assert num_confused_together(known_pairs(COCO_NAMES), found) == 0


def test_too_few_heads_share_confused_classes_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "matrix.csv").write_text("9,3,3\n3,9,3\n3,3,9\n")
    with caplog.at_level("WARNING"):
        group_classes(open_source(str(tmp_path / "matrix.csv")), GroupConfig(method="anticonfusion", heads=2))
    assert "1 confused pairs share a head" in caplog.text


def test_standard_heads_are_the_shipped_ones_for_coco_and_blocks_otherwise():
    shipped = read_head_config(DATA / "coco_320_1b4h_standard.yaml")
    assert group_standard(COCO_NAMES, 4).config == shipped
    blocks = group_standard(COCO_NAMES, 5).config.heads
    assert [len(head.classes) for head in blocks] == [16] * 5
    assert all(one.classes[-1] + 1 == other.classes[0] for one, other in pairwise(blocks))


# Files


def test_a_written_head_configuration_reads_back():
    classes = [list(range(0, 140, 2)), [3], [number for number in range(1, 140, 2) if number != 3]]
    grouping = make_grouping("geometry_kmeans", classes, ["a: #1", "ü", "c"], ["Avg Ratio: 0.50", "", "x"])
    text = as_yaml(grouping, generated_by="flatout yolo group --method geometry")
    assert max(map(len, text.splitlines())) <= 120
    content = yaml.safe_load(text)
    assert list(content) == ["nc", "heads", "grouping", "generated_by", "head_assignments"]
    assert head_config_of(content, where="text") == grouping.config
    assert content["head_assignments"]["head_0"]["comment"] == "Avg Ratio: 0.50"


def test_a_data_yaml_may_contain_its_head_configuration(tmp_path: Path):
    grouping = make_grouping("hybrid_spectral", [[0], [1, 2]], ["Tall", "Wide"], ["Ratio: 0.5", ""])
    path = tmp_path / "both.yaml"
    path.write_text("train: a\nval: b\nnames: [x, y, z]\n" + as_yaml(grouping, generated_by="flatout yolo group"))
    assert open_data_yaml(path).names == ("x", "y", "z")
    assert read_head_config(path) == grouping.config


@pytest.fixture(scope="module")
def data_yaml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo_data(tmp_path_factory.mktemp("demo"), DemoDataConfig(images=12, val=3, seed=1))


def coco_file(folder: Path, rows: Sequence[tuple[int, int, float, float]], names: Sequence[str]) -> Path:
    path = folder / "instances.json"
    categories = [{"id": 2 * number + 1, "name": name} for number, name in enumerate(names)]
    annotations = [
        {"image_id": image, "category_id": 2 * number + 1, "bbox": [0, 0, width, height], "iscrowd": image % 2}
        for image, number, width, height in rows
    ]
    path.write_text(json.dumps({"images": [], "categories": categories[::-1], "annotations": annotations}))
    return path


@pytest.mark.parametrize(("low", "high"), [(0.99, 1.15), (0.2, 5.0), (3.1, 3.2), (0.01, 40.0)])
def test_the_axis_of_shapes_has_ticks_even_if_all_shapes_are_similar(low: float, high: float):
    ticks = ratio_ticks(float(np.log(low)), float(np.log(high)))
    assert len({text for _, text in ticks}) == len(ticks) >= 3
    assert all(low * 0.999 <= ratio <= high * 1.001 and float(text) == pytest.approx(ratio) for ratio, text in ticks)


@pytest.mark.parametrize("method", ["standard", "geometry", "hybrid", "hybrid --balance"])
def test_the_command_writes_heads_and_a_chart(
    method: str, data_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert flatout(["yolo", "group", str(data_yaml), "--method", *method.split(), "--heads", "3"]) == 0
    name = method.split()[0]
    config = read_head_config(f"heads.{name}.yaml")
    assert (config.nc, config.num_heads) == (6, 3)
    chart = cv2.imread(f"heads.{name}.png")
    assert chart is not None and chart.std() > 5
    assert "6 classes in 3 heads" in capsys.readouterr().out
    assert flatout(["yolo", "group", str(data_yaml), "--method", name, "--heads", "3"]) == 2
    assert f"heads.{name}.yaml already exists" in capsys.readouterr().err
    assert flatout(["yolo", "group", "none.yaml", "--method", name, "--heads", "3"]) == 2
    assert "SOURCE none.yaml: no such file" in capsys.readouterr().err, (
        "a missing source is reported before an existing output"
    )


def test_a_coco_file_needs_no_images_and_counts_crowds(tmp_path: Path):
    rows = [(1, 0, 10, 40), (1, 0, 10, 40), (2, 1, 40, 10), (3, 2, 41, 10)]
    source = open_source(str(coco_file(tmp_path, rows, ["pole", "bar", "car"])))
    assert source.names == ("pole", "bar", "car")
    grouped = group_classes(source, GroupConfig(method="geometry", heads=2))
    assert [head.classes for head in grouped.grouping.config.heads] == [(0,), (1, 2)]
    assert grouped.statistics is not None and grouped.statistics.num_boxes_C.tolist() == [2, 1, 1]


def test_labels_and_a_confusion_matrix_together_separate_confused_classes(
    data_yaml: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    counts = np.eye(7) * 50
    counts[2, 4] = 20  # class 4 is detected as 2
    np.savez(tmp_path / "matrix.npz", matrix=counts)
    out = tmp_path / "apart.yaml"
    words = f"--method anticonfusion --confusion {tmp_path / 'matrix.npz'} --heads 2 --out {out}"
    assert flatout(["yolo", "group", str(data_yaml), *words.split()]) == 0
    config = read_head_config(out)
    assert config.head_C[2] != config.head_C[4]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("{matrix} --method geometry --heads 2", "--method geometry needs boxes, and this source has none"),
        ("{coco} --method geometry --heads 9", "--heads 9: 3 classes can be divided among 1 to 3 heads."),
        ("{coco} --method anticonfusion --heads 2", "Use --confusion with a confusion matrix"),
        ("{coco} --method anticonfusion --heads 2 --confusion {matrix}", "2 classes, but {coco} has 3."),
        ("{coco} --method hybrid --heads 2 --alpha 0 --beta 0", "--alpha 0 --beta 0: neither may be negative"),
        ("{coco} --method anticonfusion --confused-from 2", "--confused-from 2 must be above 0 and at most 1."),
        ("{matrix} --method standard --heads 2 --out heads.txt", "--out heads.txt: the name must end in .yaml."),
        ("nowhere.yaml --method standard", "SOURCE nowhere.yaml: no such file"),
        ("nowhere.csv --method anticonfusion", "nowhere.csv: cannot be read: No such file or directory."),
        ("{empty} --method hybrid --heads 2", "it has no boxes, which --method hybrid needs."),
    ],
)
def test_mistakes_are_reported_in_one_line(
    words: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none").mkdir()
    paths = {
        "coco": coco_file(tmp_path, [(1, 0, 10, 40)], ["x", "y", "z"]),
        "empty": coco_file(tmp_path / "none", [], ["x", "y", "z"]),
        "matrix": tmp_path / "matrix.csv",
    }
    paths["matrix"].write_text("3 1\n0 4\n")
    assert flatout(["yolo", "group", *words.format(**paths).split()]) in (2, 3)
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.format(**paths) in line
