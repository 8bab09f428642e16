"""docs/data.md publishes every check, and its example runs."""

import re
import subprocess
import sys
from pathlib import Path

from flatout.findings import SEVERITIES
from flatout.yolo.data.check import run
from flatout.yolo.data.check.facts import CHECKS
from flatout.yolo.data.formats.registry import LAYOUTS, SET_FORMATS
from flatout.yolo.data.formats.sidecars import SIDECARS
from tests.yolo.data.drawn_set import SmallDataSet

PAGE = Path(__file__).parents[3] / "docs" / "data.md"
MARKS = r"<!-- checks: .*? -->\n(.*?)<!-- end of checks -->"


def table() -> str:
    """The published list, errors first."""
    assert run.REGISTERED_IN
    rows = ["| check | level | looks for | what to do |", "|---|---|---|---|"]
    for severity in SEVERITIES:
        chosen = sorted((check for check in CHECKS.values() if check.severity == severity), key=lambda check: check.id)
        rows += [f"| `{check.id}` | {severity} | {check.looks_for} | {check.advice} |" for check in chosen]
    return "\n".join(rows) + "\n"


def test_the_published_list_is_the_registry():
    found = re.search(MARKS, PAGE.read_text(), re.DOTALL)
    assert found, "the comments around the list are missing"
    assert found[1] == table(), f"write this between the comments:\n{table()}"


def test_the_list_of_findings_that_stop_a_training_is_the_registry():
    found = re.search(r"<!-- stops: .*? -->\n(.*?)<!-- end of stops -->", PAGE.read_text(), re.DOTALL)
    assert found, "the comments around the list are missing"
    listed = re.findall(r"`([a-z-]+)`", found[1])
    assert len(set(listed)) == len(listed)
    assert set(listed) == {check.id for check in CHECKS.values() if check.stops}
    assert {CHECKS[check].severity for check in listed} == {"error"}


def test_every_label_format_is_in_the_documentation():
    page = PAGE.read_text()
    titles = {format.title for format in SET_FORMATS} | {sidecar.title for sidecar in SIDECARS.values()}
    table = page[page.index("| format | entry") :].partition("\n\n")[0]
    assert [title for title in titles if f"\n| {title}" not in table] == []
    table = page[page.index("| `--to` |") :].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == list(LAYOUTS)
    kept = re.findall(r"^\| `(\w+)` .*\| kept \|", table, re.MULTILINE)
    assert kept == [name for name, layout in LAYOUTS.items() if layout.keeps_polygons]


def test_the_example_runs(tmp_path):
    SmallDataSet(tmp_path).yaml()
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(PAGE.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.startswith("4 ")


def test_no_module_of_the_package_imports_torch_or_opencv():
    folder = PAGE.parents[1] / "flatout" / "yolo" / "data"
    modules = [
        ".".join(path.relative_to(PAGE.parents[1]).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if path.name != "__init__.py"
    ]
    code = f"import sys, {', '.join(modules)}\nassert not {{'torch', 'cv2', 'simplejpeg'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=PAGE.parents[1], check=True, capture_output=True, timeout=60)
