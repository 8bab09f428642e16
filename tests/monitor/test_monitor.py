"""The monitor shows the last consistent state of any run folder, on this machine and only with the token."""

import errno
import json
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.engine.callbacks import End, RunStart
from flatout.errors import ConfigError
from flatout.monitor import _found, _parser, main
from flatout.monitor.charts import charts_of, ticks_between
from flatout.monitor.run_state import find_runs, images_of, is_run, read_csv, read_rows, run_state
from flatout.monitor.server import machine_load, make_server, names_of, page_data
from flatout.runs.ends import RunLog

ROWS = [{"epoch": epoch, "box": 0.1 / (epoch + 1), "images_per_s": 50.0, "seconds": 4.0} for epoch in range(3)]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "exp"
    (folder / "weights").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": {"epochs": 10, "data": "x.yaml"}, "finished": False}))
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return folder


def lock(folder, pid):
    holder = {"pid": pid, "host": os.uname().nodename, "started": "2026-01-01 00:00:00"}
    (folder / ".lock").write_text(json.dumps(holder))


def test_a_running_run_has_curves_and_time_left(run):
    lock(run, os.getpid())
    state = run_state(run, price_per_hour=3.6)
    assert (state["state"], state["epoch"], state["epochs"]) == ("running", 3, 10)
    assert state["left_s"] == 7 * 4.0
    (chart,) = (chart for chart in charts_of({"exp": state["rows"]}) if chart["title"] == "Box loss")
    assert chart["lines"][0]["points"] == [(row["epoch"], row["box"]) for row in ROWS]
    assert state["cost"] == pytest.approx(0.012, abs=0.002)
    assert json.dumps(state)


@pytest.mark.parametrize("flag", ["--price", "--price-per-hour"])
def test_the_price_has_the_name_that_trainings_use_and_its_old_one(flag):
    assert _parser().parse_args([flag, "3.6"]).price_per_hour == 3.6


def test_readiness_shows_how_long_steps_wait_and_warns_when_that_is_long(run):
    assert run_state(run)["readiness"] is None
    rows = [row | {"step_ms": 60.0, "wait_ms": wait_ms} for row, wait_ms in zip(ROWS, (50.0, 30.0, 3.0), strict=True)]
    for shown, share, num_warnings in ((1, 1 / 6, 0), (2, 0.5, 1), (3, 0.95, 0)):
        (run / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows[:shown]))
        state = run_state(run)
        assert state["readiness"]["share"] == pytest.approx(share)
        assert len(state["warnings"]) == num_warnings, "the first epoch reads files; later ones should not wait"
    assert "3.0 of 60.0 ms" in state["readiness"]["text"]


def test_a_crashed_run_says_so_and_what_to_do(run):
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    lock(run, int(gone.stdout))
    state = run_state(run)
    assert state["state"] == "stopped"
    assert "Run the same command again to continue" in state["summary"]
    assert state["left_s"] is None


def test_a_finished_run_is_finished(run):
    (run / "run.json").write_text(json.dumps({"config": {"epochs": 3}, "finished": True}))
    assert run_state(run)["state"] == "finished"


def test_every_cut_through_the_log_shows_the_rows_before_it(run):
    """F35: a reader may see the file at any byte."""
    content = (run / "log.jsonl").read_bytes()
    for length in range(len(content) + 1):
        (run / "log.jsonl").write_bytes(content[:length])
        assert read_rows(run / "log.jsonl") == ROWS[: content[:length].count(b"\n")]


@pytest.mark.parametrize("name", ["run.json", "log.jsonl", ".lock", "results.csv"])
@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b'{"config": 3}\n{"epoch": "x"}\n']
)
def test_damaged_files_break_nothing(run, name, content):
    (run / name).write_bytes(content)
    assert json.dumps(run_state(run))


def test_numbers_that_are_not_finite_are_left_out(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"epoch": 1, "box": null, "obj": NaN, "ok": true, "name": "x"}\n')
    assert read_rows(tmp_path / "log.jsonl") == [{"epoch": 1.0}]
    (tmp_path / "results.csv").write_text("epoch,box\n0,0.5\n# 2 missing\n1,nan\n2")
    assert read_csv(tmp_path / "results.csv") == [{"epoch": 0.0, "box": 0.5}, {"epoch": 1.0}]


def another_run(run, name, **record):
    folder = run.parent / name
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"config": {"epochs": 10}, "finished": True} | record))
    (folder / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    os.utime(folder / "run.json", (1, 1))
    os.utime(folder / "log.jsonl", (1, 1))
    return folder


def test_a_folder_of_runs_shows_the_newest_and_offers_the_others(run):
    another_run(run, "exp2")
    data = page_data([run.parent], [])
    assert (data["runs"], data["shown"]) == (["exp", "exp2"], ["exp"])
    assert page_data([run.parent], ["exp2"])["states"][0]["name"] == "exp2"


def test_runs_that_are_named_are_compared_in_the_same_charts(run):
    other = another_run(run, "exp2")
    assert page_data([other, run], [])["shown"] == ["exp2", "exp"], "in the order of the command"
    data = page_data([run, other], [])
    assert data["shown"] == ["exp", "exp2"]
    (chart,) = (chart for chart in data["charts"] if chart["title"] == "Box loss")
    assert [line["run"] for line in chart["lines"]] == ["exp", "exp2"]


def test_runs_of_the_same_name_are_told_apart():
    folders = [Path("runs/train/exp"), Path("runs/defect/exp")]
    assert names_of(folders) == {"train/exp": folders[0], "defect/exp": folders[1]}


def test_a_run_that_is_not_there_yet_is_waited_for_and_then_shown(run):
    place = run.parent / "later"
    assert page_data([place], [])["waiting_for"] == str(place)
    another_run(run, "later/train/exp")
    data = page_data([place], [])
    assert (data["waiting_for"], data["shown"]) == ("", ["exp"])


def test_runs_that_are_there_are_shown_while_another_is_waited_for(run):
    later = run.parent / "later"
    data = page_data([run, later], [])
    assert (data["shown"], data["waiting_for"]) == (["exp"], str(later))
    another_run(run, "later")
    data = page_data([run, later], [])
    assert (data["shown"], data["waiting_for"]) == (["exp", "later"], "")


def test_the_command_names_the_runs_in_its_own_order_and_those_that_are_missing(run):
    other, later = another_run(run, "exp2"), run.parent / "later"
    runs = find_runs([other, run, later])
    assert _found([other, run, later], runs) == f"Shown: {other}, {run}; {later} as soon as it starts"
    assert _found([run.parent], runs) == f"Shown: {run}; 1 more to choose from in the page"


def rendered(paths, width):
    """The page as a browser shows it after its script has run: its visible words."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    with make_server(paths, "secret") as server, threading_server(server):
        address = f"http://127.0.0.1:{server.server_address[1]}/secret/"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--window-size={width},900"]
        command = [browser, *flags, "--virtual-time-budget=4000", "--dump-dom", address]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    body = done.stdout.partition("<main>")[2].partition("<script>")[0]
    return " ".join(re.sub(r"<[^>]*>", " ", body).split())


@contextmanager
def threading_server(server):
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield
    server.shutdown()
    thread.join()


@pytest.mark.slow
def test_a_browser_shows_every_run_in_its_own_row_and_what_is_waited_for(run):
    other, later = another_run(run, "exp2"), run.parent / "later"
    words = rendered([run, other, later], 400)
    assert "exp and exp2" in words and f"No run in {later} yet. It is shown here as soon as it starts." in words
    assert "exp stopped 3 / 10 50.00" in words and "exp2 finished 3 / 10 50.00" in words
    assert "Box loss" in words and "exp, " not in words.partition("Box loss")[0]
    assert words.count("No answer from the monitor") == 0


@pytest.mark.slow
def test_a_browser_shows_one_run_with_its_state_and_charts(run):
    words = rendered([run], 1200)
    assert "stopped" in words and "3 / 10 epochs" in words and "50.00 images per second" in words
    assert "Box loss" in words and "Show 2 more: constant and internal numbers" in words


def test_a_folder_that_may_not_be_read_is_refused(run, monkeypatch):
    def refuse(path, **how):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(ConfigError, match=r"exp: cannot be read: Permission denied\. Give a folder such as"):
        main([str(run), "--port", "99999"])
    monkeypatch.setattr(os, "stat", refuse)
    assert not is_run(run)


def test_a_file_is_no_run(run):
    with pytest.raises(ConfigError, match=r"log\.jsonl: a file, not a run folder"):
        main([str(run / "log.jsonl")])


# Charts


def charts_by_title(rows):
    return {chart["title"]: chart for chart in charts_of({"exp": rows})}


def test_scores_have_the_axis_0_to_1_however_small_they_are():
    charts = charts_by_title([{"epoch": 0, "mAP_0.5": 0.001}, {"epoch": 1, "mAP_0.5": 0.002}])
    assert charts["mAP"]["ticks"][0] == 0 and charts["mAP"]["ticks"][-1] == 1


def test_speeds_start_at_0():
    assert (
        charts_by_title([{"epoch": e, "images_per_s": 18 + e % 3} for e in range(5)])["Images per second"]["ticks"][0]
        == 0
    )


def test_training_and_validation_share_a_chart_also_for_losses_nobody_listed():
    charts = charts_by_title([{"epoch": e, "box": e, "val_box": e, "iou_q": e, "val_iou_q": e} for e in range(3)])
    for title in ("Box loss", "iou q"):
        assert [line["label"] for line in charts[title]["lines"]] == ["training", "validation"]
    assert len(charts) == 2


def test_constant_and_internal_numbers_are_hidden_but_not_lost():
    rows = [
        {"epoch": e, "lr1": 1.0 / (e + 1), "bad_steps": 0, "seconds": e, "perceptual": 0.0, "obj": e} for e in range(4)
    ]
    hidden = {title: chart["hidden"] for title, chart in charts_by_title(rows).items()}
    assert hidden == {
        "Objectness loss": False, "lr1": True, "bad steps": True, "seconds": True, "perceptual": True,
    }  # fmt: skip


def test_a_score_that_never_changes_is_shown():
    assert not charts_by_title([{"epoch": e, "mAP_0.5": 0.0} for e in range(5)])["mAP"]["hidden"]


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
@example(360287970190.0, 6.103515625e-05)
def test_ticks_cover_the_values_with_a_handful_of_numbers(low, width):
    ticks = ticks_between(low, low + width)
    slack = 1e-6 * max(abs(low), width)
    assert ticks[0] <= low + slack and ticks[-1] >= low + width - slack
    assert 2 <= len(ticks) <= 8


@pytest.fixture
def address(run):
    with make_server([run], "secret") as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server.server_address
        server.shutdown()
        thread.join()


def get(address, path, host="127.0.0.1"):
    connection = HTTPConnection(*address, timeout=10)
    connection.request("GET", path, headers={"Host": f"{host}:{address[1]}"})
    answer = connection.getresponse()
    return answer, answer.read()


def test_page_and_state_are_served_below_the_token(address):
    page, content = get(address, "/secret/")
    assert page.status == 200 and b"flatout monitor" in content
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    state, content = get(address, "/secret/state.json")
    assert state.status == 200
    assert json.loads(content)["machine"]["cores"] >= 1


def test_gpus_are_shown_with_load_memory_and_temperature_and_a_failing_one_breaks_nothing(monkeypatch):
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    answers = {
        "nvmlInit": None, "nvmlDeviceGetCount": 2, "nvmlDeviceGetName": "H200", "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=140 << 30),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97),
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    gpu = {"name": "H200", "busy_percent": 97, "used_gib": 3, "total_gib": 140, "celsius": 61}
    assert machine_load()["gpus"] == [gpu, gpu]

    def fail(*_):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlDeviceGetUtilizationRates", fail)
    assert machine_load()["gpus"] == []


def test_images_and_profile_of_the_run_are_served_and_nothing_else_of_it(address, run):
    (run / "test_batch0_pred.jpg").write_bytes(b"jpeg")
    (run / "profile.html").write_text("<p>where the time goes")
    (run / "train_batch0.jpg").symlink_to("/etc/passwd")
    assert images_of(run) == {"Predictions": ["test_batch0_pred.jpg"]}, "a link may lead out of the folder"
    image, content = get(address, "/secret/image?run=exp&file=test_batch0_pred.jpg")
    assert (image.headers["Content-Type"], content) == ("image/jpeg", b"jpeg")
    profile, content = get(address, "/secret/profile.html?run=exp")
    assert b"where the time goes" in content and "sandbox" in profile.headers["Content-Security-Policy"]
    for file in ("run.json", "train_batch0.jpg", "../exp/test_batch0_pred.jpg", "/etc/passwd", ""):
        assert get(address, f"/secret/image?run=exp&file={file}")[0].status == 404
    assert get(address, "/secret/image?run=other&file=test_batch0_pred.jpg")[0].status == 404


@pytest.mark.parametrize(
    "path", ["/", "/state.json", "/wrong/", "/secret", "/secret/../etc/passwd", "/secret/run.json"]
)
def test_nothing_else_is_served(address, path):
    assert get(address, path)[0].status == 404


def test_another_host_name_is_refused(address):
    assert get(address, "/secret/", host="evil.example")[0].status == 404


def test_it_listens_on_this_machine_only(address):
    assert address[0] == "127.0.0.1"


def test_other_methods_are_refused(address):
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://127.0.0.1:{address[1]}/secret/", data=b"x", timeout=10)
    assert refused.value.code == 501


def test_the_page_loads_nothing_from_elsewhere():
    page = (Path(__file__).parents[2] / "flatout" / "monitor" / "page.html").read_text()
    assert set(re.findall(r"(?:src|href)\s*=\s*[\"']([^\"']*)", page)) <= {"profile.html?run=", "image?run="}
    assert page.count("http") == page.count("http://www.w3.org/2000/svg")


def test_the_last_warnings_of_a_training_are_shown(run):
    keeper = RunLog()
    keeper.start(RunStart(job="defect", folder=run, config={}, epoch=0, epochs=1, continues=False))
    logging.getLogger("flatout.feed").warning("2 of 9 items\ncould not be decoded")
    logging.getLogger("flatout.feed").info("all is well")
    keeper.end(End(how="finished", folder=run, epoch=1))
    logging.getLogger("flatout.feed").warning("after its end")
    (warning,) = run_state(run)["warnings"]
    assert warning.endswith("WARNING 2 of 9 items could not be decoded")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.json", '{"config": ' + "[" * 100_000 + "]" * 100_000 + "}"),
        ("log.jsonl", "[" * 100_000 + '\n{"epoch": 2}\n'),
        ("log.jsonl", f'{{"epoch": 2, "box": 1{"0" * 400}}}\n'),
        (".lock", json.dumps({"pid": 10**30, "host": os.uname().nodename})),
        (".lock", json.dumps({"pid": -1, "host": os.uname().nodename})),
        ("run.json", '{"config": {"epochs": NaN, "lr0": -Infinity}}'),
    ],
    ids=["deep record", "deep log", "huge number", "huge process", "no process", "no numbers"],
)
def test_hostile_files_break_nothing_and_what_is_sent_is_json(run, name, content):
    (run / name).write_text(content)
    state = run_state(run)
    assert state["state"] == "stopped"
    assert json.dumps(state, allow_nan=False)


def test_a_client_that_hangs_up_or_sends_nonsense_prints_nothing(address, capfd):
    for request in (b"GET /secret/state.json HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n", b"GET http://[ HTTP/1.0\r\n\r\n"):
        for _ in range(5):
            client = socket.create_connection(address)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, as of a dead tab
            client.sendall(request)
            client.close()
    assert get(address, "/secret/")[0].status == 200
    assert capfd.readouterr().err == ""


def test_a_port_that_cannot_be_used_is_reported(address, run):
    for port in (address[1], 99_999):
        with pytest.raises(ConfigError, match=rf"--port {port}: cannot listen there: [^.]+\. Use another"):
            main([str(run), "--port", str(port)])
