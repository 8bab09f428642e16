"""The verdict names the cause that a good engineer would name, predicts measured gains, and knows when to stop."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from flatout.defect.commands.flags import VERDICT_FLAGS as DEFECT_FLAGS
from flatout.profiler.measurement import HotLine, Lane, Limits, NetworkRun, WaitSite, make_ledger
from flatout.profiler.report.text import report_text
from flatout.profiler.verdict import Trial, diagnose, remedy_of
from flatout.profiler.verdict.predict_step import StepNumbers
from flatout.profiler.verdict.remedy import with_job_flags
from flatout.profiler.verdict.rules_host import CUDA_GRAPH
from flatout.spike.commands.arguments import VERDICT_FLAGS as SPIKE_FLAGS
from tests.profiler.situations import (
    ALL_OF_FAST,
    H200_BATCH_32,
    LOOP,
    RTX_5090_WITH_WAITS,
    SITUATIONS,
    input_bound,
    measured,
    network,
    on_gpu,
)


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_cause_is_named(name):
    situation = SITUATIONS[name]
    verdict = diagnose(situation.measurement, situation.trials, situation.end_to_end)
    assert verdict.cause == situation.cause, (verdict.sentence, verdict.evidence)
    assert verdict.sentence
    if situation.change:
        assert situation.change in verdict.remedies[0].change


@pytest.mark.parametrize("name", [name for name, situation in SITUATIONS.items() if situation.gain])
def test_the_gain_is_predicted_within_fifteen_per_cent(name):
    situation = SITUATIONS[name]
    best = diagnose(situation.measurement, situation.trials, situation.end_to_end).best
    assert best is not None
    assert best.gain == pytest.approx(situation.gain, rel=0.15)


def test_a_slow_getitem_promises_what_the_table_knows():
    """Two workers, 2,360 ms of one core per batch, 2,000 of them in one line (by samples, of the whole batch)."""
    verdict = diagnose(SITUATIONS["a slow __getitem__ that no number of workers makes up for"].measurement)
    assert "Make __getitem__() at data.py:31 2x faster: 1,203 -> " in verdict.sentence
    half, none = (next(r for r in verdict.remedies if r.what.startswith(word)) for word in ("make", "without"))
    assert f"-> {half.step_ms:.0f} ms per step." in verdict.sentence
    # Half of the batch's 2,360 ms and the 84 ms of the main thread, on two cores.
    assert half.step_ms == pytest.approx((2360 / 2 + 84) / 2, rel=0.01)
    # Without the line nothing but the rest of the step is left.
    assert none.step_ms == pytest.approx(1203 - 1120, rel=0.05)
    assert verdict.of_cause == none


@pytest.mark.parametrize(("samples", "cause"), [(20, "too few workers"), (400, "slow input code")])
def test_few_samples_blame_no_function(samples, cause):
    """Half of twenty samples in one function may be chance; half of four hundred are not."""
    lines = [HotLine(where=f"data.py:{number}", ms=5, function=name, in_worker=True, samples=samples // 2)
             for number, name in ((8, "blur"), (20, "warp"))]  # fmt: skip
    late = measured(10, {"feed.wait": 8, "forward": 1, "backward": 1}, num_workers=1, workers={"fetch": 10}, cores=2,
                    main_cpu=0.2, worker_cpu_ms=10.0, lines=lines)  # fmt: skip
    assert diagnose(late).cause == cause


def test_time_that_workers_sleep_is_not_called_time_of_a_core():
    asleep = measured(150, {**network(0.2), "feed.wait": 130}, num_workers=2, workers={"fetch": 295}, cores=2,
                      main_cpu=0.13, worker_cpu_ms=30.0, worker_blocked_ms=260.0)  # fmt: skip
    evidence = " ".join(diagnose(asleep).evidence)
    assert "of one core" not in evidence
    assert "88 % of the time in which batches are made is waiting (for files, a network or a sleep)" in evidence
    awake = replace(asleep, worker_cpu_ms=290.0, worker_blocked_ms=0.0)
    assert "of one core" in " ".join(diagnose(awake).evidence)


def test_workers_that_take_every_core_hold_the_main_thread_up():
    """The main thread queues for a core during 8 of the 20 ms beside the wait, until the workers have little to do."""
    decode = HotLine(where="data.py:8", ms=108, text="image = cv2.imread(path)", function="__getitem__", in_worker=True)
    crowded = measured(60, {"feed.wait": 40, "forward": 8, "backward": 12}, num_workers=2, workers={"fetch": 108},
                       cores=2, main_cpu=0.2, worker_cpu_ms=108.0, lines=(decode,))  # fmt: skip
    cached = [next(remedy for remedy in diagnose(each).remedies if remedy.what == "cache decoded images")
              for each in (crowded, replace(crowded, main_queued_ms=8.0))]  # fmt: skip
    assert cached[0].step_ms == pytest.approx(20, rel=0.05)
    assert cached[1].step_ms == pytest.approx(12.5, rel=0.05)


def test_what_a_loader_does_once_per_batch_does_not_grow_with_the_batch():
    small = SITUATIONS["batches of 4"].measurement
    host = dict(small.lanes[0].stage_ms)
    lanes = [replace(small.lanes[0], stage_ms=host | {"feed.wait": 0.5})]
    verdict = diagnose(replace(small, lanes=lanes, wall_ms=[ms + 0.5 for ms in small.wall_ms]))
    assert verdict.of_cause.step_ms == pytest.approx(diagnose(small).of_cause.step_ms + 0.5, rel=0.02)


def test_one_thread_is_never_too_many_whatever_runs_of_the_network_show():
    rng = np.random.default_rng(5)
    for _ in range(300):
        runs = [
            NetworkRun(ms=float(rng.uniform(1, 200)), images=8, threads=threads)
            for threads in (1, *rng.choice([1, 2, 4, 16], rng.integers(4)))
        ]
        step_ms = float(rng.uniform(50, 300))
        m = measured(step_ms, network(step_ms / 100), images=8, cores=int(rng.integers(1, 5)), num_threads=1,
                     others_cores=float(rng.uniform(0, 4)), network_runs=runs if rng.integers(2) else [])  # fmt: skip
        verdict = diagnose(m)
        named = [verdict.cause, *(each.cause for each in verdict.others)]
        assert "too many threads" not in named
        assert "threads: with OMP_NUM_THREADS" not in " ".join(verdict.evidence)


def test_batches_are_small_only_if_nothing_else_would_gain_as_much():
    """A larger batch would hide the logging, but it is the logging that is slow."""
    logging = HotLine(where="train.py:50", ms=9, text="writer.add_scalar(n, v)", function="main", runs=1)
    quiet = SITUATIONS["batches of 4"].measurement
    wall_ms = [ms + 9 for ms in quiet.wall_ms]
    verdict = diagnose(replace(quiet, wall_ms=wall_ms, lines=(logging,), main_cpu_ms=19.0))
    assert verdict.cause == "logging"
    # All of the 9.7 ms outside of stages are at that line.
    assert verdict.of_cause.gain == pytest.approx(19 / 9.3, rel=0.02)


def test_there_are_enough_situations():
    assert len(SITUATIONS) >= 25


def test_the_first_case_names_its_waits_their_line_and_what_is_idle():
    verdict = diagnose(RTX_5090_WITH_WAITS)
    evidence = " ".join(verdict.evidence)
    assert "loss.py:100" in evidence
    assert "126 % of a core" in evidence
    assert "workers are busy 3.6 %" in evidence
    assert "GPU is busy 34 %" in evidence
    assert "not for data" in verdict.sentence


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_remedy_gains_less_than_the_minimum_or_more_than_the_device_can_do(name):
    measurement, cause, _, trials, _, end_to_end = SITUATIONS[name]
    remedies = diagnose(measurement, trials, end_to_end).remedies
    assert all(remedy.gain >= 1.03 for remedy in remedies)
    speeds = [remedy.images_per_s for remedy in remedies]
    assert speeds == sorted(speeds, reverse=True)
    assert len({remedy.what for remedy in remedies}) == len(remedies)
    # A better loss removes kernels from the device; nothing else here does.
    if measurement.device_busy_ms and not trials and not end_to_end and cause != "assigner":
        assert all(remedy.step_ms >= 0.99 * measurement.device_busy_ms for remedy in remedies)
    for remedy in remedies:
        assert remedy.change in remedy.line() and "img/s" in remedy.line()


def test_a_verdict_does_not_depend_on_the_unit_of_time():
    """A machine that is half as fast has the same bottleneck."""
    for situation in SITUATIONS.values():
        m = situation.measurement
        lanes = [replace(lane, stage_ms={k: 2 * v for k, v in lane.stage_ms.items()}) for lane in m.lanes]
        slow = replace(
            m,
            wall_ms=[2 * ms for ms in m.wall_ms],
            lanes=lanes,
            main_cpu_ms=2 * m.main_cpu_ms,
            worker_cpu_ms=None if m.worker_cpu_ms is None else 2 * m.worker_cpu_ms,
            worker_blocked_ms=None if m.worker_blocked_ms is None else 2 * m.worker_blocked_ms,
            device_busy_ms=None if m.device_busy_ms is None else 2 * m.device_busy_ms,
            launch_us=None if m.launch_us is None else 2 * m.launch_us,
            lines=[replace(line, ms=2 * line.ms) for line in m.lines],
        )
        trials = [replace(trial, then_ms=2 * trial.then_ms) for trial in situation.trials]
        end_to_end = [
            replace(
                trial,
                compute_ms=2 * trial.compute_ms,
                input_ms=2 * trial.input_ms,
                device_ms=2 * trial.device_ms,
                input_device_ms=2 * trial.input_device_ms,
            )
            for trial in situation.end_to_end
        ]
        assert diagnose(slow, trials, end_to_end).cause == situation.cause


def test_workers_are_never_recommended_past_the_cores():
    for cores in (2, 3, 5, 8, 64):
        verdict = diagnose(input_bound(400, 1, {"warp": 390}, cores=cores))
        best = next(remedy for remedy in verdict.remedies if remedy.what.startswith("workers"))
        assert int(best.what.split()[-1]) <= cores


def test_more_workers_do_not_help_when_every_core_is_busy():
    """Two cores, both busy with training and one worker: a second worker gains nothing."""
    busy = measured(
        100,
        {"feed.wait": 20, "forward": 35, "backward": 40},
        num_workers=1,
        workers={"augment": 98},
        cores=2,
        main_cpu=1.0,
    )
    more = [remedy for remedy in diagnose(busy).remedies if remedy.what.startswith("workers")]
    assert more == [] or more[0].gain < 1.05


def test_a_trial_in_the_workers_counts_only_as_far_as_the_step_waits():
    healthy = measured(100, network(), num_workers=4, workers={"decode": 300})
    faster = Trial(what="faster decode", change="x", stage="decode", then_ms=10, in_workers=True)
    assert diagnose(healthy, [faster]).cause == "nothing"
    starved = input_bound(400, 4, {"decode": 1590}, cores=4)
    best = diagnose(starved, [faster]).best
    assert best is not None and best.gain == pytest.approx(4, rel=0.1)


def test_a_larger_batch_gains_where_time_grows_less_than_the_batch():
    """Twice the images in 1.6 times the network's time; the optimizer's time stays."""
    m = measured(100, {"forward": 30, "loss": 10, "backward": 50, "optimizer": 8}, images=8)
    trial = Trial(what="batch 16", change="--batch 16", stage="forward+loss+backward", then_ms=144, images=16)
    best = diagnose(m, [trial]).best
    assert best is not None
    assert best.step_ms == pytest.approx(154, rel=0.01)
    assert best.gain == pytest.approx(2 * 100 / 154, rel=0.01)


@pytest.mark.parametrize(("kernels", "step_ms"), [(0.7, 70), (0.9, 87.3), (None, 70)])
def test_a_trial_on_a_gpu_gains_no_more_than_its_kernels_save(kernels, step_ms):
    """The main thread is ahead of the device all the time; kernels are 97 of 100 ms, and the tried step takes 70 %."""
    m = on_gpu(100, {"forward": 10, "loss": 1, "backward": 15, "optimizer": 2, "ahead": 72}, 97)
    stages = "forward+loss+backward+optimizer+ahead"
    trial = Trial(what="x", change="x", stage=stages, then_ms=0.7, is_share=True, device_share=kernels)
    assert remedy_of(m, trial).step_ms == pytest.approx(step_ms, rel=0.01)


def test_a_larger_batch_on_a_gpu_has_larger_kernels():
    """Launching takes as long as before; the kernels of three times the images are more than that."""
    m = on_gpu(40, {"forward": 15, "loss": 2, "backward": 20, "optimizer": 3}, 14, images=128)
    stage = "forward+loss+backward+optimizer"
    trial = Trial(what="x", change="x", stage=stage, then_ms=1.05, is_share=True, device_share=3.2, images=384)
    assert remedy_of(m, trial).step_ms == pytest.approx(44.8, rel=0.01)


def test_a_trial_has_a_prediction_even_if_it_gains_nothing():
    slower = Trial(what="x", change="x", stage="forward+backward", then_ms=1.2, is_share=True)
    remedy = remedy_of(measured(100, network()), slower)
    assert remedy.gain == pytest.approx(1 / 1.18, rel=0.01)


def test_a_flag_that_changes_network_and_input_is_predicted_from_both():
    """Not as a graph around today's kernels, which predicts 1,503 img/s where 3,469 were measured."""
    launching = replace(H200_BATCH_32, num_workers=8)
    verdict = diagnose(launching, end_to_end=[ALL_OF_FAST])
    assert [remedy.what for remedy in verdict.remedies if remedy.switch == {"fast": True}] == [ALL_OF_FAST.what]
    assert not any(remedy.what == CUDA_GRAPH for remedy in verdict.remedies)
    untried = diagnose(launching)
    graph = next(remedy for remedy in untried.remedies if remedy.what == CUDA_GRAPH)
    assert graph.switch == {}, "no flag does only that"


def test_fewer_launches_gain_nothing_where_the_workers_cannot_keep_up():
    """Two workers that are busy 92 % of a step of 44 ms: with all launches gone it would wait for them."""
    verdict = diagnose(H200_BATCH_32)
    assert verdict.cause == "too few workers"
    assert not any(remedy.what == CUDA_GRAPH for remedy in verdict.remedies)


@pytest.mark.parametrize(
    ("compute_ms", "device_ms", "input_device_ms", "input_ms", "step_ms"),
    [(30, 10, 2, 5, 30), (30, 29, 4, 5, 33), (30, 29, 4, 50, 50)],
)
def test_main_thread_device_or_input_sets_the_step_whichever_is_slowest(
    compute_ms, device_ms, input_device_ms, input_ms, step_ms
):
    trial = replace(
        ALL_OF_FAST, compute_ms=compute_ms, device_ms=device_ms, input_device_ms=input_device_ms, input_ms=input_ms
    )
    assert trial.step_ms() == step_ms
    assert trial.step_ms(between_ms=7) == step_ms + 7


def test_random_measurements_never_break_it():
    rng = np.random.default_rng(0)
    for _ in range(300):
        step = float(rng.uniform(1, 1000))
        shares = rng.dirichlet(np.ones(7)) * rng.uniform(0.3, 1) * step
        stages = ["feed.wait", "forward", "loss", "backward", "optimizer", "copy", "gc"]
        num_workers = int(rng.integers(0, 20))
        m = measured(
            step,
            dict(zip(stages, shares, strict=True)),
            num_workers=num_workers,
            workers={"decode": float(rng.uniform(0, num_workers * step))},
            has_device=bool(rng.integers(2)),
            device_busy_ms=float(rng.uniform(0, step)) if rng.integers(2) else None,
        )
        verdict = diagnose(m)
        assert all(np.isfinite(remedy.step_ms) and remedy.step_ms > 0 for remedy in verdict.remedies)
        assert isinstance(m.lane("host"), Lane)


def test_without_workers_the_evidence_is_about_the_input_alone():
    evidence = " ".join(diagnose(SITUATIONS["no workers"].measurement).evidence)
    assert "most expensive stage: dataset[i]" in evidence
    assert "backward" not in evidence


def test_on_a_crowded_machine_the_main_thread_gets_the_time_that_its_own_workers_save():
    """Half a core for this training; a worker takes four fifths of it, and only decodes."""
    crowded = measured(
        250,
        {"feed.wait": 130, "forward": 50, "backward": 60},
        num_workers=1,
        workers={"decode": 240},
        worker_cpu_ms=100.0,
        main_cpu=0.1,
        cores=2,
        others_cores=1.5,
    )
    cached = next(remedy for remedy in diagnose(crowded).remedies if remedy.what == "cache decoded images")
    # 25 ms of the main thread and 6 of the worker, at half a core.
    assert cached.step_ms == pytest.approx(62, rel=0.05)
    assert cached.uncertainty > 0.2
    assert not any(remedy.what.startswith("workers") for remedy in diagnose(crowded).remedies)


def test_one_collection_in_a_short_observation_is_no_verdict():
    m = measured(125, {**network(), "gc": 25})
    (host,) = m.lanes
    for times, cause in ((1, "nothing"), (3, "garbage collector")):
        observed = replace(m, lanes=[replace(host, stage_runs={"gc": times / len(m.wall_ms)})])
        assert diagnose(observed).cause == cause


@pytest.mark.parametrize("num_workers", [0, 8])
def test_workers_that_cannot_be_observed_are_not_blamed(num_workers):
    """A step that waits for a loader that could not be observed: nothing about workers, and no remedy."""
    m = measured(400, {**network(), "feed.wait": 300}, main_cpu=0.25)
    verdict = diagnose(replace(m, num_workers=num_workers))
    assert (verdict.cause, list(verdict.remedies)) == ("input", [])
    assert "could not be observed" in verdict.sentence


def test_a_step_that_waits_is_never_blamed_on_its_network():
    """Both cores are always busy: nothing helps, but the step waits for data."""
    m = measured(
        100, {"feed.wait": 60, "forward": 20, "backward": 18}, num_workers=2, workers={"augment": 190}, cores=2
    )
    verdict = diagnose(replace(m, main_cpu_ms=40.0, worker_cpu_ms=160.0))
    assert (verdict.cause, list(verdict.remedies)) == ("input", [])
    assert "No known remedy" in verdict.sentence


def test_workers_that_wait_for_files_may_be_two_per_core():
    """They need a core for a tenth of their time; how many a disk can feed is unknown, so two is the limit."""
    slow = {"worker_cpu_ms": 30.0, "worker_blocked_ms": 260.0}
    verdict = diagnose(measured(150, {**network(0.2), "feed.wait": 130}, num_workers=2, workers={"fetch": 295}, cores=2,
                             main_cpu=0.13, **slow))  # fmt: skip
    assert verdict.cause == "storage"
    assert [remedy.switch for remedy in verdict.remedies] == [{"workers": 4}]
    assert verdict.best.gain == pytest.approx(2, rel=0.15)


def test_time_near_a_loop_belongs_to_it_only_in_the_same_stage():
    lines = [
        HotLine(where="train.py:10", ms=50, text="loss.backward()", function="main", stage="backward"),
        HotLine(where="train.py:12", ms=20, text="norm += p.grad.norm().item()", function="main"),
        HotLine(where="train.py:11", ms=5, text="for p in model.parameters():", function="main"),
    ]
    waits = [WaitSite(where="train.py:12", per_step=100, text=lines[1].text)]
    verdict = diagnose(measured(125, {"forward": 48, "backward": 50}, lines=lines, waits=waits))
    assert verdict.cause == "python loop"
    assert verdict.best.gain == pytest.approx(125 / 100, rel=0.02)


@pytest.mark.parametrize("name", SITUATIONS)
def test_no_prediction_is_faster_than_the_limit_that_is_printed_with_it(name):
    """The unchanged part - the network for a remedy of the input, the input for all others - sets a limit."""
    m, trials = SITUATIONS[name].measurement, SITUATIONS[name].trials
    step_ms = float(np.mean(m.wall_ms))
    slow = replace(m, limits=Limits(compute_ms=0.95 * step_ms, input_ms=0.95 * step_ms, transfer_ms=0.95 * step_ms))
    same_batch = [trial for trial in trials if trial.images is None]
    for remedy in diagnose(slow, same_batch).remedies:
        assert remedy.step_ms >= 0.95 * step_ms * 0.999, remedy


def test_a_measurement_of_nothing_is_refused():
    healthy = measured(100, network())
    for wrong in ({"wall_ms": []}, {"wall_ms": [0.0]}, {"wall_ms": [math.nan]}, {"images": 0}, {"usable_cores": 0}):
        with pytest.raises(ValueError, match="a measurement needs"):
            replace(healthy, **wrong)
    with pytest.raises(ValueError, match="finite"):
        measured(100, {"forward": math.inf})


def test_impossible_measurements_never_break_it():
    """As another program's profile.json may have: stages longer than the step, none at all, numbers of any size."""
    rng = np.random.default_rng(1)
    stages = ["feed.wait", "fetch", "forward", "loss", "backward", "optimizer", "copy", "gc", "validate", "ahead"]
    sizes = [0.0, 1e-12, 0.1, 1.0, 50.0, 1e9]

    def some(options):
        return float(rng.choice(options))

    for _ in range(400):
        chosen = rng.choice(stages, rng.integers(0, 6), replace=False)
        num_workers = int(some([0, 0, 1, 8, 500]))
        m = measured(
            some(sizes[1:]),
            {str(stage): some(sizes) for stage in chosen},
            images=some([0.5, 1, 64, 1e6]),
            num_workers=num_workers,
            workers={"decode": some(sizes)},
            cores=some([0.5, 2, 256]),
            worker_cpu_ms=some(sizes),
            worker_blocked_ms=some(sizes),
            others_cores=some([0, 0.5, 300]),
            has_device=bool(rng.integers(2)),
            device_busy_ms=some(sizes),
            limits=Limits(compute_ms=some(sizes), input_ms=some(sizes)),
            lines=[HotLine(where="a.py:3", ms=some(sizes), text="cv2.imdecode()", function="f")],
            waits=[WaitSite(where="a.py:3", per_step=some(sizes))],
        )
        verdict = diagnose(m)
        assert report_text(make_ledger(m), verdict, m)
        assert all(np.isfinite(remedy.step_ms) and remedy.step_ms > 0 for remedy in verdict.remedies)
        assert all(0 < remedy.uncertainty < 1 for remedy in verdict.remedies)


def test_workers_are_not_advised_for_batches_that_take_less_time_than_handing_them_over():
    """A step of 2 ms of which the batch takes 0.4: when tried with a worker, it took twice as long."""
    verdict = diagnose(
        measured(2.0, {"feed.wait": 0.1, "fetch": 0.15, "collate": 0.15, "forward": 0.7, "backward": 0.9})
    )
    assert verdict.remedies == []


def test_a_slow_line_inside_the_network_is_named():
    line = HotLine(where="net.py:7", ms=70, text="json.loads(json.dumps(x))", function="forward", stage="forward")
    verdict = diagnose(measured(100, {"forward": 80, "backward": 18}, lines=[line]))
    assert "hottest line, 70.0 ms per step in forward: net.py:7  json.loads(json.dumps(x))" in verdict.evidence


def test_a_loss_that_is_a_lot_of_work_is_not_called_an_assigner():
    """On a CPU, without a loop: nothing about targets or a GPU, and no remedy."""
    host = {"feed.wait": 1, "forward": 30, "loss": 40, "backward": 28}
    line = HotLine(where="loss.py:4", ms=39, text="torch.cdist(a, b)", function="contrast", stage="loss")
    verdict = diagnose(measured(100, host, lines=[line]))
    assert (verdict.cause, list(verdict.remedies)) == ("loss", [])
    assert "39.0 ms per step at loss.py:4  torch.cdist(a, b)" in verdict.evidence
    looped = diagnose(measured(100, host, waits=[WaitSite(where="loss.py:4", per_step=500)]))
    assert looped.cause == "assigner" and "GPU" not in looped.sentence


def test_two_loops_have_two_remedies_and_the_slower_loop_comes_first():
    small = HotLine(where="report.py:7", ms=10, text="y.item()", function="report")
    waits = [WaitSite(where="loop.py:20", per_step=500), WaitSite(where="report.py:7", per_step=100)]
    verdict = diagnose(measured(200, network(), waits=waits, lines=[*LOOP, small]))
    assert verdict.cause == "python loop" and "score_all" in verdict.sentence
    assert [remedy.change.partition(": ")[0] for remedy in verdict.remedies] == ["loop.py:20", "report.py:7"]


@pytest.mark.parametrize(
    ("host", "loader"),
    [
        ({"log": 20, "forward": 10, "backward": 15, "ahead": 50}, {}),
        ({"feed.wait": 40, "forward": 20, "backward": 30}, {"num_workers": 4, "workers": {"read": 100.0}}),
        ({"feed.wait": 40, "forward": 20, "backward": 30}, {"num_workers": 8, "cores": 4, "workers": {"read": 790.0}}),
    ],
    ids=["logging", "late batches, idle workers", "late batches, too many workers"],
)
def test_work_of_the_host_is_no_cause_while_the_gpu_is_never_idle(host, loader):
    verdict = diagnose(on_gpu(100, host, 97.5, **loader))
    assert (verdict.cause, verdict.remedies) == ("nothing", [])


def test_low_speeds_keep_their_digits_and_one_worker_is_singular():
    """'compute and copy 1 img/s' is useless for a training that makes 2.5."""
    limits = Limits(compute_ms=5700, input_ms=1.74)
    verdict = diagnose(input_bound(8000, 1, {"read": 7900.0}, images=8, cores=2, limits=limits))
    assert verdict.cause == "too few workers" and "there is only one of them for 2 cores" in verdict.sentence
    evidence = " ".join(verdict.evidence)
    assert "limits: compute 1.40 img/s, input 4,598 img/s" in evidence and "alone delivers 4,598 img/s" in evidence


@pytest.mark.parametrize("main_cpu", [1.0, 2.0], ids=["one core", "every core in use"])
def test_without_a_validation_its_cpu_time_is_gone_too(main_cpu):
    loader = {"num_workers": 1, "workers": {"read": 5.0}}
    best = diagnose(
        measured(100, {"forward": 25, "backward": 30, "validate": 40}, cores=2, main_cpu=main_cpu, **loader)
    ).best
    assert best is not None and best.what == "validate less often"
    assert best.step_ms == pytest.approx(70, rel=0.05)


@pytest.mark.parametrize(
    ("compute_ms", "text"), [(95, "on this machine."), (17, "next to everything else that runs here;")]
)
def test_a_network_that_is_faster_alone_is_not_said_to_be_as_slow_as_it_was(compute_ms, text):
    verdict = diagnose(measured(100, network(), limits=Limits(compute_ms=compute_ms)))
    assert verdict.cause == "nothing" and text in verdict.sentence


@pytest.mark.parametrize(
    ("threads", "others", "cause"),
    [(2, 1.0, "too many threads"), (1, 1.0, "nothing"), (2, 0.1, "nothing"), (None, 1.0, "nothing")],
)
def test_threads_without_a_core_are_the_cause_where_nothing_else_is_found(threads, others, cause):
    """A defect training took 4,482 ms per step next to a program that used one of two cores, and 46 ms with
    OMP_NUM_THREADS=1."""
    host = {"forward": 1914, "backward": 1863, "optimizer": 694}
    verdict = diagnose(measured(4482, host, cores=2, num_threads=threads, others_cores=others))
    assert (verdict.cause, verdict.remedies) == (cause, [])
    assert ("OMP_NUM_THREADS=1" in " ".join(verdict.evidence)) == (cause != "nothing")


def test_one_thread_is_never_too_many():
    """Next to programs that leave it a third of a core there is no advice to give: OMP_NUM_THREADS is 1 already."""
    host = {"forward": 1914, "backward": 1863, "optimizer": 694}
    verdict = diagnose(measured(4482, host, cores=2, num_threads=1, others_cores=1.8, main_cpu=0.3))
    assert verdict.cause != "too many threads" and "OMP_NUM_THREADS" not in " ".join(verdict.evidence)


def test_threads_without_a_core_are_evidence_where_another_cause_is_found():
    found = measured(100, {"forward": 30, "backward": 30, "gc": 30}, cores=2, num_threads=2, others_cores=1.0)
    verdict = diagnose(found)
    assert verdict.cause == "garbage collector" and "OMP_NUM_THREADS=1" in " ".join(verdict.evidence)


@pytest.mark.parametrize("own_flags", [SPIKE_FLAGS, DEFECT_FLAGS], ids=["spike", "defect"])
def test_no_other_job_is_advised_a_flag_that_only_yolo_has(own_flags):
    of_yolo = re.compile(r"--(workers|cache-images|device-augment|fast|notest)\b")
    advised = set()
    validated = measured(100, {"forward": 25, "backward": 30, "validate": 40}, cores=2)
    for situation in [*(each.measurement for each in SITUATIONS.values()), validated]:
        for remedy in diagnose(situation).remedies:
            advised |= set(of_yolo.findall(remedy.change))
            assert not of_yolo.search(with_job_flags(remedy, own_flags).change), with_job_flags(
                remedy, own_flags
            ).change
    assert {"workers", "cache-images", "notest"} <= advised, "otherwise nothing is tested"


@pytest.mark.parametrize("saved_ms", [0.1, 0.5, 5.0])
def test_more_threads_save_no_more_time_than_the_network_takes(saved_ms):
    # Nothing is known about the workers, so the input seems to take no time.
    numbers = StepNumbers(measured(17, {"feed.wait": 16.2, "forward": 0.4, "backward": 0.4}, num_workers=1))
    assert numbers.with_parallel_consumer(saved_ms) >= numbers.step_ms - saved_ms
