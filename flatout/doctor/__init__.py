"""Look at the machine and say what would slow training down or stop it: `flatout doctor`.

Files:

    cli          flatout doctor: the command line, and the report as text or JSON
    gpu          What torch, the NVIDIA driver and the PCI bus each say about GPUs
    host         Is there enough of the machine
    images       Which OpenCV and JPEG decoder are here, and how fast does one core decode?
    torch_probe  Import torch, look at its GPUs, run one kernel on each, print what happened as JSON
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.doctor.cli import main
    from flatout.doctor.gpu import DriverFacts, TorchFacts, TorchGpu, check_torch_and_gpus, driver_facts, has_code_for

__getattr__, __dir__ = face(__name__)
