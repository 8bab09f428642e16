"""The command `flatout launch`: print a manifest with which a scheduler or a cloud trains."""

from collections.abc import Sequence

from flatout.bootstrap import SCRIPT_FLAGS, check_flags, read_flags
from flatout.cli import value

_EXAMPLES = """\
examples:
  flatout launch --print sky --package git+https://HOST/OWNER/flatout@COMMIT --mirror s3://my-bucket/bolts --gpu L4 \\
      --fetch 'aws s3 sync s3://my-bucket/data data' -- yolo train --data data/bolts.yaml --fast > bolts.yaml
  flatout launch --print slurm --package /shared/flatout-0.1.0-py3-none-any.whl --work /shared/bolts --nodes 2 \\
      --gpus 8 -- yolo train --data /shared/bolts.yaml --batch 1024 > bolts.sbatch
  flatout launch --print ray --package /shared/flatout-0.1.0-py3-none-any.whl --work /shared/bolts --gpus 2 \\
      -- yolo train --data /shared/bolts.yaml > bolts_ray.py

targets:
  sky       managed job of SkyPilot on preemptible machines     sky jobs launch FILE
  k8s       Job of Kubernetes, one machine                      kubectl apply -f FILE
  kubeflow  TrainJob of Kubeflow Trainer v2, several machines   kubectl apply -f FILE
  slurm     batch script, saved and requeued                    sbatch FILE
  ray       program for Ray Train                               python FILE
  modal     program for Modal, one machine                      modal run --detach FILE

All of them install, fetch the data, train, and continue after a preemption. They contain no keys. More: docs/launch.md
"""

FLAGS = (
    value(
        "--print",
        "one of the targets below",
        required=True,
        choices=("sky", "k8s", "kubeflow", "slurm", "ray", "modal"),
        metavar="TARGET",
    ),
    *SCRIPT_FLAGS,
    value("--name", "name of the job (default: flatout)", default="flatout"),
    value("--nodes", "machines to train on together (default: 1)", type=int, default=1, metavar="N"),
    value("--gpu", "type of GPU, for sky and modal (default: H100)", default="H100", metavar="TYPE"),
    value(
        "--image",
        "container image with Python 3.11 or newer, for k8s and kubeflow (default: pytorch/pytorch:latest)",
        default="pytorch/pytorch:latest",
    ),
    value("--cpus", "cores for each GPU, or for all with --gpus 0 (default: 8)", type=int, default=8, metavar="N"),
)


def main(argv: Sequence[str]) -> int:
    """Print the manifest; returns the exit code."""
    about = "Print a manifest with which a scheduler or a cloud trains, and continues after a preemption."
    options, command = read_flags(argv, "flatout launch", "--print TARGET [FLAG ...]", about, _EXAMPLES, FLAGS)
    from flatout.bootstrap.manifests import LaunchConfig, manifest_of
    from flatout.bootstrap.script import BootstrapConfig

    target = options.pop("print")
    own = {name: options.pop(name) for name in ("name", "nodes", "gpu", "image", "cpus")}
    text = manifest_of(target, LaunchConfig(train=BootstrapConfig(command=command, **options), **own))
    check_flags(command)
    print(text, end="")
    return 0
