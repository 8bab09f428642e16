"""Every golden file in tests/golden is used by a test, and the harness loses no case."""

import importlib
import json
from pathlib import Path

import pytest

from tests import golden_cases as harness
from tests.golden_cases import CLAIMS, SHIPPED, Claim, count_claimed, golden_cases, json_records

TESTS = Path(__file__).parent


@pytest.fixture
def other_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty golden folder in place of the shipped one, with its own list of claims."""
    monkeypatch.setenv("FLATOUT_GOLDEN", str(tmp_path))
    monkeypatch.setattr(harness, "CLAIMS", [])
    return tmp_path


def test_every_shipped_golden_file_has_cases_that_a_test_claims():
    # For when this file runs alone: importing a test module registers its claims.
    for path in TESTS.rglob("test_*.py"):
        if "golden_cases(" in path.read_text() and path != Path(__file__):
            importlib.import_module(".".join(path.relative_to(TESTS.parent).with_suffix("").parts))
    counts = count_claimed(SHIPPED, CLAIMS)
    assert counts, "tests/golden is empty"
    untested = [file for file, count in counts.items() if count == 0]
    assert not untested, f"no test finds a case in {untested}: call golden_cases(...) for them, or remove them"
    empty = [folder.name for folder in SHIPPED.iterdir() if folder.is_dir() and not any(folder.rglob("*.*"))]
    assert not empty, f"golden groups without files: {empty}"


def test_a_file_without_a_claim_counts_zero(tmp_path: Path):
    (tmp_path / "group").mkdir()
    (tmp_path / "group/known.json").write_text("[1, 2, 3]")
    (tmp_path / "group/known.npz").write_bytes(b"")
    (tmp_path / "group/forgotten.json").write_text("[1]")
    (tmp_path / "group/hollow.json").write_text("[]")
    claims = [Claim("group/known.json", json_records, ("group/known.npz",)), Claim("group/hollow.*", json_records, ())]
    assert count_claimed(tmp_path, claims) == {
        "group/known.json": 3,
        "group/known.npz": 3,
        "group/forgotten.json": 0,
        "group/hollow.json": 0,
    }


def test_every_record_becomes_a_case_named_after_its_group(other_root: Path):
    (other_root / "group").mkdir()
    (other_root / "group/a.json").write_text(json.dumps([{"input": 1}, {"input": 2}]))
    (other_root / "group/b.json").write_text(json.dumps([{"input": 3}]))
    cases = golden_cases("group/*.json")
    assert [case.id for case in cases] == ["group/a.json[0]", "group/a.json[1]", "group/b.json[0]"]
    assert [case.values[0]["input"] for case in cases] == [1, 2, 3]
    assert all("golden" in [mark.name for mark in case.marks] for case in cases)


@pytest.mark.parametrize("text", [None, "[]"])
def test_an_absent_or_empty_file_is_skipped_with_a_reason(other_root: Path, text: str | None):
    if text is not None:
        (other_root / "group").mkdir()
        (other_root / "group/none.json").write_text(text)
    (case,) = golden_cases("group/none.json")
    assert case.id.startswith("group/")
    skip = next(mark for mark in case.marks if mark.name == "skip")
    assert "group/none.json" in skip.kwargs["reason"]


def test_a_golden_folder_that_does_not_exist_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLATOUT_GOLDEN", str(tmp_path / "typo"))
    with pytest.raises(FileNotFoundError, match=r"FLATOUT_GOLDEN=.*typo is not a folder"):
        golden_cases("spike/workers.json")
