"""Do the manifests of `flatout launch` pass the checks of the engines' own packages, and do they train?

Runs tests/test_launch_manifests.py with the packages of this environment, and reports every check with its outcome and
the versions. What is not installed is reported as skipped. For all checks: pip install kubeflow-trainer-api
kubernetes-validate modal skypilot "ray[train]", and a Slurm controller.
Answer: bench/results/launch_checks_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from xml.etree import ElementTree

from bench.measure import arguments, report

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("kubeflow_trainer_api", "kubernetes-validate", "skypilot", "ray", "modal")


def versions() -> dict[str, str]:
    """What the manifests are checked with."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    for name, command in {"Slurm": ["sbatch", "--version"], "bash": ["bash", "--version"]}.items():
        try:
            found[name] = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[0]
        except (OSError, IndexError):
            found[name] = "not installed"
    return found


def outcomes(quick: bool) -> dict[str, Counter[str]]:
    """Test -> how often it passed, failed or was skipped; tests with several parameters are counted together."""
    found: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.xml"
        words = ["-q", "-p", "no:cacheprovider", f"--junitxml={path}", *(["-m", "not slow"] if quick else [])]
        command = [sys.executable, "-m", "pytest", *words, "tests/test_launch_manifests.py"]
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        for case in ElementTree.parse(path).iter("testcase"):
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = {"failure": "FAILED", "error": "FAILED", "skipped": "skipped"}[kinds.pop()] if kinds else "passed"
            name = case.attrib["name"].partition("[")[0].removeprefix("test_").replace("_", " ")
            found.setdefault(name, Counter())[outcome] += 1
    return found


def main() -> int:
    options = arguments(__doc__).parse_args()
    about, found = versions(), outcomes(options.quick)
    lines = [f"{name:<22}{text}" for name, text in about.items()]
    lines += [
        "",
        *(f"{', '.join(f'{n} {what}' for what, n in counts.items()):<12}{name}" for name, counts in found.items()),
    ]
    numbers = {"versions": about, "outcomes": {name: dict(counts) for name, counts in found.items()}}
    report("launch_checks", "\n".join(lines), numbers, options)
    return int(any(counts["FAILED"] for counts in found.values()))


if __name__ == "__main__":
    sys.exit(main())
