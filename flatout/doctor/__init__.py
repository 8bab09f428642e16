"""`flatout doctor`: examine this machine, and report what would slow training down or prevent it.

Files:

    cli          The command line of `flatout doctor`, and its report as text or JSON
    gpu          Facts and findings about torch, the NVIDIA driver and the GPUs
    host         Facts and findings about cores, memory, shared memory, file descriptors, package versions and disk
    images       Facts and findings about OpenCV and JPEG decoding
    torch_probe  Program that imports torch, runs a kernel on each GPU, and prints the results as JSON
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.doctor.cli import main
    from flatout.doctor.gpu import DriverFacts, TorchFacts, TorchGpu, check_torch_and_gpus, driver_facts, has_code_for

__getattr__, __dir__ = face(__name__)
