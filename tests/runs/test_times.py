"""Where the wall time of a run went: spans, times.jsonl, the ledger that adds up, and what a start does not import."""

import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flatout.__main__ import main
from flatout.clock import spans
from flatout.clock.spans import Part, Spans, process_age_s, recording, span
from flatout.errors import ConfigError
from flatout.runs.times import FILE_NAME, LABELS, REST, fixed_costs, ledger_lines, read_times
from tests.old_runs.situations import SITUATIONS
from tests.runs.toy_runs import Toys

ROOT = Path(__file__).parents[2]


class Clock:
    """A clock that is moved by hand."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.parametrize("seed", range(5))
def test_parts_add_up_to_the_wall_time_however_spans_are_nested(seed: int) -> None:
    rng, clock = random.Random(seed), Clock()
    recorded = Spans(clock=clock)
    outside_s = 0.0

    def go(depth: int) -> None:
        nonlocal outside_s
        for _ in range(3):
            seconds = rng.random()
            clock.now_s += seconds
            outside_s += seconds if depth == 0 else 0.0
            if depth < 3:
                with recorded.span(rng.choice("abc")):
                    go(depth + 1)

    go(0)
    parts = recorded.parts()
    assert sum(part.seconds for part in parts) + outside_s == pytest.approx(recorded.wall_s)
    assert sum(part.times for part in parts) == 3 + 9 + 27
    assert min(part.seconds for part in parts) > 0


def test_a_span_counts_without_those_inside_it_and_also_if_it_fails() -> None:
    clock = Clock()
    recorded = Spans(clock=clock)

    def fail() -> None:
        with recorded.span("outer"):
            clock.now_s += 1
            with recorded.span("inner"):
                clock.now_s += 10
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    clock.now_s += 100
    recorded.name_the_last("end")
    recorded.count("inner", 7)
    assert recorded.parts() == [Part("inner", 10, 7), Part("outer", 1, 1), Part("end", 100, 1)]
    assert recorded.wall_s == 111


def test_a_run_begins_with_its_command_and_the_next_run_by_itself() -> None:
    command = spans.begin_command()
    with span("scan"):
        pass
    command.name_all_so_far("imports")
    with recording() as first:
        assert first is command
        with span("network"):
            pass
    with recording() as second, span("network"):
        assert second is not command
    assert [part.name for part in first.parts()] == ["scan", "imports", "network"]
    assert [part.name for part in second.parts()] == ["network"]
    with span("nothing is recorded"):
        assert len(second.parts()) == 1


def test_other_threads_record_nothing() -> None:
    def work() -> None:
        with span("elsewhere"):
            pass

    with recording() as recorded:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert recorded.parts() == []


def test_the_age_of_a_process_is_known() -> None:
    code = "from flatout.clock.spans import process_age_s; import time; time.sleep(0.3); print(process_age_s())"
    age_s = float(subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True).stdout)
    assert 0.28 < age_s < 60
    assert process_age_s() > 0


class TestRuns:
    def test_every_process_of_a_run_adds_its_times_and_they_add_up(self, toys: Toys, tmp_path: Path) -> None:
        assert toys.run(tmp_path, env={"FLATOUT_STOP_AFTER": "15"}).code == 0
        stopped = read_times(tmp_path / "toy")
        assert toys.run(tmp_path).code == 0
        finished = read_times(tmp_path / "toy")
        assert (stopped.processes, stopped.steps, finished.processes) == (1, 16, 2)  # windows of two steps
        assert finished.steps == 40
        for times in (stopped, finished):
            names = {part.name: part for part in times.parts}
            assert {"network", "input", "load", "first step", "steps", "validation", "save"} <= names.keys()
            assert sum(part.seconds for part in times.parts) + times.rest_s == pytest.approx(times.wall_s)
            assert 0 <= times.rest_s < 0.5 * times.wall_s
            assert names["first step"].times == times.processes
        assert {part.name: part.times for part in finished.parts}["validation"] == 4

    def test_a_new_training_in_the_same_folder_starts_a_new_file(self, toys: Toys, tmp_path: Path) -> None:
        for _ in range(2):
            assert toys.run(tmp_path, "--exist-ok", "--fresh", env={"FLATOUT_STOP_AFTER": "2"}).code == 0
        assert len((tmp_path / "toy" / FILE_NAME).read_text().splitlines()) == 1

    def test_a_training_that_fails_before_its_first_step_leaves_nothing(self, toys: Toys, tmp_path: Path) -> None:
        assert toys.run(tmp_path, "--labels", tmp_path / "missing").code != 0
        assert not (tmp_path / "toy").exists()

    def test_the_command_shows_the_ledger(
        self, undisturbed: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        assert main(["profile", "--run", str(undisturbed)]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown == ledger_lines(read_times(undisturbed))
        assert "40 steps" in shown[0] and shown[-1].strip().startswith(REST)
        assert any(LABELS["validation"] in line for line in shown)
        assert main(["profile", "--run", str(tmp_path)]) == ConfigError.exit_code
        assert f"{tmp_path}/{FILE_NAME} cannot be read" in capsys.readouterr().err

    def test_a_full_disk_or_a_broken_file_is_no_internal_error(self, tmp_path: Path) -> None:
        for text in ("", "{}", "[]\n", '{"wall_s": 1, "parts": 3}', "\0"):
            (tmp_path / FILE_NAME).write_text(text)
            with pytest.raises(ConfigError):
                read_times(tmp_path)


def test_the_table_adds_up_and_fixed_costs_are_all_but_the_steps(tmp_path: Path) -> None:
    parts = {"steps": [60.0, 1200], "imports": [2.5, 1], "validation": [30.0, 100], "something new": [1.0, 1]}
    line = {"wall_s": 94.0, "parts": {name: {"seconds": s, "times": n} for name, (s, n) in parts.items()}}
    (tmp_path / FILE_NAME).write_text(json.dumps(line) + "\n")
    times = read_times(tmp_path)
    rows = [text.split() for text in ledger_lines(times)[2:]]
    seconds = [float(next(word for word in row if "." in word and word[0].isdigit())) for row in rows]
    assert sum(seconds) == pytest.approx(94.0)
    assert [part.name for part in times.parts] == ["imports", "steps", "validation", "something new"]
    assert fixed_costs(times) == {
        LABELS["imports"]: 2.5, LABELS["validation"]: 30.0, "something new": 1.0, REST: 0.5
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("job", SITUATIONS)
def test_a_training_does_not_wait_for_torchs_compiler_and_counts_from_the_start_of_its_process(
    job: str, tmp_path: Path
) -> None:
    """torch.optim, torch.use_deterministic_algorithms, torch.compiler.disable and the meta device all import it."""
    situation = SITUATIONS[job]
    situation.prepare(tmp_path)
    # A while before anything of flatout is imported.
    program = "import sys, time; time.sleep(1); from flatout.__main__ import main; code = main(sys.argv[1:]); "
    program += "print('compiler' if 'torch._dynamo' in sys.modules else 'no compiler'); sys.exit(code)"
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, "-c", program, *situation.command], cwd=tmp_path, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "no compiler"
    times = read_times(tmp_path / situation.run)
    assert {part.name: part.seconds for part in times.parts}["imports"] > 1
    assert times.rest_s < 0.2 * times.wall_s
