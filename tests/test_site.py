"""The documentation site is built from docs/, with a page for every command and package and without a broken link."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HTML = ROOT / "build" / "site" / "html"


@pytest.fixture(scope="module")
def site() -> Path:
    pytest.importorskip("zensical", reason="the extra `docs` is not installed")
    done = subprocess.run([sys.executable, ROOT / "docs" / "site.py"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return HTML


def test_every_page_of_the_documentation_is_in_the_navigation():
    listed = set(re.findall(r"(\S+\.md)\s*$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= listed


@pytest.mark.slow
def test_the_site_has_every_page(site: Path):
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()
    yolo = (site / "reference" / "yolo.html").read_text()
    assert "--batch-size" in yolo and "flatout yolo train" in yolo
    assert "workers" in (site / "reference" / "python" / "flatout.html").read_text()
    assert (site / "repository" / "CHANGELOG.html").is_file()


@pytest.mark.slow
def test_search_finds_words_without_a_server(site: Path):
    """The index is a script beside the pages, so that it is found from the file system too."""
    assert (site / "search.js").is_file()
    texts = json.dumps(json.loads((site / "search.json").read_text()))
    assert "mosaic" in texts and "checkpoint" in texts


@pytest.mark.slow
def test_comments_in_the_pages_are_not_shown(site: Path):
    """Blocks that no test runs say so in a comment above them (tests/test_doc_blocks.py)."""
    texts = {page: page.read_text() for page in site.glob("*.html")}
    assert any("<!-- not run: " in text for text in texts.values())
    for page, text in texts.items():
        assert "not run: " not in re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL), page


@pytest.mark.slow
def test_no_page_asks_anything_of_the_network(site: Path):
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text())
        assert not loaded, page
