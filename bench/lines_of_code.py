"""How many lines of mechanism does the package have, and how many did another checkout have?

Counted are lines with code: no blank lines, comments or docstrings. Declared flags (name, help, choices, default)
are data and are counted apart, and so are imports. Longer names and messages take more lines; statements, with those
that import, do not depend on that. `--code FOLDER` counts another checkout first. `--since COMMIT` lists by which
commits the mechanism grew and shrank, file by file: features add files and lines, simplifications take lines away, and
the total shows neither. Commits that lines_of_code_features.txt names are features that came later, and are summed
apart; a commit that it does not name counts as work on what was there, also if it adds a message or repairs something.
How many lines there would be without those features is between two numbers. All lines less the growth by features is
too low where later work shortened a feature, and too high where a feature replaced what was there; the lines that no
feature has written (git blame) leave out whatever a feature changed.
Answer: bench/results/lines_of_code_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure import arguments, report

THIS_CHECKOUT = Path(__file__).resolve().parents[1]
NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
DECLARES = {"option", "switch", "value"}
"""Functions of flatout.cli that declare a flag with its help."""


def count(source: str) -> Counter[str]:
    """Lines of a file by kind."""
    return Counter(kinds_of_lines(source).values())


def kinds_of_lines(source: str) -> dict[int, str]:
    """The kind of every line with code, by its number."""
    tree = ast.parse(source)
    kind_of_line = dict.fromkeys(lines_with_code(source), "mechanism")
    for node in ast.walk(tree):
        lines = range(getattr(node, "lineno", 0), (getattr(node, "end_lineno", 0) or 0) + 1)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            for line in lines:
                kind_of_line.pop(line, None)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            kind_of_line |= dict.fromkeys(lines, "imports")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DECLARES:
            kind_of_line |= dict.fromkeys(lines, "options")
    return kind_of_line


def count_statements(source: str) -> int:
    """Statements of a file, without docstrings and other lone constants."""
    statements = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt))
    return sum(not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)) for each in statements)


def lines_with_code(source: str) -> set[int]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {line for each in tokens if each.type not in NO_CODE for line in range(each.start[0], each.end[0] + 1)}


def count_package(package: Path) -> Counter[str]:
    texts = [path.read_text() for path in package.rglob("*.py")]
    return sum(map(count, texts), Counter(statements=sum(map(count_statements, texts))))


class Change(NamedTuple):
    """By how many lines of mechanism the files of a commit grew and shrank, and by how many of options they changed."""

    commit: str
    grew: int
    shrank: int
    options: int
    is_feature: bool = False

    def line(self) -> str:
        return f"{self.grew:+8,}{self.shrank:+8,}{self.options:+8,}  {self.commit}"


def changes_since(commit: str) -> list[Change]:
    """All commits since then that changed the mechanism, oldest first; merges excepted."""
    found = []
    for number in git("rev-list", "--no-merges", "--reverse", f"{commit}..HEAD").split():
        files = [(count_in(number, new), count_in(f"{number}^", old)) for old, new in changed_files(number)]
        deltas = [after["mechanism"] - before["mechanism"] for after, before in files]
        change = Change(
            git("log", "-1", "--format=%h %s", number).strip(),
            grew=sum(delta for delta in deltas if delta > 0),
            shrank=sum(delta for delta in deltas if delta < 0),
            options=sum(after["options"] - before["options"] for after, before in files),
            is_feature=number in later_features(),
        )
        if change.grew or change.shrank or change.options:
            found.append(change)
    return found


def changed_files(commit: str) -> list[tuple[str, str]]:
    """The names of the package's files that a commit changed, before and after it."""
    listed = git("diff-tree", "-r", "--no-commit-id", "--name-status", "-M", commit, "--", "flatout").splitlines()
    names = [line.split("\t")[1:] for line in listed]
    return [(each[0], each[-1]) for each in names if each[-1].endswith(".py")]


def not_written_by_features() -> int:
    """Lines of mechanism of the last commit that no feature has added or changed."""
    found = 0
    for name in git("ls-tree", "-r", "--name-only", "HEAD", "flatout").split():
        if not name.endswith(".py"):
            continue
        kinds = kinds_of_lines(git("show", f"HEAD:{name}"))
        blamed = re.findall(r"^([0-9a-f]{40}) \d+ (\d+)", git("blame", "-w", "-M", "--porcelain", "HEAD", name), re.M)
        found += sum(kinds.get(int(line)) == "mechanism" and commit not in later_features() for commit, line in blamed)
    return found


def sum_of(changes: Sequence[Change], name: str) -> Change:
    grew, shrank = sum(each.grew for each in changes), sum(each.shrank for each in changes)
    return Change(name, grew, shrank, sum(each.options for each in changes))


@cache
def later_features() -> set[str]:
    """Commits, by their full names, that added a feature."""
    lines = (Path(__file__).parent / "lines_of_code_features.txt").read_text().splitlines()
    return {git("rev-parse", line).strip() for line in lines if line and not line.startswith("#")}


def count_in(commit: str, name: str) -> Counter[str]:
    """Lines of a file in a commit by kind; none if it has no such file."""
    shown = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=THIS_CHECKOUT, capture_output=True, text=True)
    return count(shown.stdout) if shown.returncode == 0 else Counter()


def without_features(less_growth: int, options: int, untouched: int) -> str:
    return (
        f"without the features that came later: {less_growth:,} lines of mechanism, all lines less their growth "
        f"({less_growth + options:,} if declared flags counted as mechanism); they have not written {untouched:,} lines"
    )


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=THIS_CHECKOUT, check=True, capture_output=True, text=True).stdout


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--code", type=Path, action="append", default=[], metavar="FOLDER", help="another checkout")
    parser.add_argument("--since", metavar="COMMIT", help="list the commits since then")
    options = parser.parse_args()
    lines = [
        f"{'checkout':16}{'mechanism':>11}{'imports':>9}{'options':>9}{'mechanism + imports':>21}{'statements':>12}"
    ]
    numbers: dict[str, Any] = {}
    for code in [*options.code, THIS_CHECKOUT]:
        found = count_package(code / "flatout")
        together = found["mechanism"] + found["imports"]
        lines.append(
            f"{code.name:16}{found['mechanism']:11,}{found['imports']:9,}{found['options']:9,}{together:21,}"
            f"{found['statements']:12,}"
        )
        numbers[code.name] = dict(found)
    if options.since:
        changes = changes_since(options.since)
        features = [each for each in changes if each.is_feature]
        work = [each for each in changes if not each.is_feature]
        sums = [sum_of(features, "features that came later"), sum_of(work, "work on what was there")]
        for title, part in (("features", features), ("work on what was there", work), ("together", sums)):
            lines += ["", f"since {options.since}, {title}: lines by which files grew and shrank, and options by"]
            lines += [each.line() for each in part]
        without = found["mechanism"] - sums[0].grew - sums[0].shrank
        untouched = not_written_by_features()
        lines += ["", without_features(without, found["options"] - sums[0].options, untouched)]
        numbers["since"] = {each.commit: [each.grew + each.shrank, each.options] for each in [*changes, *sums]}
    report("lines_of_code", "\n".join(lines), numbers, options)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
