"""The callback of examples/lightning_callback.py profiles a Lightning training, or a trainer that calls it like one."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.profiler import slow_loops

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_callback.py"


def callback_class():
    spec = importlib.util.spec_from_file_location("lightning_callback", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ProfileCallback


def test_a_lightning_training_is_profiled(tmp_path, capsys):
    lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network, self.loss = slow_loops.small_network(), nn.CrossEntropyLoss()

        def training_step(self, batch, index):
            images, labels = batch
            return self.loss(self.network(images), labels)

        def validation_step(self, batch, index):
            self.network(batch[0])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[callback_class()(str(tmp_path))],
    )  # fmt: skip
    loaders = [DataLoader(slow_loops.ready_samples(96), batch_size=8) for _ in range(2)]
    trainer.fit(Classifier(), *loaders)
    assert "Verdict:" in capsys.readouterr().out
    ledger = load(tmp_path)
    assert ledger.images == 8
    assert all(ledger.ms("host", stage) > 0 for stage in ("fetch", "forward", "loss", "backward", "validate"))


def test_the_callback_profiles_whatever_trains_between_its_hooks(tmp_path, capsys, monkeypatch):
    if "lightning" not in sys.modules and importlib.util.find_spec("lightning") is None:
        package, module = ModuleType("lightning"), ModuleType("lightning.pytorch")
        module.Callback = object
        monkeypatch.setitem(sys.modules, "lightning", package)
        monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    callback = callback_class()(str(tmp_path))
    network, trainer = slow_loops.small_network(), SimpleNamespace(is_global_zero=True)
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    callback.setup(trainer, network, "fit")
    for images, labels in DataLoader(slow_loops.ready_samples(96), batch_size=8):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images), labels).backward()
        optimizer.step()
    callback.teardown(trainer, network, "fit")
    assert "Verdict:" in capsys.readouterr().out
    assert load(tmp_path).ms("host", "backward") > 0


def test_the_callback_is_about_twenty_lines():
    code = EXAMPLE.read_text().partition("class ")[2].splitlines()
    assert len([line for line in code if line.strip()]) <= 20


def load(folder):
    from flatout.profiler import load_measurement, make_ledger

    return make_ledger(load_measurement(folder / "profile.json"))
