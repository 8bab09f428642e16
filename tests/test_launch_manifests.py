"""`flatout launch`: every manifest is valid for its target, holds the whole command, and contains no key."""

import ast
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flatout.__main__ import main
from flatout.bootstrap.manifests import PERMANENT, TARGETS, LaunchConfig, manifest_of
from flatout.bootstrap.script import BootstrapConfig
from flatout.errors import ConfigError
from flatout.ranks import free_port, run_rank
from tests.feed.injections import wait_until
from tests.old_runs.situations import SITUATIONS

ROOT = Path(__file__).parents[1]
PACKAGE = "git+https://host.example/me/flatout@0123456789abcdef0123456789abcdef01234567"
TRAIN = ("yolo", "train", "--data", "it's a path/bolts.yaml", "--cfg", "yolov7-tiny")
SEVERAL = ("sky", "kubeflow", "slurm", "ray")
"""Targets that train on several machines."""


def config_of(*, gpus: str = "2", nodes: int = 1, **train: Any) -> LaunchConfig:
    train = {"command": TRAIN, "package": PACKAGE, "mirror": "s3://b/bolts"} | train
    return LaunchConfig(train=BootstrapConfig(gpus=gpus, **train), name="bolts", nodes=nodes)


def flags_in(text: str) -> bool:
    """Whether the whole training command stands in the manifest, whichever way it is quoted."""
    return all(word.replace("'", "") in text.replace("'", "").replace('"', "").replace("\\", "") for word in TRAIN)


@pytest.mark.parametrize("target", TARGETS)
def test_every_manifest_holds_the_whole_command_the_mirror_and_once(target: str) -> None:
    text = manifest_of(target, config_of())
    assert flags_in(text) and "s3://b/bolts" in text and "--once" in text


@pytest.mark.parametrize("target", SEVERAL)
def test_several_machines_train_together(target: str) -> None:
    text = manifest_of(target, config_of(nodes=3))
    assert "num_workers=6" in text if target == "ray" else "torchrun" in text


@pytest.mark.parametrize("target", sorted(set(TARGETS) - set(SEVERAL)))
def test_a_target_of_one_machine_refuses_several(target: str) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        manifest_of(target, config_of(nodes=2))


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_sbatch_script_is_valid_bash_and_its_inner_script_valid_sh(nodes: int, tmp_path: Path) -> None:
    text = manifest_of("slurm", config_of(nodes=nodes))
    outer = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert not outer.returncode, outer.stderr
    inner = text.partition("<<'END_OF_SCRIPT'\n")[2].partition("END_OF_SCRIPT\n")[0]
    parsed = subprocess.run(["sh", "-n"], input=inner, capture_output=True, text=True)
    assert inner and not parsed.returncode, parsed.stderr


@pytest.mark.parametrize("target", ["ray", "modal"])
def test_the_programs_are_valid_python(target: str) -> None:
    ast.parse(manifest_of(target, config_of(fetch="echo 'it is' >x")))


def test_a_kubernetes_job_is_not_tried_again_after_a_mistake_but_after_a_preemption() -> None:
    spec = yaml.safe_load(manifest_of("k8s", config_of()))["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_action = {json.dumps(rule.get("onExitCodes", {}).get("values")): rule["action"] for rule in rules}
    assert by_action == {json.dumps(PERMANENT): "FailJob", "[75]": "Ignore", "null": "Ignore"}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_the_kubernetes_job_conforms_to_the_schema(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    assert validator.validate(yaml.safe_load(manifest_of("k8s", config_of())), version, strict=True)


def test_the_train_job_conforms_to_kubeflows_models() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    content = yaml.safe_load(manifest_of("kubeflow", config_of(nodes=2)))
    job = models.TrainerV1alpha1TrainJob.from_dict(content)
    assert (
        job.spec.trainer.num_nodes == 2 and not job.additional_properties
        if hasattr(job, "additional_properties")
        else job
    )


def test_skypilot_reads_the_task() -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    task = sky.Task.from_yaml_config(yaml.safe_load(manifest_of("sky", config_of(nodes=2))))
    assert (task.name, task.num_nodes) == ("bolts", 2)
    (resources,) = task.resources
    assert resources.accelerators == {"H100": 2} and resources.use_spot


def test_modal_imports_the_program(tmp_path: Path) -> None:
    pytest.importorskip("modal", reason="modal is not installed")
    path = tmp_path / "program.py"
    path.write_text(
        manifest_of("modal", config_of(fetch="echo data")) + "\nprint(app.name, list(app.registered_functions))\n"
    )
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    assert done.stdout.startswith("bolts ['train'"), done.stderr


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nodes": 0}, "--nodes 0: use 1 or more"),
        ({"gpus": "all"}, "--gpus all: a manifest needs a number"),
        ({"fetch": "export AWS_SECRET_ACCESS_KEY=abc123"}, "seems to contain a key or password"),
        ({"package": ""}, "--package is missing"),
    ],
)
def test_mistakes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        manifest_of("sky", config_of(**settings))


def test_the_command_prints_the_manifest_and_refuses_mistyped_flags(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "launch",
        "--print",
        "slurm",
        "--package",
        PACKAGE,
        "--name",
        "bolts",
        "--gpus",
        "2",
        "--mirror",
        "s3://b/bolts",
    ]
    assert main([*words, "--", *TRAIN]) == 0
    assert capsys.readouterr().out == manifest_of("slurm", config_of())
    with pytest.raises(SystemExit) as ended:
        main([*words, "--", *TRAIN, "--fats"])
    assert ended.value.code == 2
    assert "--fats" in capsys.readouterr().err


def test_run_rank_starts_one_rank_and_returns_its_exit_code(tmp_path: Path) -> None:
    words = ["yolo", "train", "--data", "missing.yaml", "--device", "cpu"]
    ranks = {"rank": 0, "num_ranks": 1, "local_rank": 0, "local_ranks": 1}
    assert run_rank(words, **ranks, address="127.0.0.1", port=free_port(), folder=str(tmp_path)) in (2, 3)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ray_trains_on_two_cpu_workers_and_survives_a_killed_one(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="ray is not installed")
    situation = SITUATIONS["yolo"]
    situation.prepare(tmp_path)
    command = [*situation.command, "--notest", "--save-every-steps", "10"]
    command[command.index("--epochs") + 1] = "60"
    config = config_of(gpus="0", nodes=2, command=command, mirror="", work=str(tmp_path))
    (tmp_path / "train_ray.py").write_text(manifest_of("ray", config))
    environ = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    with (tmp_path / "log").open("w") as log:
        ray = subprocess.Popen([sys.executable, "train_ray.py"], cwd=tmp_path, env=environ, stdout=log, stderr=log)
        try:
            position = tmp_path / "runs/old/weights/.last.position.json"
            wait_until(lambda: position.exists() or ray.poll() is not None, timeout_s=200)
            killed = kill_a_worker_of_ray(tmp_path)
            assert ray.wait(timeout=200) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            ray.kill()
    assert killed
    assert json.loads((tmp_path / "runs/old/run.json").read_text())["finished"]
    assert len((tmp_path / "runs/old/log.jsonl").read_text().splitlines()) == 60


def kill_a_worker_of_ray(folder: Path) -> bool:
    """Kill the process of Ray that started rank 1."""
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        with suppress(psutil.Error):
            if "flatout" in words and process.cwd() == str(folder) and process.environ().get("RANK") == "1":
                process.parent().kill()
                return True
    return False
