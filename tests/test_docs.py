"""Examples and links of the documentation work."""

import importlib.util
import re
import sys
from pathlib import Path

import cv2
import numpy as np

DOCS = Path(__file__).parent.parent / "docs"


def test_the_first_example_of_the_feed_trains(tmp_path, monkeypatch, capsys):
    code = re.search(r"```python\n(.*?)```", (DOCS / "feed.md").read_text(), re.DOTALL).group(1)
    (tmp_path / "feed_example.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    spec = importlib.util.spec_from_file_location("feed_example", tmp_path / "feed_example.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "feed_example", example)
    spec.loader.exec_module(example)
    paths = [str(tmp_path / f"{number}.png") for number in range(9)]
    for path in paths:
        cv2.imwrite(path, np.zeros((40, 50, 3), np.uint8))
    example.train(paths, list(range(9)), [np.ones((number % 3, 5)) for number in range(9)])
    assert capsys.readouterr().out.count("samples/s") == 3


def test_every_link_between_pages_has_a_target():
    pages = [*DOCS.glob("*.md"), *DOCS.parent.glob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken


def test_nothing_advises_to_install_our_name_from_the_package_index():
    """The name there is not ours: a package that somebody else registers would be installed."""
    root = DOCS.parent
    folders = ("flatout/**/*.py", "flatout/**/*.sh", "bench/**/*.py", "examples/**/*", "weights/*.md")
    files = [*root.glob("*.md"), *DOCS.glob("*.md"), root / "run", root / "Dockerfile"]
    files += [path for folder in folders for path in root.glob(folder) if path.suffix in (".py", ".sh", ".md")]
    # An address after the name, `flatout[tb] @ git+...`, is not looked up.
    advice = re.compile(r"pip install [^\n|]*?[\"' ]flatout(?:\[[\w,]*\])?(?! ?@)(?:[=<>~!]|[\"'`\s]|$)")
    assert advice.search("pip install 'flatout[tb]'") and advice.search("`pip install -U flatout`")
    assert not advice.search('pip install "flatout[tb] @ git+https://HOST/OWNER/flatout"')
    assert not [f"{file.name}: {found[0]}" for file in files for found in advice.finditer(file.read_text())]
