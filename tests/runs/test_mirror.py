"""A mirrored run is continued by another machine; a mirror that fails does not stop the training."""

import json
import logging
import os
import shutil
import signal
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatout.engine.callbacks import End, Saved
from flatout.errors import CheckpointError, ConfigError, ResourceError
from flatout.runs.folder import RunRequest
from flatout.runs.mirror import Mirror
from flatout.runs.mirror import snapshot as manifests
from flatout.runs.mirror.mirror import Uploads
from flatout.runs.mirror.remote_folder import RemoteError, RemoteFolder
from flatout.runs.mirror.snapshot import Snapshot
from flatout.runs.options import Identity, check_mirror_url
from tests.feed.injections import wait_until
from tests.runs.comparing_states import differences_between
from tests.runs.toy_ranks import start_ranks
from tests.runs.toy_runs import Toys

CONFIG = {"epochs": 4, "seed": 1}
LIMIT_S = 30
"""For work that takes milliseconds on an idle machine."""


def request_for(project: Path, config: dict[str, Any] = CONFIG, *, exist_ok: bool = False) -> RunRequest:
    return RunRequest(project=project, name="exp", identity=Identity(config), exist_ok=exist_ok)


class FakeRun:
    """A run folder as a training leaves it, without training."""

    def __init__(self, project: Path) -> None:
        self.folder = project / "exp"
        self.state = self.folder / "weights/last.pt"
        self.state.parent.mkdir(parents=True)
        (self.folder / "opt.yaml").write_text("seed: 1\n")
        (self.folder / "plot.jpg").write_bytes(b"not needed to continue")
        self.state.with_name("best.pt").write_bytes(b"best")

    def save(self, step: int, *, finished: bool = False) -> Saved:
        """Replace the file, as `CheckpointStore` does."""
        part = self.state.with_suffix(".part")
        part.write_bytes(f"state of step {step}".encode() * 1000)
        part.replace(self.state)
        position = {"epoch": 0, "step": step, "steps_per_epoch": 100}
        self.state.with_name(".last.position.json").write_text(json.dumps(position))
        (self.folder / "results.txt").write_text("row\n" * step)
        (self.folder / "run.json").write_text(json.dumps({"config": CONFIG, "finished": finished}))
        return Saved(path=self.state, epoch=0, step=step)

    def content(self) -> dict[str, bytes]:
        names = ("run.json", "opt.yaml", "results.txt", "weights/last.pt", "weights/best.pt")
        return {name: (self.folder / name).read_bytes() for name in names}


def content_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not path.name.startswith(".")
    }


def interrupted(folder: Path) -> End:
    return End(how="interrupted", folder=folder, epoch=0)


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path / "here")


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("bucket"))
    return f"file://{tmp_path}/mirror" if request.param == "file" else f"memory://{tmp_path.name}"


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """A bucket of an S3 server on this machine (moto's)."""
    pytest.importorskip("obstore", reason="s3:// needs the extra `cloud`")
    server_class = pytest.importorskip(
        "moto.server", reason="a local S3 server: pip install moto[s3] flask"
    ).ThreadedMotoServer
    server = server_class(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    settings = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_REGION": "us-east-1"}
    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    before = {name: os.environ.get(name) for name in settings | keys}
    os.environ.update(settings | keys)
    try:
        made = urllib.request.Request(f"http://{host}:{port}/runs", method="PUT")
        urllib.request.urlopen(made).close()
        yield "s3://runs/folder"
    finally:
        server.stop()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def test_a_mirrored_run_is_fetched_completely_by_another_machine(url: str, run: FakeRun, tmp_path: Path) -> None:
    mirror = Mirror(url, "exp")
    assert mirror.fetch(request_for(tmp_path / "there")) is None, "nothing is there yet"
    mirror.checkpoint(run.save(10))
    mirror.checkpoint(run.save(20))
    mirror.end(interrupted(run.folder))
    fetched = Mirror(url, "exp").fetch(request_for(tmp_path / "there"))
    assert fetched is not None and not fetched.finished
    assert content_of(fetched.folder) == run.content(), "only what is needed to continue"
    assert Mirror(url, "exp").fetch(request_for(tmp_path / "there")) is None, "it is here now"


def test_two_checkpoints_are_kept_and_no_unused_objects(run: FakeRun, tmp_path: Path) -> None:
    uploads = copied(run, tmp_path, steps=(10, 20, 30, 40))
    remote = RemoteFolder(f"file://{tmp_path}/mirror", "exp")
    assert manifests.numbers(remote) == [3, 4]
    kept = [manifests.read(remote, number) for number in (3, 4)]
    assert [manifest.steps for manifest in kept] == [30, 40]
    assert set(remote.keys("objects")) == {file.sha256 for manifest in kept for file in manifest.files.values()}
    assert uploads.newest == kept[1]


def copied(run: FakeRun, tmp_path: Path, steps: tuple[int, ...]) -> Uploads:
    """Upload one checkpoint after the other, waiting for each."""
    uploads = Uploads(RemoteFolder(f"file://{tmp_path}/mirror", "exp"))
    for step in steps:
        uploads.offer(Snapshot(run.folder, run.save(step).path))
        wait_until(lambda step=step: uploads.newest is not None and uploads.newest.steps == step, LIMIT_S)  # type: ignore[misc]
    assert uploads.finish(LIMIT_S)
    return uploads


@pytest.mark.parametrize("written_bytes", [None, 0, 100])
def test_a_checkpoint_without_a_complete_manifest_does_not_count(
    written_bytes: int | None, run: FakeRun, tmp_path: Path
) -> None:
    """As if the machine had been lost during the copy, or while it wrote the manifest."""
    copied(run, tmp_path, steps=(10, 20))
    manifest = tmp_path / "mirror/exp/manifests/000002.json"
    manifest.unlink() if written_bytes is None else os.truncate(manifest, written_bytes)
    fetched = Mirror(f"file://{tmp_path}/mirror", "exp").fetch(request_for(tmp_path / "there"))
    assert fetched is not None
    assert (fetched.folder / "weights/last.pt").read_bytes().startswith(b"state of step 10")


def test_damage_is_noticed_and_the_checkpoint_before_is_used(
    run: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(run, tmp_path, steps=(10, 20))
    remote = RemoteFolder(f"file://{tmp_path}/mirror", "exp")
    damage(tmp_path, manifests.read(remote, 2))
    fetched = Mirror(f"file://{tmp_path}/mirror", "exp").fetch(request_for(tmp_path / "there"))
    assert fetched is not None
    assert (fetched.folder / "weights/last.pt").read_bytes().startswith(b"state of step 10")
    assert "is damaged: its sha256 differs from the manifest's. Using the checkpoint before it." in caplog.text
    damage(tmp_path, manifests.read(remote, 1))
    with pytest.raises(CheckpointError, match="so nothing was started"):
        Mirror(f"file://{tmp_path}/mirror", "exp").fetch(request_for(tmp_path / "elsewhere"))


def damage(tmp_path: Path, manifest: manifests.Manifest) -> None:
    path = tmp_path / "mirror/exp" / manifest.files["weights/last.pt"].key
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_a_newer_local_checkpoint_is_left_alone_and_an_older_one_is_not(run: FakeRun, tmp_path: Path) -> None:
    copied(run, tmp_path, steps=(10, 20))
    mirror = Mirror(f"file://{tmp_path}/mirror", "exp")
    run.save(30)
    assert mirror.fetch(request_for(run.folder.parent)) is None
    run.save(5)
    fetched = mirror.fetch(request_for(run.folder.parent))
    assert fetched is not None and fetched.folder == run.folder
    assert run.state.read_bytes().startswith(b"state of step 20")


def test_a_newer_local_checkpoint_is_not_replaced_by_the_one_before_a_damaged_one(
    run: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copied(run, tmp_path, steps=(10, 20))
    damage(tmp_path, manifests.read(RemoteFolder(f"file://{tmp_path}/mirror", "exp"), 2))
    run.save(15)
    assert Mirror(f"file://{tmp_path}/mirror", "exp").fetch(request_for(run.folder.parent)) is None
    assert run.state.read_bytes().startswith(b"state of step 15")
    assert "The checkpoint on this machine is newer than the one before it." in caplog.text


def test_with_exist_ok_a_run_is_fetched_into_the_one_folder_that_will_be_opened(run: FakeRun, tmp_path: Path) -> None:
    """Otherwise the command would start over in `exp`, and the fetched run would be in `exp2`."""
    copied(run, tmp_path, steps=(10,))
    mirror, there = Mirror(f"file://{tmp_path}/mirror", "exp"), FakeRun(tmp_path / "there")
    there.save(90, finished=True)
    fetched = mirror.fetch(request_for(there.folder.parent, CONFIG, exist_ok=True))
    assert fetched is not None and fetched.folder == there.folder
    (there.folder / "run.json").write_text(json.dumps({"config": {"seed": 7}, "finished": False}))
    assert mirror.fetch(request_for(there.folder.parent, CONFIG, exist_ok=True)) is None, "choose_run refuses it"


def test_other_settings_are_refused_and_a_finished_training_is_not_repeated(run: FakeRun, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    copied(run, tmp_path, steps=(10,))
    with pytest.raises(ConfigError, match="an unfinished run with other settings: seed 1 -> 2"):
        Mirror(url, "exp").fetch(request_for(tmp_path / "there", CONFIG | {"seed": 2}))
    assert Mirror(url, "exp").fetch(request_for(tmp_path / "there", CONFIG | {"epochs": 9})) is not None, (
        "more epochs are fine"
    )
    run.save(20, finished=True)
    Mirror(url, "exp").end(End(how="finished", folder=run.folder, epoch=4))
    fetched = Mirror(url, "exp").fetch(request_for(tmp_path / "new"))
    assert fetched is not None and fetched.finished
    assert content_of(fetched.folder) == run.content()


def test_a_resumed_run_never_replaces_another_one_in_a_mirror(run: FakeRun, tmp_path: Path) -> None:
    copied(run, tmp_path, steps=(10,))
    mirror, other = Mirror(f"file://{tmp_path}/mirror", "exp"), FakeRun(tmp_path / "other")
    other.save(5)
    resumed = replace(request_for(tmp_path), resume=other.folder)
    assert mirror.fetch(resumed) is None, "it continues from its folder, though the mirror is ahead"
    with pytest.raises(ConfigError, match=r"an unfinished run with other settings: seed 1 -> 2\. Use another"):
        mirror.fetch(replace(resumed, identity=Identity(CONFIG | {"seed": 2})))


def test_a_full_disk_is_reported_before_fetching(run: FakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied(run, tmp_path, steps=(10,))
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(ResourceError, match=r"not enough disk space: .* bytes needed, 100 free"):
        Mirror(f"file://{tmp_path}/mirror", "exp").fetch(request_for(tmp_path / "there"))


# A mirror that does not work.


class Unreliable(RemoteFolder):
    """Fails a few times, then waits for the gate, if there is one."""

    def __init__(self, url: str, *, failures: int, gate: threading.Event | None = None) -> None:
        super().__init__(url, "exp")
        self.failures, self.gate = failures, gate

    def upload(self, source: Path, key: str) -> None:
        if self.failures:
            self.failures -= 1
            raise RemoteError(f"{self.url}: cannot write {key}: no route to host.")
        if self.gate is not None:
            self.gate.wait(LIMIT_S)
        super().upload(source, key)


def test_a_failing_mirror_causes_one_warning_and_is_retried(
    run: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    uploads = Uploads(Unreliable(f"file://{tmp_path}/mirror", failures=3), first_wait_s=0.01)
    uploads.offer(Snapshot(run.folder, run.save(10).path))
    assert uploads.finish(LIMIT_S)
    assert caplog.text.count("no route to host. Training goes on") == 1
    assert "The mirror works again" in caplog.text


def test_saving_never_waits_and_the_newest_checkpoint_wins(run: FakeRun, tmp_path: Path) -> None:
    gate = threading.Event()
    uploads = Uploads(Unreliable(f"file://{tmp_path}/mirror", failures=0, gate=gate))
    for step in range(10, 60, 10):
        uploads.offer(Snapshot(run.folder, run.save(step).path))
    assert uploads.newest is None, "the first copy has not ended, and nothing has waited for it"
    gate.set()
    assert uploads.finish(LIMIT_S)
    assert uploads.newest is not None and uploads.newest.steps == 50
    assert len(os.listdir(tmp_path / "mirror/exp/manifests")) <= 2


def test_an_unexpected_error_ends_the_copying_without_blocking(
    run: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Uploads, "_publish", lambda self, manifest: 1 // 0)
    uploads = Uploads(RemoteFolder(f"file://{tmp_path}/mirror", "exp"))
    uploads.offer(snapshot := Snapshot(run.folder, run.save(10).path))
    assert not uploads.finish(LIMIT_S)
    assert (
        "ZeroDivisionError: integer division or modulo by zero. No further checkpoints are copied there." in caplog.text
    )
    uploads.offer(late := Snapshot(run.folder, run.save(20).path))
    wait_until(lambda: not snapshot.held and not late.held, LIMIT_S)


def test_giving_up_at_the_end_says_where_the_files_are(
    run: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "mirror").write_text("a file, where a folder should be")
    mirror = Mirror(f"file://{tmp_path}/mirror", "exp", patience_s=0.3)
    mirror.checkpoint(run.save(10))
    mirror.end(interrupted(run.folder))
    assert f"is not up to date; all files are in {run.folder}" in caplog.text


def test_two_trainings_must_not_share_a_mirror(run: FakeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    remote = RemoteFolder(f"file://{tmp_path}/mirror", "exp")
    mine = Uploads(remote)
    mine.offer(Snapshot(run.folder, run.save(10).path))
    wait_until(lambda: mine.newest is not None, LIMIT_S)
    theirs = copied(run, tmp_path, steps=(20,))
    mine.offer(Snapshot(run.folder, run.save(30).path))
    assert not mine.finish(LIMIT_S)
    assert "another training has written checkpoint 2 there" in caplog.text
    assert theirs.newest is not None and manifests.numbers(remote) == [1, 2]


def test_a_mirror_that_cannot_be_reached_is_an_error_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a new machine would start over and overwrite what it could not see."""

    def refuse(remote: RemoteFolder, folder: str) -> list[str]:
        raise RemoteError(f"{remote.url}: cannot list {folder}: no route to host.")

    monkeypatch.setattr(RemoteFolder, "keys", refuse)
    with pytest.raises(ResourceError, match=r"no route to host\. Nothing was started"):
        Mirror(f"file://{tmp_path}/mirror", "exp").fetch(request_for(tmp_path / "there"))


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/folder", "not a URL"),
        ("s3://AKIA:secret@bucket/folder", "must not contain credentials"),
        ("s3://secret@bucket/folder", "must not contain credentials"),
        ("abfss://user:secret@account.dfs.core.windows.net/folder", "must not contain credentials"),
        ("abfss://container@account.dfs.core.windows.net/folder?sig=secret", "must not contain credentials"),
        ("carrier-pigeon://loft", "is not supported here"),
    ],
)
def test_urls_that_cannot_be_used_are_refused_without_their_secrets(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Mirror(url, "exp")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("scheme", ["abfs", "abfss"])
def test_the_usual_form_of_an_azure_url_is_accepted(scheme: str) -> None:
    check_mirror_url(f"{scheme}://container@account.dfs.core.windows.net/folder")


@pytest.mark.parametrize("name", ["../run.json", "/etc/passwd", "a/b/c.pt", "", ".."])
def test_a_manifest_cannot_write_outside_of_the_run_folder(name: str) -> None:
    file = {"sha256": "0" * 64, "nbytes": 1}
    content = {"schema": 1, "number": 1, "writer": "w", "config": {}, "position": {}, "finished": False}
    with pytest.raises(ValueError, match="is not a file of a run folder"):
        manifests.parse(content | {"files": {name: file}})


# With a real training.


@pytest.mark.fault
def test_a_training_continues_from_its_mirror_on_a_new_machine(toys: Toys, undisturbed: Path, tmp_path: Path) -> None:
    """Killed, and its folder lost with the machine: the same command elsewhere ends with the same bits."""
    args = ("--mirror", f"file://{tmp_path}/mirror")
    # Slow, so that it does not end before its first copy is seen.
    killed = toys.start(tmp_path / "first", *args, "--delay-ms", 150)
    wait_until(lambda: list(tmp_path.glob("mirror/toy/manifests/*.json")), LIMIT_S)
    killed.send(signal.SIGKILL)
    killed.wait()
    shutil.rmtree(tmp_path / "first")
    continued = toys.run(tmp_path / "second", *args)
    assert continued.code == 0, continued.output
    assert "Continuing " in continued.output
    assert differences_between(undisturbed, tmp_path / "second/toy") == []
    again = toys.run(tmp_path / "third", *args)
    assert again.code == 0 and "\ntraining\n" not in again.output, "it is finished"
    assert (tmp_path / "third/toy/results.csv").read_text() == (undisturbed / "results.csv").read_text()


@pytest.mark.fault
def test_interrupted_ranks_wait_for_the_mirror(toys: Toys, tmp_path: Path) -> None:
    """Whichever rank gets the signal: a launcher would end all as soon as one has ended."""
    runs = start_ranks(toys, tmp_path / "runs", "--mirror", f"file://{tmp_path}/mirror", "--epochs", 200)
    runs[0].wait_for_words("epoch 0 step 6")
    runs[1].send(signal.SIGTERM)
    assert [run.wait() for run in runs] == [75, 75], [run.output for run in runs]
    remote = RemoteFolder(f"file://{tmp_path}/mirror", "toy")
    newest = manifests.read(remote, manifests.numbers(remote)[-1])
    assert newest.where() in runs[0].output, "the last checkpoint"
    assert "Mirrored to" in runs[0].output
