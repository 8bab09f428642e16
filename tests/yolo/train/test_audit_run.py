"""`train --audit` and `flatout yolo audit RUN`: gathering changes no weight, a resume keeps them, files are written."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import flatout.yolo
from flatout.errors import ConfigError, MissingFileError, ResourceError
from flatout.yolo.data.image_set import ImageSet
from flatout.yolo.label_audit.passes import PassConfig
from flatout.yolo.label_audit.set_boxes import SetBoxes, boxes_by_image
from flatout.yolo.label_audit.statistics import FILE_NAME, LabelStatistics, read_statistics
from flatout.yolo.options import TrainOptions
from flatout.yolo.train import TrainResult, train
from flatout.yolo.weights import read_weights, save_weights
from tests.yolo.train.conftest import options_for

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(options: TrainOptions) -> TrainResult:
    result = train(options)
    assert result is not None
    return result


def copied(files: Path, own: Path) -> tuple[Path, Path]:
    """A copy of the files that a test may change, and its data YAML."""
    shutil.copytree(files, own)
    (data,) = (own / "data").glob("*.yaml")
    data.write_text(data.read_text().replace(str(files), str(own)))
    return own, data


def statistics_of(folder: Path) -> LabelStatistics:
    statistics = read_statistics(folder / FILE_NAME)
    assert statistics is not None
    return statistics


@pytest.fixture(scope="module")
def audited(files: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainResult:
    torch.set_num_threads(1)
    return trained(replace(options_for(files, tmp_path_factory.mktemp("audited")), audit=1))


def test_the_weights_are_the_same_to_the_bit_with_and_without_audit(
    options: TrainOptions, audited: TrainResult
) -> None:
    plain = trained(options)
    assert not (plain.folder / FILE_NAME).exists()
    for name in ("last.pt", "best.pt"):
        one, other = (read_weights(run.folder / "weights" / name).for_inference() for run in (plain, audited))
        assert [key for key, value in one.items() if not torch.equal(value, other[key])] == []


def test_a_resumed_run_keeps_its_statistics(options: TrainOptions, audited: TrainResult) -> None:
    whole = statistics_of(audited.folder)
    assert whole.num_epochs == options.epochs
    stopped = trained(replace(options, audit=1, stop_after=4))  # in the second epoch
    assert not stopped.finished and statistics_of(stopped.folder).num_epochs == 1
    (stopped.folder / FILE_NAME).unlink()  # the checkpoint has them
    resumed = trained(replace(options, audit=1))
    assert (resumed.folder, resumed.finished) == (stopped.folder, True)
    again = statistics_of(resumed.folder)
    for column, value in vars(whole).items():
        assert np.array_equal(vars(again)[column], value), column


def test_the_steps_of_an_audited_run_can_be_replayed_bit_for_bit(audited: TrainResult) -> None:
    assert flatout.yolo.replay(audited.folder, epoch=1, step=1, losses=False).identical


def test_steps_count_every_appearance_of_every_label(audited: TrainResult) -> None:
    steps = statistics_of(audited.folder)
    assert steps.num_epochs == 2
    assert steps.epochs_T.max() == 2 and (steps.epochs_T > 0).mean() > 0.8  # a mosaic may cut a label off
    shown_T = steps.epochs_T > 0
    assert (steps.loss_T[shown_T] > 0).all() and (steps.iou_T[shown_T] > 0).any() and not steps.loss_T[~shown_T].any()
    assert (steps.learned_T <= steps.epochs_T).all() and (steps.forgotten_T <= steps.learned_T).all()


def test_an_audit_may_begin_in_a_resumed_run(options: TrainOptions) -> None:
    trained(replace(options, stop_after=4))
    resumed = trained(replace(options, audit=1))
    assert statistics_of(resumed.folder).num_epochs == 1


def test_a_resumed_run_forgets_what_it_has_seen_of_labels_that_have_changed(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, data = copied(files, tmp_path / "own")
    options = replace(options_for(own, tmp_path), audit=1, notest=True)
    before = trained(replace(options, stop_after=4))  # in the second epoch
    label = min((data.parent / "labels/train").glob("*.txt"))
    label.write_text(label.read_text() + "0 0.7 0.2 0.1 0.1\n")
    after = trained(replace(options, allow_data_change=True))
    assert (after.folder, after.finished) == (before.folder, True)
    assert "What was seen of them before this epoch is left out." in caplog.text
    statistics = statistics_of(after.folder)
    assert (statistics.num_epochs, statistics.epochs_T.max()) == (1, 1)


def test_single_cls_cannot_be_audited(options: TrainOptions) -> None:
    with pytest.raises(ConfigError, match="--audit cannot judge them"):
        train(replace(options, audit=1, single_cls=True))


def test_the_audit_of_a_run_writes_its_files_and_changes_no_label(
    audited: TrainResult, files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("flatout.yolo.label_audit.rank.MIN_SCORE", 0.001)  # this network has learned almost nothing
    labels = sorted((files / "data/labels/train").iterdir())
    before = [file.read_bytes() for file in labels]
    result = flatout.yolo.audit(audited.folder, workers=0, device="cpu")
    assert [file.read_bytes() for file in labels] == before
    assert result.folder == audited.folder / "audit"
    content = json.loads((result.folder / "audit.json").read_text())
    assert content["training_epochs"] == 2 and len(content["findings"]) == len(result.records)
    assert {file.name for file in result.folder.iterdir()} == {"audit.html", "audit.csv", "audit.json"}
    own = [each for each in result.records if each.line]
    first = own[0]
    assert first.fix is not None
    assert Path(first.label_file).read_text().splitlines()[first.line - 1] == first.fix.was
    assert "of 2 epochs" in first.reason and first.training is not None and first.training.loss > 0
    doubt = "The network found something near only 0 of "
    assert doubt in caplog.text and doubt in (result.folder / "audit.html").read_text()
    assert flatout.yolo.audit(audited.folder, workers=0, device="cpu").folder == audited.folder / "audit2"


def test_files_that_have_changed_since_the_training_are_named(
    files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own, data = copied(files, tmp_path / "own")
    run = trained(replace(options_for(own, tmp_path), audit=1, epochs=1, notest=True)).folder

    def messages_of_an_audit() -> tuple[int, list[str]]:
        caplog.clear()
        result = flatout.yolo.audit(run, weights="last.pt", workers=0, device="cpu")
        epochs = json.loads((result.folder / "audit.json").read_text())["training_epochs"]
        return epochs, [message for message in caplog.messages if "changed since" in message]

    assert messages_of_an_audit() == (1, [])
    label = sorted((own / "data/labels/train").glob("*.txt"))[2]
    label.write_text("0 0.5 0.5 0.25 0.25\n")
    image = str(label).replace("labels", "images").replace(".txt", ".jpg")
    now = "The labels are audited as they are now."
    unused = "What the training saw of them is left out: only its weights are used."
    what = f"{data}: 1 file changed since {run} ({image}: other labels)."
    assert messages_of_an_audit() == (0, [f"{what} {now} {unused}"])
    (run / "train_files.csv").unlink()  # as in a run of an older version
    assert messages_of_an_audit() == (0, [f"{run}: the labels have changed since the training. {now} {unused}"])
    data.unlink()
    with pytest.raises(ConfigError, match=r"^The run's data, .*, does not exist any more\. Give its new path"):
        flatout.yolo.audit(run, device="cpu")


def test_weights_are_audited_without_their_run(audited: TrainResult, options: TrainOptions, tmp_path: Path) -> None:
    weights = audited.folder / "weights/best.pt"
    result = flatout.yolo.audit(
        weights=weights, data=options.data, split="val", img_size=64, workers=0, device="cpu", mirrored=True,
        out=tmp_path / "out",
    )  # fmt: skip
    assert result.num_images == 6 and (tmp_path / "out/audit.html").exists()
    with pytest.raises(ConfigError, match="already exists"):
        flatout.yolo.audit(weights=weights, data=options.data, out=tmp_path / "out")


@pytest.mark.parametrize(
    ("fliplr", "asked", "is_mirrored"),
    [(0.5, None, True), (0.0, None, False), (None, None, False), (0.5, False, False), (0.0, True, True)],
)
def test_mirrored_images_are_looked_at_if_the_training_mirrored_images_or_if_asked(
    fliplr: float | None, asked: bool | None, is_mirrored: bool, audited: TrainResult, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    weights = read_weights(audited.folder / "weights/last.pt")
    assert weights.hyp is not None and weights.hyp["fliplr"] == 0.5
    path = tmp_path / "own.pt"
    save_weights(path, replace(weights, hyp=None if fliplr is None else weights.hyp | {"fliplr": fliplr}))
    passes = []

    def passes_of(files: Sequence[str], images: ImageSet, config: PassConfig, **_: object) -> list[SetBoxes]:
        passes.append(config.mirrored)
        return [boxes_by_image(np.zeros(0, np.int64), np.zeros((0, 6), np.float32), len(images))]

    monkeypatch.setattr("flatout.yolo.label_audit.audit.passes_of", passes_of)
    result = flatout.yolo.audit(audited.folder, weights=path, mirrored=asked, device="cpu", out=tmp_path / "out")
    assert passes == [is_mirrored]
    assert json.loads((result.folder / "audit.json").read_text())["mirrored"] == is_mirrored
    assert ("with mirrored images" in (result.folder / "audit.html").read_text()) == is_mirrored


def test_the_same_network_in_best_and_last_is_asked_once(audited: TrainResult, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(audited.folder, run)
    for best, used in (("last.pt", ["best.pt"]), ("init.pt", ["best.pt", "last.pt"])):
        shutil.copy(run / "weights" / best, run / "weights/best.pt")
        result = flatout.yolo.audit(run, mirrored=False, workers=0, device="cpu", out=tmp_path / best)
        about = json.loads((result.folder / "audit.json").read_text())
        assert [Path(path).name for path in about["weights"]] == used


def test_weights_may_be_named_as_in_the_run_folder_and_their_page_shows_how_to_replay(
    audited: TrainResult, tmp_path: Path
) -> None:
    flatout.yolo.audit(audited.folder, weights="last.pt", workers=0, device="cpu", out=tmp_path / "out")
    about = json.loads((tmp_path / "out/audit.json").read_text())
    assert about["weights"] == [str(audited.folder / "weights/last.pt")]
    with pytest.raises(ConfigError, match="--tile-overlap is about tiles"):
        flatout.yolo.audit(audited.folder, tile_overlap=0.3, device="cpu", out=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"--out .*audit\.json: is no folder and cannot become one"):
        flatout.yolo.audit(audited.folder, workers=0, device="cpu", out=tmp_path / "out/audit.json")


def test_an_audit_that_is_interrupted_leaves_no_empty_folder(
    audited: TrainResult, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    before = set(audited.folder.iterdir())
    monkeypatch.setattr("flatout.yolo.label_audit.audit.passes_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        flatout.yolo.audit(audited.folder, workers=0, device="cpu")
    assert set(audited.folder.iterdir()) == before
    for out, stays in ((tmp_path / "new", False), (tmp_path, True)):
        with pytest.raises(KeyboardInterrupt):
            flatout.yolo.audit(audited.folder, workers=0, device="cpu", out=out)
        assert out.exists() == stays


def test_a_run_folder_that_cannot_be_written_is_answered_with_the_flag_for_another(
    audited: TrainResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", read_only)
    with pytest.raises(ResourceError, match=r"Read-only file system\. Choose another folder with --out\.$"):
        flatout.yolo.audit(audited.folder, workers=0, device="cpu")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--data is missing"):
        flatout.yolo.audit(weights="best.pt")
    with pytest.raises(ConfigError, match="Give the folder of a run, or weights and a data set"):
        flatout.yolo.audit()
    with pytest.raises(MissingFileError, match=r"which has a file opt\.yaml"):
        flatout.yolo.audit(tmp_path)
