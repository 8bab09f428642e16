"""Rules for the layout of the package: faces, file lists in docstrings, and the number of files."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from flatout.lazy import listed_names

ROOT = Path(__file__).parents[1]
FLATOUT = ROOT / "flatout"
SOURCES = {path.relative_to(ROOT).as_posix(): path.read_text() for path in FLATOUT.rglob("*.py")}
PACKAGES = sorted(path.parent for path in FLATOUT.rglob("__init__.py") if path.parent != FLATOUT)
TOP_LEVEL = sorted(path for path in PACKAGES if path.parent == FLATOUT)
WITH_FACE = [path for path in TOP_LEVEL if "face(__name__)" in (path / "__init__.py").read_text()]
MAX_MODULES, MAX_IN_A_FOLDER = 420, 20


def named(folder: Path) -> str:
    return ".".join(folder.relative_to(ROOT).parts)


@pytest.mark.parametrize("folder", PACKAGES, ids=named)
def test_the_docstring_of_a_package_lists_its_files(folder: Path):
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) or ""
    assert "\nFiles:\n\n" in docstring, "a tree is missing: 'Files:', then a line for each file"
    tree = docstring.partition("\nFiles:\n\n")[2].splitlines()
    listed = [line.split()[0] for line in tree if line.strip()]
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    folders = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    assert sorted(listed) == sorted(files | folders)
    assert not [line for line in tree if len(line.split()) < 2], "every line says what is in the file"


@pytest.mark.parametrize("folder", WITH_FACE, ids=named)
def test_a_face_lists_existing_names(folder: Path):
    source = (folder / "__init__.py").read_text()
    for name, home in listed_names(source).items():
        file = ROOT / (home.replace(".", "/") + ".py")
        text = file.read_text() if file.is_file() else (ROOT / home.replace(".", "/") / "__init__.py").read_text()
        assert name in names_of(text), f"{named(folder)} lists {name} of {home}, which does not define it"
        assert not (folder / f"{name}.py").exists() and not (folder / name).is_dir(), f"{name} is also a module"


def names_of(source: str) -> set[str]:
    """Names that a module defines or imports."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name for each in node.names}
    return found


def past_faces(sources: dict[str, str]) -> list[str]:
    """Imports of modules inside a package from outside of it."""
    packages = {folder.name for folder in TOP_LEVEL}
    found = []
    for path, source in sorted(sources.items()):
        own = Path(path).with_suffix("").parts[1]
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            for module in (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [each.name for each in node.names]
            ):
                names = module.split(".")
                if names[0] == "flatout" and len(names) > 2 and names[1] in packages - {own}:
                    found.append(f"{path}:{node.lineno}: {module}")
    return found


def test_no_module_imports_past_a_face():
    assert past_faces(SOURCES) == []


def test_an_import_past_a_face_is_found():
    inside = {"flatout/yolo/boxes.py": "from flatout.feed.plan import Plan\nfrom flatout.clock import clock\n"}
    assert past_faces(inside) == ["flatout/yolo/boxes.py:1: flatout.feed.plan"]


# Only the command line handles the flat options of a job; other modules get small configs, which one module makes.

SEES_OPTIONS = {
    "yolo": ("commands/", "detector.py", "evolve.py", "options.py", "profile.py", "run_config.py", "stages/",
             "train/recipe.py"),
    "defect": ("commands/", "inspector.py", "options.py", "profile.py", "train.py"),
    "spike": ("commands/", "deblurrer.py", "options.py", "profile.py", "train.py"),
}  # fmt: skip
SEES_FLAGS = ("flatout/yolo/commands/", "flatout/yolo/stages/plan.py")


def importers_of(name: str, sources: dict[str, str]) -> list[str]:
    """Files that import a class by its name, or a module by its dotted name."""
    found = []
    for path, source in sorted(sources.items()):
        nodes = list(ast.walk(ast.parse(source)))
        modules = [each.name for node in nodes if isinstance(node, ast.Import) for each in node.names]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                modules += [node.module or "", *(f"{node.module}.{each.name}" for each in node.names)]
        if any(module == name or module.endswith(f".{name}") for module in modules):
            found.append(path)
    return found


def disallowed(sources: dict[str, str]) -> list[str]:
    """Files other than those of the command line that import the flags or the options class."""
    allowed = tuple(f"flatout/{job}/{place}" for job, places in SEES_OPTIONS.items() for place in places)
    options = [path for path in importers_of("TrainOptions", sources) if not path.startswith(allowed)]
    flags = importers_of("flatout.yolo.commands.flags", sources)
    return options + [path for path in flags if not path.startswith(SEES_FLAGS)]


def test_only_the_command_line_and_one_resolver_of_a_job_import_its_options():
    assert disallowed(SOURCES) == []


@pytest.mark.parametrize(
    "line",
    [
        "from flatout.yolo.options import AUTO, TrainOptions",
        "from flatout.yolo.commands.flags import train_parser",
        "from flatout.yolo.commands import flags",
        "import flatout.yolo.commands.flags",
    ],
)
def test_another_file_that_imports_the_options_is_found(line: str):
    assert disallowed({"flatout/yolo/train/input.py": line}) == ["flatout/yolo/train/input.py"]
    assert disallowed({"flatout/yolo/commands/train.py": line}) == []


def test_the_number_of_files_is_limited():
    modules = [path for path in SOURCES if not path.endswith("__init__.py")]
    assert len(modules) <= MAX_MODULES
    in_folder = Counter(Path(path).parent.as_posix() for path in modules)
    assert not {folder: count for folder, count in in_folder.items() if count > MAX_IN_A_FOLDER}


def test_an_old_public_name_works_for_one_release_and_warns():
    from flatout.engine import IntervalStats, job

    with pytest.warns(DeprecationWarning, match=r"flatout\.engine\.job\.Tick is now called IntervalStats"):
        assert job.Tick is IntervalStats
    with pytest.raises(AttributeError, match="has no attribute 'Tock'"):
        _ = job.Tock
