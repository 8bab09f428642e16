"""`flatout launch`: every manifest is valid for its target, holds the whole command, and contains no key."""

import ast
import json
import os
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from flatout.__main__ import main
from flatout.bootstrap.manifests import PERMANENT, PORT, TARGETS, LaunchConfig, manifest_of
from flatout.bootstrap.script import BootstrapConfig
from flatout.errors import ConfigError
from flatout.ranks import free_port, run_rank
from flatout.runs.step_record import read_steps
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


@pytest.mark.parametrize("target", TARGETS)
def test_a_long_command_fits_into_a_manifest_as_it_does_not_into_an_on_start_form(target: str) -> None:
    command = (*TRAIN, "--project", "long/" * 200)
    assert "long/" * 200 in manifest_of(target, config_of(command=command))


@pytest.mark.parametrize("target", SEVERAL)
def test_several_machines_train_together(target: str) -> None:
    text = manifest_of(target, config_of(nodes=3))
    assert "num_workers=6" in text if target == "ray" else "python -m torch.distributed.run " in text


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
    fetch = {"modal": "echo 'it is' >x"}.get(target, "")
    ast.parse(manifest_of(target, config_of(fetch=fetch, package=f"flatout[tb] @ {PACKAGE}")))


def test_a_kubernetes_job_is_not_tried_again_after_a_mistake_but_after_a_preemption() -> None:
    spec = yaml.safe_load(manifest_of("k8s", config_of()))["spec"]
    rules = spec["podFailurePolicy"]["rules"]
    by_action = {json.dumps(rule.get("onExitCodes", {}).get("values")): rule["action"] for rule in rules}
    assert by_action == {json.dumps(PERMANENT): "FailJob", "[75]": "Ignore", "null": "Ignore"}
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] >= 60


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize("gpus", ["0", "2"])
def test_the_kubernetes_job_conforms_to_the_schema(gpus: str, version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    content = yaml.safe_load(manifest_of("k8s", config_of(gpus=gpus)))
    assert validator.validate(content, version, strict=True)
    content["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(validator.ValidationError):
        validator.validate(content, version, strict=True)


@pytest.mark.parametrize("gpus", ["0", "2"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_train_job_conforms_to_kubeflows_models(gpus: str, nodes: int) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")
    content = yaml.safe_load(manifest_of("kubeflow", config_of(nodes=nodes, gpus=gpus)))
    job = models.TrainerV1alpha1TrainJob.from_dict(content)
    assert job.spec.trainer.num_nodes == nodes
    # A field that the models do not know would be dropped here, and ignored or refused by the cluster.
    assert json.loads(job.to_json()) == content


@pytest.mark.parametrize("gpus", ["0", "2"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_skypilot_reads_the_task(gpus: str, nodes: int) -> None:
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    task = sky.Task.from_yaml_config(yaml.safe_load(manifest_of("sky", config_of(nodes=nodes, gpus=gpus))))
    assert (task.name, task.num_nodes) == ("bolts", nodes)
    (resources,) = task.resources
    assert resources.accelerators == ({"H100": 2} if gpus == "2" else None) and resources.use_spot
    assert resources.job_recovery["recover_on_exit_codes"] == [75]


@pytest.mark.parametrize("target", TARGETS)
def test_without_gpus_none_is_asked_for_but_cores_are(target: str) -> None:
    text = manifest_of(target, config_of(gpus="0"))
    settings = text.replace("nvidia-smi", "").replace("gpus_", "")
    assert "nvidia.com/gpu" not in settings and "H100" not in settings and "gpus-per-node" not in settings
    assert "'--device', 'cpu'" in text or "--device cpu" in text
    cores = {
        "sky": "cpus: 8+", "k8s": "cpu: '8'", "kubeflow": "cpu: '8'", "slurm": "--cpus-per-task=8",
        "ray": "use_gpu=False", "modal": "cpu=8,",
    }  # fmt: skip
    assert cores[target] in text


def test_modal_imports_the_program(tmp_path: Path) -> None:
    pytest.importorskip("modal", reason="modal is not installed")
    path = tmp_path / "program.py"
    # What runs remotely is called here: it must end with the exit code of the training.
    check = """
print(app.name, list(app.registered_functions))
from unittest import mock
for code in (0, 3, 1):
    with mock.patch("subprocess.run", return_value=mock.Mock(returncode=code)), mock.patch.object(volume, "commit"):
        try:
            print(train.local())
        except RuntimeError as error:
            print(error)
"""
    path.write_text(manifest_of("modal", config_of(fetch="echo data")) + check)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=100)
    name, *outcomes = done.stdout.splitlines()
    assert name.startswith("bolts ['train'"), done.stderr
    assert outcomes == ["0", "3", "flatout ended with exit code 1: started again, it continues"]


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


@pytest.mark.parametrize(
    ("target", "settings", "message"),
    [
        ("ray", {"fetch": "echo data"}, "--fetch: ray has no data step"),
        ("ray", {"at_end": "shutdown -h now"}, "--at-end: ray runs on machines that stay"),
        ("modal", {"work": "/shared"}, "--work: modal keeps all files in its volume"),
        ("modal", {"at_end": "shutdown -h now"}, "--at-end: modal ends the machine by itself"),
        ("modal", {"package": "/shared/x.whl"}, "modal installs it elsewhere, where your files are not"),
    ],
)
def test_what_a_target_cannot_do_is_refused_instead_of_ignored(
    target: str, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        manifest_of(target, config_of(**settings))


def test_the_program_for_ray_says_what_its_machines_need_and_is_short() -> None:
    text = manifest_of("ray", config_of())
    assert f"python -m pip install {PACKAGE}" in text
    body = ast.parse(text).body
    assert sum((node.end_lineno or 0) - node.lineno + 1 for node in body[1:]) <= 20


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


SRUN = """#!/bin/sh
# Runs its command as the tasks of two nodes, as srun would; its exit code is the largest.
shift
for node in 0 1; do SLURM_NODEID=$node "$@" & eval "task$node=\\$!"; done
wait "$task0"; code0=$?
wait "$task1"; code1=$?
[ "$code0" -gt "$code1" ] && exit "$code0"
exit "$code1"
"""


def on_two_nodes(target: str, text: str, folder: Path, environ: dict[str, str]) -> "list[subprocess.Popen[str]]":
    """Run what a manifest holds as its engine would: its processes, one for each node, or one that starts both."""
    if target == "slurm":
        tools = folder / "bin"
        tools.mkdir(exist_ok=True)
        for name, script in {
            "srun": SRUN,
            "scontrol": f"#!/bin/sh\necho 127.0.0.1; echo $1 >>{folder}/scontrol\n",
        }.items():
            (tools / name).write_text(script)
            (tools / name).chmod(0o755)
        nodes = [(["bash", "-c", text], {"PATH": f"{tools}:{environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-2]"})]
    else:
        content = yaml.safe_load(text)
        script = content["run"] if target == "sky" else content["spec"]["trainer"]["command"][-1]
        sky = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1"}
        kubeflow = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
        kubeflow["PET_MASTER_PORT"] = str(free_port())
        places = [
            sky | {"SKYPILOT_NODE_RANK": node} if target == "sky" else kubeflow | {"PET_NODE_RANK": node}
            for node in "01"
        ]
        nodes = [
            (["sh", "-c", script], place | {"FLATOUT_NODE": node}) for node, place in zip("01", places, strict=True)
        ]
    return [
        subprocess.Popen(words, cwd=folder, env=environ | place, stderr=subprocess.PIPE, text=True)
        for words, place in nodes
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("target", ["sky", "kubeflow", "slurm"])
def test_what_a_manifest_runs_trains_on_two_nodes(target: str, tmp_path: Path) -> None:
    situation = SITUATIONS["yolo"]
    situation.prepare(tmp_path)
    words = [str(tmp_path / word) if word.endswith(".yaml") else word for word in situation.command]
    del words[words.index("--device") : words.index("--device") + 2]  # --gpus 0 says it
    config = config_of(gpus="0", nodes=2, command=words, mirror="", work=str(tmp_path / "work"))
    for node in "01":
        # An environment that is already there: what pip installs is tested with bootstrap.
        programs = tmp_path / f"work/node{node}/.venv/bin"
        programs.mkdir(parents=True)
        (programs / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (programs / "python").chmod(0o755)
        (programs.parent / "installed").write_text(f"{PACKAGE} \n")
    text = manifest_of(target, config).replace(f" {PORT} ", f" {free_port()} ")
    environ = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "SLURM_JOB_ID": "1"}
    started = on_two_nodes(target, text, tmp_path, os.environ | environ)
    errors = [process.communicate(timeout=250)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(errors)[-3000:]
    run = tmp_path / "work/node0/runs/old"
    assert json.loads((run / "run.json").read_text())["finished"]
    assert [facts["ranks"] for facts in read_steps(run).inputs] == [2]
    assert not (tmp_path / "work/node1/runs").exists(), "only the first node writes"
    assert all((tmp_path / f"work/node{node}/over").exists() for node in "01"), "started again, they do nothing"


@pytest.mark.parametrize("nodes", [1, 2])
def test_slurm_accepts_the_batch_script(nodes: int, tmp_path: Path) -> None:
    if shutil.which("sbatch") is None or subprocess.run(["sinfo"], capture_output=True).returncode:
        pytest.skip("needs Slurm: sbatch, and a controller that answers")
    (tmp_path / "job").write_text(manifest_of("slurm", config_of(gpus="0", nodes=nodes)).replace("=8", "=1"))
    done = subprocess.run(["sbatch", "--test-only", "job"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr


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
