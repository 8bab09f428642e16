"""Gather every fact about this machine, then judge them: `judge(examine())` is the whole doctor."""

from dataclasses import dataclass
from pathlib import Path

from flatout.doctor import disk, gpu, gpu_verdict, host, images
from flatout.doctor.finding import Finding
from flatout.profiler import machine


@dataclass(frozen=True)
class Facts:
    """Everything the doctor found out; plain data, the `facts` of `--json`."""

    cores: machine.Cores
    memory: machine.Memory
    shm: machine.Shm | None
    descriptors: machine.Descriptors
    software: host.Software
    torch: gpu.TorchFacts
    driver: gpu.DriverFacts
    images: images.ImageFacts
    disk: disk.DiskFacts | None


def examine(disk_folder: Path | None = None) -> Facts:
    """Look at the machine, run one kernel per GPU, time JPEG decoding, and the disk of `disk_folder` if given."""
    return Facts(
        cores=machine.cores(),
        memory=machine.memory(),
        shm=machine.shm(),
        descriptors=machine.descriptors(),
        software=host.software(),
        torch=gpu.torch_facts(),
        driver=gpu.driver_facts(),
        images=images.image_facts(),
        disk=disk.disk_facts(disk_folder) if disk_folder else None,
    )


def judge(facts: Facts) -> dict[str, list[Finding]]:
    """Findings by section of the report."""
    return {
        "machine": [
            host.judge_cores(facts.cores),
            host.judge_memory(facts.memory),
            host.judge_shm(facts.shm),
            host.judge_descriptors(facts.descriptors),
        ],
        "software": host.judge_software(facts.software),
        "torch and GPUs": gpu_verdict.judge(facts.torch, facts.driver),
        "images": images.judge(facts.images),
        "disk": [disk.judge(facts.disk)],
    }
