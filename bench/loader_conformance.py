"""Does the Loader behave as torch's DataLoader does in PyTorch's own tests?

    python -m bench.loader_conformance PATH/test_dataloader.py

The file is test/stateful_dataloader/test_dataloader.py of github.com/meta-pytorch/data, a port of PyTorch's tests. It
is not part of this repository. All of it is run on both classes, with only its import changed. Needs pytest,
pytest-timeout, psutil and expecttest. Takes about 15 minutes on two cores.

Answer: bench/results/loader_conformance_<machine>_<yyyymm>.md (rewrite it with --write).
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.measure import arguments, report

IMPORT = "from torchdata.stateful_dataloader import StatefulDataLoader as DataLoader"
TORCH, OURS = "DataLoader", "Loader"
IMPORTS = {TORCH: "from torch.utils.data import DataLoader", OURS: "from flatout import Loader as DataLoader"}
TIMEOUT_S = 180

ITERABLE = "iterable datasets are refused"
PRIVATE = "reads the iterator's private `_workers`"
ANY_WORKER = "without a worker_init_fn any worker may read any sample"
IN_ORDER = "batches come in order also with in_order=False"
KNOWN = {
    **dict.fromkeys(
        (
            "test_builtin_collection_conversion",
            "test_chain_iterable_style_dataset",
            "test_early_exit",
            "test_error_in_init",
            "test_fd_limit_exceeded",
            "test_in_order_iterable_ds",
            "test_invalid_ctor_args_combinations",
            "test_iterable_style_dataset",
            "test_iterabledataset_len",
            "test_multi_epochs_reproducibility",
            "test_multiprocessing_iterdatapipe",
            "test_out_of_order_iterable_ds",
            "test_set_affinity_in_worker_init",
            "test_shuffler_iterdatapipe",
        ),
        ITERABLE,
    ),
    "test_get_worker_info": PRIVATE,
    "test_partial_workers": PRIVATE,
    "test_in_order_index_ds": ANY_WORKER,
    "test_worker_seed": ANY_WORKER,
    "test_worker_seed_reproducibility": ANY_WORKER,
    "test_out_of_order_index_ds": IN_ORDER,
}
"""Tests that fail on the Loader, and why that is intended; docs/loader.md has the same list."""

Outcomes = Mapping[str, str]
"""'class::test' -> 'passed', 'failed' or 'skipped'."""


def run_tests(tests: str, side: str) -> Outcomes:
    """Outcome of each test if DataLoader is the class of that side."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "test_dataloader.py").write_text(tests.replace(IMPORT, IMPORTS[side]))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
        command += [
            f"--timeout={TIMEOUT_S}",
            "--timeout-method=signal",
            "--junitxml=outcomes.xml",
            "test_dataloader.py",
        ]
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        subprocess.run(
            command, cwd=folder, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.DEVNULL, check=False
        )
        return outcomes(ElementTree.parse(folder / "outcomes.xml"))


def outcomes(document: "ElementTree.ElementTree[ElementTree.Element]") -> Outcomes:
    """Outcomes from pytest's report; if a test has several entries, the worst counts."""
    found: dict[str, str] = {}
    for case in document.iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        kinds = {child.tag for child in case}
        outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[name] = "failed" if "failed" in (outcome, found.get(name)) else outcome
    return found


def differences(torch: Outcomes, ours: Outcomes) -> dict[str, str]:
    """Tests that pass on the DataLoader but not on the Loader, with the reason; "" if it is unknown."""
    return {
        name: KNOWN.get(name.partition("::")[2], "")
        for name, outcome in torch.items()
        if outcome == "passed" and ours.get(name) != "passed"
    }


def answer(torch: Outcomes, ours: Outcomes) -> Iterator[str]:
    """The counts, and a line for every reason and every test without a known reason."""
    for side, found in {TORCH: torch, OURS: ours}.items():
        counts = Counter(found.values())
        yield f"{side:12}" + "  ".join(f"{counts[kind]:4} {kind}" for kind in ("passed", "failed", "skipped"))
    differing = differences(torch, ours)
    failed_on_both = sorted(name for name, outcome in torch.items() if outcome == "failed")
    yield ""
    for reason in (ITERABLE, ANY_WORKER, PRIVATE, IN_ORDER):
        names = sorted(name for name, why in differing.items() if why == reason)
        yield f"{len(names):4}  {reason}"
        yield from (f"        {name}" for name in names)
    yield f"{len(failed_on_both):4}  not compared: the DataLoader fails here too"
    yield from (f"        {name}" for name in failed_on_both)
    unexplained = sorted(name for name, why in differing.items() if not why)
    yield f"{'FAIL' if unexplained else 'PASS'}  everything else is as in torch ({len(unexplained)} differ)"
    yield from (f"        {name}" for name in unexplained)


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("tests", type=Path, help="the file with the tests")
    options = parser.parse_args()
    tests = options.tests.read_text()
    if IMPORT not in tests:
        parser.error(f"{options.tests} has no line '{IMPORT}': it is not the expected file.")
    torch, ours = run_tests(tests, TORCH), run_tests(tests, OURS)
    lines = [f"test_dataloader.py, sha256 {hashlib.sha256(tests.encode()).hexdigest()[:16]}", *answer(torch, ours)]
    report("loader_conformance", "\n".join(lines), {"outcomes": {TORCH: torch, OURS: ours}}, options)
    return int(not all(differences(torch, ours).values()))


if __name__ == "__main__":
    sys.exit(main())
