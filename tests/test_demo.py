"""`flatout demo`: detection in photographs within seconds, then a training on generated images, and its report."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatout.__main__ import main
from flatout.clock.clock import STAGES, canonical
from flatout.yolo.commands import demo
from flatout.yolo.demo_data import files
from flatout.yolo.find_file import find_file
from flatout.yolo.hyp import load_hyp
from tests.test_cli import loaded_after

ROOT = Path(__file__).parent.parent


def result_in(folder: Path, *, epochs: int = 2) -> SimpleNamespace:
    """A result as training returns it, and its log file."""
    rows = [{"epoch": epoch, "seconds": 2.0, "images_per_s": 30.0 + epoch} for epoch in range(epochs)]
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    scores = SimpleNamespace(map50=0.7124, map50_95=0.4, num_images=120)
    return SimpleNamespace(folder=folder, outcome=SimpleNamespace(evaluation=scores), finished=True)


def test_help_imports_nothing_heavy():
    statement = """
import contextlib
from flatout.__main__ import main
with contextlib.suppress(SystemExit):
    main(["demo", "--help"])
"""
    assert loaded_after(statement) == []


def test_the_files_it_needs_come_with_flatout(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # they are not in the folder where the demo is called
    assert load_hyp(find_file(demo.HYP, flag="--hyp")).warmup_iters
    assert find_file(demo.CFG, flag="--cfg").is_file()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_options_fit_the_machine(on_gpu):
    options = demo.training_options(Path("out"), Path("data.yaml"), "", on_gpu=on_gpu, seed=5)
    assert options.weights == "" and options.seed == 5
    assert options.fast == on_gpu


def test_the_report_says_how_good_how_fast_and_where_to_look(tmp_path):
    result = result_in(tmp_path)
    (tmp_path / "results.png").write_bytes(b"")
    report = demo.report(result, {"train.forward": 3.0, "train.backward": 6.0, demo.REST: 1.0})
    assert "mAP@.5 0.712" in report
    assert "after 4 s of training at 30 img/s" in report
    assert str(tmp_path / "results.png") in report
    assert "confusion_matrix" not in report  # a file that does not exist


def test_stages_are_listed_by_size_and_add_up():
    lines = demo.times({"train.forward": 3.0, "train.backward": 6.0, "odd": 0.9, demo.REST: 0.1, "tiny": 0.0})
    shares = [float(share) for share in re.findall(r"([\d.]+)%", "\n".join(lines))]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.2)
    assert "backward" in lines[1] and not any("tiny" in line for line in lines)


def test_every_stage_of_the_loop_has_a_name_for_people():
    """A stage that is added to the loop must be added there as well."""
    where = ("engine/*.py", "runs/*.py", "yolo/train/*.py", "yolo/loss/*.py", "feed/device*.py")
    sources = [path for pattern in where for path in (ROOT / "flatout").glob(pattern)]
    marks = {mark for source in sources for mark in re.findall(r'stage\("([\w.]+)"\)', source.read_text())}
    assert marks and {canonical(mark) for mark in marks} <= STAGES.keys()


def test_the_first_part_detects_objects_in_photographs_and_plots_them(tmp_path, one_thread):
    output = demo.detect_in_photographs(tmp_path / "photographs", "cpu")
    plotted = sorted(path.name for path in (tmp_path / "photographs").iterdir())
    assert plotted == sorted(path.name for path in (ROOT / "data/photographs").glob("*.jpg"))
    assert re.search(r"bus.jpg +1 bus\n", output) and re.search(r"cat.jpg .*\bcat", output)
    assert str(tmp_path / "photographs") in output


@pytest.mark.slow
def test_it_trains_reports_and_trains_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the demo would set it for the tests that follow
    monkeypatch.setattr(demo, "ON_CPU", demo.Pace(size_px=64, batch=4, epochs=1))
    small = files.DemoDataConfig(images=8, val=4)
    monkeypatch.setattr(files, "DemoDataConfig", lambda: small)
    for run in ("train", "train2"):
        assert main(["demo", "--out", str(tmp_path), "--device", "cpu"]) == 0
        output = capsys.readouterr().out
        assert "mAP@.5 " in output and "Where the time went" in output
        assert output.index("1 bus") < output.index("Training yolov7-tiny") and str(tmp_path / "photographs") in output
        assert (tmp_path / run / "weights/last.pt").exists()
        assert str(tmp_path / run / "test_batch0_pred.jpg") in output


@pytest.mark.parametrize("job", demo.OTHERS)
def test_the_demos_of_the_other_jobs_are_run_by_the_same_command(job, monkeypatch):
    calls = []
    monkeypatch.setattr(f"flatout.{job}.commands.demo.main", lambda argv: calls.append(argv) or 7)
    assert main(["demo", job, "--out", "there"]) == 7
    assert calls == [["--out", "there"]]
