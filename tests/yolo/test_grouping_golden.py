"""Grouping gives the golden results: statistics, groups by shape, and balancing."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from flatout.yolo.multihead.grouping.methods import (
    HybridConfig,
    balanced,
    cooccurrence_similarity,
    group_by_geometry,
    grouping_of_clusters,
    k_means,
    mixed_similarity,
    shape_similarity,
    spectral_embedding,
    sum_of_squares,
)
from flatout.yolo.multihead.grouping.statistics import BoxTable, ClassStatistics, Grouping, statistics_of
from tests.golden_cases import golden_cases

ARRAYS = {
    "mean_log_ratio": lambda found: found.log_ratio_C,
    "geometry_similarity": lambda found: shape_similarity(found.log_ratio_C),
    "cooccurrence_similarity": lambda found: cooccurrence_similarity(found.together_CC),
}
TOLERANCE = 1e-6
KNOWN = {
    "geometry", "geometry_grouping", "geometry_equals_optimal_1d_kmeans", "hybrid", "hybrid_grouping",
    "hybrid_balanced", "hybrid_balanced_grouping", "hybrid_raw_labels",
}  # fmt: skip


class Case(NamedTuple):
    """A golden file: our statistics of its annotations, its arrays and its record."""

    computed: ClassStatistics | None
    arrays: dict[str, np.ndarray]
    record: dict[str, Any]

    @property
    def statistics(self) -> ClassStatistics:
        return self.computed if self.computed is not None else pytest.skip("this file has no annotations")


def opened(path: Path) -> Case:
    beside = path.with_suffix(".npz")
    arrays, record = dict(np.load(beside)) if beside.exists() else {}, json.loads(path.read_text())
    if "annotations" not in arrays:
        return Case(None, arrays, record)
    image_T, class_T, *_ = arrays["annotations"].T
    # The last classes may have no boxes, so the number of classes is taken from the other entries.
    sides = [len(array) for name, array in arrays.items() if name != "annotations"]
    num_classes = max([*sides, len(record.get("hybrid_raw_labels", ())), int(class_T.max()) + 1])
    boxes = BoxTable(image_T.astype(np.int64), class_T.astype(np.int64), arrays["annotations"][:, 2:])
    return Case(statistics_of(boxes, num_classes), arrays, record)


def array_cases(path: Path):
    case = opened(path)
    return [(name, (name, case)) for name in case.arrays if name != "annotations"]


def whole_file(path: Path):
    return [(path.stem, opened(path))]


def written(grouping: Grouping) -> dict[str, dict[str, Any]]:
    """A grouping in the form of the golden records."""
    return {
        f"head_{number}": {"name": head.name, "classes": list(head.classes), "comment": comment}
        for number, (head, comment) in enumerate(zip(grouping.config.heads, grouping.comments, strict=True))
    }


@pytest.mark.parametrize("case", golden_cases("yolov7-1b4h/grouping*.json", array_cases))
def test_statistics_of_the_annotations(case):
    name, file = case
    np.testing.assert_allclose(ARRAYS[name](file.statistics), file.arrays[name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    "case", golden_cases("yolov7-1b4h/grouping*.json", whole_file, also=("yolov7-1b4h/grouping.npz",))
)
class TestGroups:
    def test_every_entry_of_the_file_is_tested(self, case):
        assert set(case.record) <= KNOWN

    def test_geometry_is_the_golden_one(self, case):
        if "geometry" not in case.record:
            pytest.skip("no geometry in this file")
        expected = case.record["geometry"]
        found = group_by_geometry(case.statistics, len(expected))
        if case.record.get("geometry_equals_optimal_1d_kmeans", True):
            assert written(found) == expected
        assert found.config.grouping == case.record.get("geometry_grouping", "geometry_kmeans")

    def test_balancing_the_golden_clusters_gives_the_golden_heads(self, case):
        if not {"hybrid_balanced", "hybrid_raw_labels"} <= set(case.record):
            pytest.skip("no clusters before balancing in this file")
        expected = case.record["hybrid_balanced"]
        similarity_CC = mixed_similarity(case.statistics, HybridConfig())
        label_C = balanced(np.array(case.record["hybrid_raw_labels"]), similarity_CC, len(expected))
        found = grouping_of_clusters(label_C, case.statistics, balanced=True)
        assert written(found) == expected
        assert found.config.grouping == case.record.get("hybrid_balanced_grouping", "hybrid_spectral_balanced")

    def test_the_golden_clusters_get_the_golden_names(self, case):
        if not {"hybrid", "hybrid_raw_labels"} <= set(case.record):
            pytest.skip("no clusters in this file")
        found = grouping_of_clusters(np.array(case.record["hybrid_raw_labels"]), case.statistics, balanced=False)
        assert written(found) == case.record["hybrid"]
        assert found.config.grouping == case.record.get("hybrid_grouping", "hybrid_spectral")

    def test_our_clusters_are_as_tight_as_the_golden_ones(self, case):
        if "hybrid_raw_labels" not in case.record:
            pytest.skip("no clusters in this file")
        theirs_C = np.array(case.record["hybrid_raw_labels"])
        num_clusters = theirs_C.max() + 1
        embedding = spectral_embedding(mixed_similarity(case.statistics, HybridConfig()), num_clusters)
        ours_C = k_means(embedding, num_clusters, seed=42)
        assert sum_of_squares(embedding, ours_C) <= sum_of_squares(embedding, theirs_C) * (1 + 1e-9)
