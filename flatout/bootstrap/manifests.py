"""Manifests with which schedulers and clouds train with flatout: SkyPilot, Kubernetes, Kubeflow, SLURM, Ray, Modal.

LaunchConfig --what to train (BootstrapConfig), where, on how many machines--> manifest_of(target) --> text to apply

The on-start script of `flatout bootstrap` is the core of most of them: it installs, fetches data, trains, and continues
when it is run again. Several machines are joined by torchrun; the scheduler only has to start the same command again.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from flatout.bootstrap.script import BootstrapConfig, arguments_of, script_of, train_line
from flatout.errors import ConfigError

PORT = 29_500
"""Port at which the ranks of several machines meet."""
SAVE_S = 120
"""Seconds between the signal and the end of a training that is taken away: enough to save and to copy."""
PERMANENT = [2, 3, 4, 6]
"""Exit codes that another try would not change: flags, data, checkpoints, divergence (docs/exit-codes.md)."""
INTERRUPTED = 75
RETRIES = 20
MAX_CHARACTERS = 100_000
"""Limit of a script inside a manifest: Linux accepts 128 KiB in one argument of a program."""
_ADDRESS = re.compile(r"\w+://")


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What to train, and on which machines."""

    train: BootstrapConfig
    name: str = "flatout"
    nodes: int = 1
    gpu: str = "H100"
    """Type of GPU, as the target calls it."""
    image: str = "pytorch/pytorch:latest"
    """Container image, with Python 3.11 or newer, for targets that run containers."""
    cpus: int = 8
    """Cores for each GPU."""

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ConfigError(f"--nodes {self.nodes}: use 1 or more.")
        if self.cpus < 1:
            raise ConfigError(f"--cpus {self.cpus}: use 1 or more.")
        if not self.train.gpus.isdecimal():
            raise ConfigError(f"--gpus {self.train.gpus}: a manifest needs a number: GPUs per machine.")
        if not self.name.replace("-", "").isalnum() or self.name != self.name.lower():
            raise ConfigError(f"--name {self.name}: use lower-case letters, digits and dashes.")

    @property
    def gpus(self) -> int:
        """GPUs per machine; 0: the CPU."""
        return int(self.train.gpus)

    @property
    def ranks(self) -> int:
        """Processes per machine that train together."""
        return max(1, self.gpus)

    @property
    def cores(self) -> int:
        """Cores per machine."""
        return self.cpus * self.ranks

    def refuse(self, target: str, **reasons: str) -> None:
        """Refuse flags of the on-start script that have no place in a target, instead of ignoring them."""
        for name, reason in reasons.items():
            if getattr(self.train, name):
                raise ConfigError(f"--{name.replace('_', '-')}: {target} {reason}")


def manifest_of(target: str, config: LaunchConfig) -> str:
    """The text for one of TARGETS; ConfigError if the target cannot do what is asked for."""
    return TARGETS[target](config)


def sky(config: LaunchConfig) -> str:
    """A managed job of SkyPilot on preemptible machines."""
    head = '"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"'
    task = {
        "name": config.name,
        "num_nodes": config.nodes,
        "resources": {
            **({"accelerators": f"{config.gpu}:{config.gpus}"} if config.gpus else {"cpus": f"{config.cores}+"}),
            "use_spot": True,
            # A training that saved after a signal continues however often that happens; errors are limited.
            "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [INTERRUPTED]},
        },
        "run": _script(config, _place('"$SKYPILOT_NODE_RANK"', head)),
    }
    return (
        f"# sky jobs launch {config.name}.yaml\n{_about_mirror(config)}"
        "# Keys: sky jobs launch --secret AWS_SECRET_ACCESS_KEY ...\n" + _yaml(task)
    )


def k8s(config: LaunchConfig) -> str:
    """A Job of Kubernetes on one machine."""
    if config.nodes > 1:
        raise ConfigError("--nodes: a Kubernetes Job trains on one machine. Use --print kubeflow for several.")
    # Mistakes end the job; a pod that is taken away, or that saved after a signal, is replaced and does not count.
    rules: list[dict[str, Any]] = [
        {"action": "FailJob", "onExitCodes": {"operator": "In", "values": PERMANENT}},
        {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [INTERRUPTED]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    container = {
        "name": "train",
        "image": config.image,
        "command": ["sh", "-c", _script(config)],
        "resources": _resources(config),
        # Batches travel through shared memory, of which a container has 64 MiB by default.
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": SAVE_S,
        "containers": [container],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    spec = {"backoffLimit": 3, "podFailurePolicy": {"rules": rules}, "template": {"spec": pod}}
    job = _resource("batch/v1", "Job", config.name, spec)
    return f"# kubectl apply -f {config.name}.yaml\n{_about_mirror(config)}" + job


def kubeflow(config: LaunchConfig) -> str:
    """A TrainJob of Kubeflow Trainer v2, which gives torchrun its arguments as PET_ variables."""
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "torch-distributed"}
    trainer = {
        "image": config.image,
        "command": ["sh", "-c", _script(config, "")],
        "numNodes": config.nodes,
        "numProcPerNode": config.ranks,
        "resourcesPerNode": _resources(config),
    }
    spec = {"runtimeRef": runtime, "trainer": trainer}
    job = _resource("trainer.kubeflow.org/v1alpha1", "TrainJob", config.name, spec)
    return (
        f"# kubectl apply -f {config.name}.yaml   (needs Kubeflow Trainer v2)\n{_about_mirror(config)}"
        "# The runtime must mount a memory volume at /dev/shm: batches travel through shared memory.\n" + job
    )


def slurm(config: LaunchConfig) -> str:
    """A batch script that saves before a node is taken away, and is requeued."""
    script = _script(config, _place('"$SLURM_NODEID"', '"$FLATOUT_HEAD"'))
    gpus = f"--gpus-per-node={config.gpus} " if config.gpus else ""
    return f"""\
#!/bin/bash
# sbatch {config.name}.sbatch
#SBATCH --job-name={config.name}
#SBATCH --nodes={config.nodes} --ntasks-per-node=1
#SBATCH {gpus}--cpus-per-task={config.cores}
#SBATCH --signal=TERM@{SAVE_S} --requeue --open-mode=append
# --work is a folder on a file system that all nodes share; each node has its own folder below it.
script=$(cat <<'END_OF_SCRIPT'
{script}END_OF_SCRIPT
)
FLATOUT_HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export FLATOUT_HEAD
srun --kill-on-bad-exit=1 sh -c 'FLATOUT_NODE=$SLURM_NODEID exec sh -c "$0"' "$script"
code=$?
# Interrupted and saved: another node continues.
[ "$code" != {INTERRUPTED} ] || scontrol requeue "$SLURM_JOB_ID"
exit "$code"
"""


def ray(config: LaunchConfig) -> str:
    """A program for Ray Train, which replaces lost workers."""
    config.refuse(
        "ray", fetch="has no data step; put the data where all machines see it.", at_end="runs on machines that stay."
    )
    return f'''\
"""python {config.name}_ray.py: train with flatout on Ray. Lost workers are replaced, and the training continues.

Every machine of the cluster needs flatout: python -m pip install {shlex.quote(config.train.package)}
"""

import ray.train
import torch.distributed
from ray.train.torch import TorchTrainer

from flatout.ranks import free_port, run_rank

COMMAND = {arguments_of(config.train)!r}
WORK = {config.train.work!r}  # a folder that all machines share, or empty; with --mirror it need not be shared


def train() -> None:
    me, meeting = ray.train.get_context(), [ray.util.get_node_ip_address(), free_port()]
    torch.distributed.broadcast_object_list(meeting, src=0)
    ranks = {{"rank": me.get_world_rank(), "num_ranks": me.get_world_size()}}
    here = {{"local_rank": me.get_local_rank(), "local_ranks": me.get_local_world_size()}}
    code = run_rank(COMMAND, **ranks, **here, address=meeting[0], port=meeting[1], folder=WORK)
    if code:
        raise RuntimeError(f"flatout ended with exit code {{code}}")


workers = ray.train.ScalingConfig(num_workers={config.nodes * config.ranks}, use_gpu={config.gpus > 0})
failures = ray.train.FailureConfig(max_failures={RETRIES})
TorchTrainer(train, scaling_config=workers, run_config=ray.train.RunConfig(failure_config=failures)).fit()
'''


def modal(config: LaunchConfig) -> str:
    """A program for Modal: a function with a GPU and a volume, which is started again after a preemption."""
    if config.nodes > 1:
        raise ConfigError("--nodes: a function of Modal runs on one machine. Use --gpus for several GPUs.")
    config.refuse("modal", work="keeps all files in its volume.", at_end="ends the machine by itself.")
    if not _ADDRESS.search(config.train.package):
        raise ConfigError(
            f"--package {config.train.package}: modal installs it elsewhere, where your files are not. Give an "
            "address: git+https://HOST/OWNER/flatout@COMMIT, or the URL of a wheel."
        )
    packages = [config.train.package, *(["obstore"] if config.train.mirror else [])]
    machine = f'gpu="{config.gpu}:{config.gpus}", cpu={config.cores}' if config.gpus else f"cpu={config.cores}"
    shell = ["sh", "-c", config.train.fetch]
    fetch = f'\n    subprocess.run({shell!r}, cwd="/work", check=True)' if config.train.fetch else ""
    return f'''\
"""modal run --detach {config.name}_modal.py: train with flatout on Modal; runs are kept in the volume {config.name}."""

import subprocess

import modal

app = modal.App("{config.name}")
image = modal.Image.debian_slim(python_version="3.12").apt_install("git").pip_install(*{packages!r})
volume = modal.Volume.from_name("{config.name}", create_if_missing=True)
COMMAND = {shlex.split(train_line(config.train))!r}


@app.function(
    image=image, {machine}, volumes={{"/work": volume}},
    timeout=24 * 3600, retries=modal.Retries(max_retries=10, backoff_coefficient=1.0),
)
def train() -> int:{fetch}
    code = subprocess.run(COMMAND, cwd="/work").returncode
    volume.commit()
    if code not in {(0, *PERMANENT)!r}:  # those would fail again
        raise RuntimeError(f"flatout ended with exit code {{code}}: started again, it continues")
    return code


@app.local_entrypoint()
def main() -> None:
    raise SystemExit(train.remote())
'''


TARGETS: Mapping[str, Callable[[LaunchConfig], str]] = {
    write.__name__: write for write in (sky, k8s, kubeflow, slurm, ray, modal)
}
"""What `--print` accepts, and the function that writes it."""


def _script(config: LaunchConfig, place: str = "") -> str:
    """The on-start script. On several machines it starts torchrun with `place`, which says which of them this is."""
    if config.nodes == 1:
        return script_of(config.train, max_characters=MAX_CHARACTERS)
    size = f"--nnodes {config.nodes} --nproc_per_node {config.ranks} " if place else ""
    # Not `torchrun`: that of the machine's image would run the image's Python, which has no flatout.
    line = f"python -m torch.distributed.run {size}{place}-m flatout {shlex.join(arguments_of(config.train))}"
    return script_of(replace(config.train, line=line), max_characters=MAX_CHARACTERS)


def _place(node: str, head: str) -> str:
    """Arguments of torchrun: number of this machine and address of the first, which is always rank 0 and saves."""
    return f"--node_rank {node} --master_addr {head} --master_port {PORT} "


def _resource(api: str, kind: str, name: str, spec: Mapping[str, Any]) -> str:
    """A resource of Kubernetes as YAML."""
    return _yaml({"apiVersion": api, "kind": kind, "metadata": {"name": name}, "spec": spec})


def _resources(config: LaunchConfig) -> dict[str, Any]:
    """What a container of Kubernetes needs."""
    limits = {"limits": {"nvidia.com/gpu": str(config.gpus)}} if config.gpus else {}
    return {**limits, "requests": {"cpu": str(config.cores)}}


def _about_mirror(config: LaunchConfig) -> str:
    if config.train.mirror:
        return ""
    return (
        "# Without --mirror, a training that moves to another machine starts over unless --work is on a shared disk.\n"
    )


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, so that a script can be read and edited."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def _yaml(content: Mapping[str, Any]) -> str:
    return yaml.dump(dict(content), Dumper=_Dumper, sort_keys=False, width=110)
