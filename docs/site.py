"""Build the documentation site: ./run docs

    docs/*.md, and every file they link to --copied, links adjusted--> build/site/source
    flags of all commands, docstrings of the public packages --written as pages--> build/site/source/reference
    mkdocs.yml --zensical, strict--> build/site/html          open index.html: search works offline, too

The Markdown files can be read without it. A link that leads nowhere fails the build.
"""

import ast
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import is_dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site" / "source"
HTML = ROOT / "build" / "site" / "html"
REMOTE_SCRIPT, SEARCH_SCRIPT = "https://unpkg.com/iframe-worker/shim", "search_from_files.js"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
HELP_COLUMNS = "110"
MAX_COLUMNS = 100
PACKAGES = {
    "flatout": "The feed, for any data and any loop",
    "flatout.yolo": "Detection in Python: load, train, evaluate, predict, export",
    "flatout.yolo.loss": "The detection losses and their assignment",
    "flatout.yolo.nms": "Non-maximum suppression",
    "flatout.yolo.metrics": "Matching, average precision, confusion",
    "flatout.defect": "Die-to-die defect segmentation in Python",
    "flatout.spike": "Spike-camera deblurring in Python",
    "flatout.feed": "All parts of the feed",
    "flatout.engine": "The training loop, callbacks, checkpoints",
    "flatout.runs": "A training run, and the recipe that a job hands to it",
    "flatout.profiler": "Where the time of a loop goes",
    "flatout.safefiles": "Files of torch and pickles, read without running them",
}
"""Packages whose public names the reference lists."""


def main() -> int:
    if SOURCE.exists():
        shutil.rmtree(SOURCE)
    pages = sorted((ROOT / "docs").glob("*.md"))
    stage([page.relative_to(ROOT) for page in pages])
    write_command_reference()
    write_python_reference()
    command = [
        sys.executable,
        "-m",
        "zensical",
        "build",
        "--clean",
        "--strict",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
    ]
    code = subprocess.run(command, cwd=ROOT, check=False).returncode
    if code == 0:
        make_search_local()
    return code


def make_search_local() -> None:
    """Replace the one script that the pages would load from the network with ours."""
    shutil.copyfile(ROOT / "docs" / SEARCH_SCRIPT, HTML / "assets" / SEARCH_SCRIPT)
    for page in HTML.rglob("*.html"):
        to_top = os.path.relpath(HTML, page.parent)
        page.write_text(page.read_text().replace(REMOTE_SCRIPT, f"{to_top}/assets/{SEARCH_SCRIPT}"))


# Copies of the pages, and of what they link to


def staged_path(path: Path) -> Path:
    """Where a file of the repository lies in the staged tree: pages at its top, everything else below repository/."""
    return Path(*path.parts[1:]) if path.parts[0] == "docs" else Path("repository") / path


def stage(paths: list[Path]) -> None:
    """Copy these files and everything that they link to; a folder becomes a page that lists its files."""
    waiting, done = list(paths), set[Path]()
    while waiting:
        path = waiting.pop()
        if path in done:
            continue
        done.add(path)
        if (ROOT / path).is_dir():
            files = sorted(each.relative_to(ROOT) for each in (ROOT / path).glob("*.md"))
            text = "\n".join([f"# {path}", "", *(f"- [{each.name}]({each.name})" for each in files)]) + "\n"
            here = path / "index.md"
        else:
            text = (ROOT / path).read_text() if path.suffix == ".md" else ""
            here = path
        out = SOURCE / staged_path(here)
        out.parent.mkdir(parents=True, exist_ok=True)
        if here.suffix != ".md":
            shutil.copyfile(ROOT / path, out)
            continue
        waiting += targets_of(here, text)
        out.write_text(with_staged_links(here, text))


def targets_of(page: Path, text: str) -> Iterator[Path]:
    """Files and folders that a page links to; links that lead nowhere are left to the strict build."""
    for _, target, _ in LINK.findall(text):
        with suppress(ValueError):
            path = (ROOT / page.parent / target).resolve().relative_to(ROOT)
            if (ROOT / path).exists():
                yield path


def with_staged_links(page: Path, text: str) -> str:
    def adjusted(match: re.Match[str]) -> str:
        before, target, after = match.groups()
        file = (ROOT / page.parent / target).resolve()
        if not file.is_relative_to(ROOT) or not file.exists():
            return match[0]
        path = file.relative_to(ROOT)
        there = staged_path(path / "index.md" if file.is_dir() else path)
        return f"{before}{os.path.relpath(there, staged_path(page).parent)}{after}"

    return LINK.sub(adjusted, text)


# Reference pages


def write_command_reference() -> None:
    """One page per group of commands, with the help of each as it is printed."""
    from flatout.__main__ import COMMANDS
    from flatout.cli import JOBS

    folder = SOURCE / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for job in JOBS:
        commands = import_module(f"flatout.{job}.cli").COMMANDS
        sections = [section(f"flatout {job} {name}", [job, name, "--help"]) for name in commands]
        write_page(folder / f"{job}.md", f"flatout {job}", sections)
    others = [name for name in COMMANDS if name not in JOBS]
    write_page(folder / "flatout.md", "flatout", [section(f"flatout {name}", [name, "--help"]) for name in others])


def section(title: str, words: list[str]) -> str:
    from flatout.__main__ import main as flatout

    printed = io.StringIO()
    os.environ["COLUMNS"] = HELP_COLUMNS
    with redirect_stdout(printed), suppress(SystemExit):
        flatout(words)
    return f"## {title}\n\n```text\n{printed.getvalue().rstrip()}\n```"


def write_page(path: Path, title: str, sections: list[str]) -> None:
    path.write_text("\n\n".join([f"# {title}", *sections]) + "\n")


def write_python_reference() -> None:
    """One page per public package: every name it lists, its signature and its docstring."""
    folder = SOURCE / "reference" / "python"
    folder.mkdir(parents=True, exist_ok=True)
    for name, about in PACKAGES.items():
        package = import_module(name)
        entries = [entry(each, getattr(package, each)) for each in public_names(package)]
        write_page(folder / f"{name}.md", name, [f"{about}.", *(each for each in entries if each)])


def public_names(package: ModuleType) -> list[str]:
    from flatout.lazy import listed_names

    listed = getattr(package, "__all__", None) or listed_names(inspect.getsource(package))
    return sorted(each for each in listed if not each.startswith("_"))


def entry(name: str, value: Any) -> str:
    """A class, function or constant as Markdown; nothing for modules, which have pages of their own."""
    if isinstance(value, ModuleType):
        return ""
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return f"## {name}\n\n```python\n{name} = {shortened(repr(value))}\n```"
    fields = field_table(value) if inspect.isclass(value) else ""
    code = "" if fields else f"```python\n{signature(name, value)}\n```"
    parts = [f"## {name}", code, inspect.getdoc(value) or "", fields]
    if inspect.isclass(value):
        parts += [
            f"```python\n{signature(f'{name}.{each}', method)}\n```\n\n{inspect.getdoc(method)}"
            for each, method in vars(value).items()
            if inspect.isfunction(method) and not each.startswith("_") and method.__doc__
        ]
    return "\n\n".join(part for part in parts if part)


def signature(name: str, value: Any) -> str:
    """As it would be typed, one parameter per line where it is long."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):  # types, and classes whose constructor is not written in Python
        return name
    shown = [re.sub(r"\bflatout\.[\w.]*\.", "", str(each)) for each in found.parameters.values() if each.name != "self"]
    returns = "" if found.return_annotation is found.empty else f" -> {annotation(found.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returns}"
    return (
        line
        if len(line) <= MAX_COLUMNS
        else "\n".join([f"{name}(", *(f"    {each}," for each in shown), f"){returns}"])
    )


def annotation(hint: Any) -> str:
    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    return re.sub(r"\bflatout\.[\w.]*\.", "", text)


def field_table(value: type) -> str:
    """Fields of a dataclass or named tuple with the text below each; empty for other classes."""
    if not (is_dataclass(value) or hasattr(value, "_fields")):
        return ""
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    assert isinstance(body, ast.ClassDef)
    rows = []
    for node, below in pairwise([*body.body, ast.Pass()]):
        if isinstance(node, ast.AnnAssign):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            text = " ".join(str(below.value.value).split()) if is_text else ""  # type: ignore[attr-defined]
            default = shortened(ast.unparse(node.value), 40) if node.value else ""
            cells = (
                f"`{ast.unparse(node.target)}`",
                f"`{ast.unparse(node.annotation)}`",
                f"`{default}`" if default else "",
                text,
            )
            rows.append("| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |")
    return "\n".join(["| field | type | default | |", "|---|---|---|---|", *rows]) if rows else ""


def shortened(text: str, most: int = 200) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


if __name__ == "__main__":
    sys.exit(main())
