"""The YAML file: every key is known, numbers may be text, and mistakes are reported with the nearest key."""

import json
import logging
import re
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from flatout.errors import ConfigError, ResourceError
from flatout.spike.config import SpikeConfig, load_config, plain_values
from flatout.spike.input import LoaderPlan, check_memory, hint, loading_summary
from tests.spike.config_table import rows

ROOT = Path(__file__).parents[2]
GUIDE = """\
DATA:
  ROOT: data/processed/gopro_spike_unified
  TRAIN_SPLIT: train
  VAL_SPLIT: test
  CROP_SIZE: 256
  CLIP_LEN: 5
  K: 32
  NUM_VOXEL_BINS: 5
  USE_PRECOMPUTED_VOXELS: false
  USE_RAM_CACHE: true
  CACHE_SIZE_GB: 4.0
  NORM: {MEAN: 0.0, STD: 1.0}
DATALOADER: {TOTAL_WORKERS: auto, TRAIN_PREFETCH_FACTOR: 4, PIN_MEMORY: true, PERSISTENT_WORKERS: true}
TRAIN:
  EPOCHS: 40
  BATCH_SIZE: 1
  GRADIENT_ACCUMULATION_STEPS: 6
  OPTIM: {TYPE: adamw, LR: "2e-4", BETAS: [0.9, 0.99], WEIGHT_DECAY: 1e-4}
  SCHED: {TYPE: cosine, WARMUP_STEPS: 256}
MODEL: {USE_SPIKE: true, VRT: {USE_CHECKPOINT_ATTN: true}, FUSE: {TYPE: x}}
LOSS: {CHARBONNIER: {DELTA: 1e-3, WEIGHT: 1.0}, VGG_PERCEPTUAL: {LAYERS: [relu3_3], WEIGHT: 0.1}}
LOG: {SAVE_DIR: outputs/debug, TENSORBOARD: true, VAL_EVERY_STEPS: 1000, TIMING_CONSOLE: true}
TEST: {BATCH_SIZE: 1, NUM_WORKERS: 2}
SEED: 123
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    return path


def test_the_example_of_the_guide_is_read_and_its_unused_keys_are_named(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        config = load_config(written(tmp_path, GUIDE))
    assert (config.DATA.channels, config.TRAIN.OPTIM.LR, config.TRAIN.OPTIM.WEIGHT_DECAY) == (5, 2e-4, 1e-4)
    assert config.LOSS.VGG_PERCEPTUAL.WEIGHTS is None
    assert "DATA.K=32 is ignored" in caplog.text
    assert "MODEL.VRT, FUSE: keys of the early VRT-based code" in caplog.text


def test_all_mistakes_of_a_file_are_named_at_once(tmp_path):
    text = "DATA: {ROOT: x, CROPSIZE: 3}\nTRAIN: {EPOCHS: two, OPTIM: {LR: 1}}\nLOGG: {}\n"
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, text))
    for part in ("DATA.CROPSIZE", "CROP_SIZE", "TRAIN.EPOCHS", "LOGG", "'LOG'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("DATA.SPIKE_H=7", "SPIKE_W"),
        ("DATA.CLIP_LEN=0", "CLIP_LEN=0"),
        ("DATA.SPIKE_TRIM=[-1, 0]", "SPIKE_TRIM"),
        ("MODEL.WIDTH=7", "WIDTH=7"),
        ("MODEL.DEC_BLOCKS=[1]", "equally long"),
        ("TRAIN.EMA_DECAY=1", "EMA_DECAY"),
        ("DATA.VAL_CLIP_STRIDE=2", "VAL_CLIP_STRIDE"),
        ("TRAIN", "SECTION.KEY=VALUE"),
    ],
)
def test_impossible_values_are_refused(tmp_path, override, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load_config(written(tmp_path, GUIDE), [override])


def test_unset_keys_of_the_early_code_are_not_worth_a_note(tmp_path, caplog):
    """The complete config of a run folder has all keys."""
    complete = plain_values(load_config(written(tmp_path, "DATA: {ROOT: x}\nTRAIN: {EPOCHS: 1, OPTIM: {LR: 1}}\n")))
    load_config(written(tmp_path, json.dumps(complete)))
    assert caplog.messages == []


def test_old_worker_keys_are_used_without_a_dataloader_section(tmp_path):
    text = "DATA: {ROOT: x}\nTRAIN: {EPOCHS: 1, OPTIM: {LR: 1}, NUM_WORKERS: 8, PREFETCH_FACTOR: 3}\n"
    loader = load_config(written(tmp_path, text)).loader
    assert (loader.TRAIN_WORKERS, loader.TRAIN_PREFETCH_FACTOR) == (8, 3)


@pytest.mark.parametrize("path", sorted((ROOT / "data/spike").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_are_read_train_on_rates_and_survive_writing(path, tmp_path, caplog):
    import yaml

    # The cache of the guide; what a machine can spare beyond it is for its user to decide.
    assert load_config(path).DATA.CACHE_SIZE_GB <= 4

    with caplog.at_level(logging.WARNING):
        config = load_config(path)
    assert not caplog.records
    assert config.DATA.VOXEL_NORM == "rate"
    assert load_config(written(tmp_path, yaml.safe_dump(plain_values(config)))) == config


def test_the_page_shows_every_key_with_its_default():
    page = (ROOT / "docs/spike.md").read_text()
    for row in rows(SpikeConfig):
        assert row in page, f"docs/spike.md lacks {row!r}: update its table with python -m tests.spike.config_table"


def test_every_key_is_explained():
    def walk(kind: type) -> int:
        found = 0
        for each in fields(kind):
            found += 1
            default = each.default if is_dataclass(each.default) else None
            found += walk(type(default)) if default is not None else 0
        return found

    assert len(rows(SpikeConfig)) > walk(SpikeConfig)
    assert all(not row.rstrip(" |").endswith("|") for row in rows(SpikeConfig))


def plan_of(gpus: int = 3, batch: int = 1, sample_bytes: int = 2**20, cache_bytes: int = 0, **keys):
    from flatout.spike.config import LoaderConfig

    return LoaderPlan(
        config=LoaderConfig(CPU_CORES=40, **keys), gpus=gpus, batch=batch, val_batch=1, sample_bytes=sample_bytes,
        cache_bytes=cache_bytes,
    )  # fmt: skip


def test_the_summary_of_loading_has_the_labels_of_the_guide_in_both_languages():
    plan = plan_of()
    english, chinese = ("\n".join(loading_summary(plan, lang)) for lang in ("en", "zh"))
    for line in ("数据加载配置", "CPU核心数: 40", "总worker数: 32 (建议值，用于所有3个GPU)", "训练DataLoader:",  # noqa: RUF001
                 "  - num_workers: 10 (每GPU)", "总计: 30 个训练workers 利用CPU资源"):  # fmt: skip
        assert line in chinese
    for line in ("CPU cores: 40", "workers in total: 32", "num_workers: 10 (per GPU)", "together: 30"):
        assert line in english
    assert all(line.startswith("[train] ") for line in english.splitlines())


def test_a_plan_that_cannot_fit_is_refused_before_anything_starts():
    check_memory(plan_of(cache_bytes=2**30), free_bytes=2**31)
    with pytest.raises(ResourceError, match=r"CACHE_SIZE_GB asks for 4\.0 GB, but 2\.0 GB"):
        check_memory(plan_of(cache_bytes=4 * 2**30), free_bytes=2**31)
    with pytest.raises(ResourceError, match="more than half"):
        check_memory(plan_of(sample_bytes=2**28), free_bytes=2**31)


def test_small_batches_have_slots_for_all_workers():
    assert plan_of(batch=1).slots >= 2 * 10
    assert plan_of(batch=64, TRAIN_PREFETCH_FACTOR=6).slots == 8


def test_hints_follow_the_thresholds_of_the_guide_and_state_the_upper_bound():
    assert "at most 100 % faster" in hint(60, 120)
    assert "cpu*0.9" in hint(60, 120)
    assert hint(60, 120).startswith("data_time=60.0ms of 120.0ms: ")
    assert "USE_RAM_CACHE" in hint(30, 120)
    assert hint(1, 101).endswith("at most 1 % faster with a perfect loader.")
