"""`flatout profile defect` and `flatout profile spike` work as `flatout profile yolo` does."""

import json

import pytest

from flatout.__main__ import main
from flatout.cli import JOBS
from flatout.defect.commands.train import COMMAND as DEFECT
from flatout.defect.demo_data import DemoDataConfig
from flatout.defect.demo_data import write_demo_data as write_strips
from flatout.defect.profile import DefectTraining
from flatout.errors import Interrupted
from flatout.profiler.verdict import Remedy
from flatout.runs.command import TrainCommand
from flatout.runs.options import RunOptions
from flatout.spike.commands.train import COMMAND as SPIKE
from flatout.spike.demo_data import DemoConfig
from flatout.spike.demo_data import write_demo_data as write_clips
from flatout.spike.profile import SpikeTraining

WORKER_STAGES = {"defect": {"crop", "paint"}, "spike": {"read"}}


def defect_flags(folder):
    data = write_strips(folder / "strips", DemoDataConfig(images=3, valid=1, test=1, shape_hw=(64, 64)))
    flags = {"training_dataset_path": str(data), "patch_size": 32, "base_width": 8, "bs": 4, "gpu_id": -1}
    return [text for name, value in flags.items() for text in (f"--{name}", str(value))] + ["--num_workers", "1"]


def spike_flags(folder):
    config = DemoConfig(train=1, test=1, frames=6, width=32, height=32, spike_frames=48)
    return ["--config", str(write_clips(folder / "clips", config)), "--device", "cpu"]


FLAGS = {"defect": defect_flags, "spike": spike_flags}


@pytest.mark.slow
@pytest.mark.parametrize("job", FLAGS)
def test_a_training_is_profiled_and_nothing_else_is_left(job, tmp_path, monkeypatch, capsys, one_thread):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    assert main(["profile", job, "--steps", "4", *FLAGS[job](tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "Verdict:" in output and "unexplained" in output and "limits: compute" in output
    assert "hardware limits of this machine" in output and "Mpx/s" in output
    assert sorted(path.name for path in work.iterdir()) == ["profile"]
    content = json.loads((work / "profile" / "profile.json").read_text())
    limits = content["measurement"]["limits"]
    assert min(limits["compute_ms"], limits["transfer_ms"], limits["input_ms"]) > 0
    stages = {stage for lane in content["measurement"]["lanes"] for stage in lane["stage_ms"]}
    assert {"feed.wait", "forward", "loss", "backward", "optimizer"} <= stages
    assert "Hardware limits of this machine" in (work / "profile" / "profile.html").read_text()
    lanes = [entry["args"]["name"] for entry in trace_of(work) if entry["ph"] == "M"]
    assert "worker 0" in lanes


def trace_of(work):
    return json.loads((work / "profile" / "trace.json").read_text())["traceEvents"]


def remedy(**switch):
    return Remedy(what="x", change="", step_ms=1.0, uncertainty=0.1, now_ms=2.0, images=1.0, switch=switch)


def test_remedies_name_the_flags_of_the_defect_job(tmp_path):
    training = DefectTraining.from_flags(DEFECT, ["--training_dataset_path", "R"], num_steps=3)
    reworded = training.with_own_flags(remedy(workers=2))
    assert reworded.change == "--num_workers 2"
    assert training.with_switch(reworded.switch).options.num_workers == 2
    assert training.with_own_flags(remedy(cache_images=True)).switch == {}, "images are kept already"
    uncached = DefectTraining.from_flags(DEFECT, ["--training_dataset_path", "R", "--cache_size", "0"], num_steps=3)
    kept = uncached.with_own_flags(remedy(cache_images=True))
    assert uncached.with_switch(kept.switch).options.cache_size is None


def test_remedies_name_the_keys_of_the_spike_job(tmp_path):
    flags = spike_flags(tmp_path)
    training = SpikeTraining.from_flags(SPIKE, [*flags, "--set", "DATA.USE_RAM_CACHE=false"], num_steps=3)
    reworded = training.with_own_flags(remedy(cache_images=True))
    assert reworded.change == "--set DATA.USE_RAM_CACHE=true"
    assert training.with_switch(reworded.switch).config.DATA.USE_RAM_CACHE
    workers = training.with_own_flags(remedy(workers=3))
    assert training.with_switch(workers.switch).config.loader.TRAIN_WORKERS == 3
    assert training.with_own_flags(remedy(whatever=1)).switch == {}


class Ended:
    """A training that is interrupted while it is observed."""

    @classmethod
    def from_flags(cls, command, flags, *, num_steps):
        return cls()

    def observe(self):
        raise Interrupted("SIGTERM: saved at epoch 0, step 4. Run the same command again to continue.")


COMMAND = TrainCommand("ended", RunOptions, "nowhere:Nothing", profile=f"{__name__}:Ended")


def test_an_interrupted_profile_does_not_say_that_something_was_saved(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(JOBS, "ended", __name__)
    assert main(["profile", "ended", "--out", str(tmp_path / "out")]) == Interrupted.exit_code
    output = capsys.readouterr().err
    assert "interrupted before the profile was complete" in output and "saved at" not in output
