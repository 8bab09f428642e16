"""Program that imports torch, runs a kernel on each GPU, and prints the results as JSON.

`flatout.doctor.gpu` runs it in a child process: a broken build may crash or hang instead of raising, and the doctor
must survive that. It imports nothing of flatout.
"""

import json
import warnings
from typing import Any


def probe() -> dict[str, Any]:
    """The fields of `flatout.doctor.gpu.TorchFacts`."""
    try:
        import torch
    except Exception as error:  # broad: a broken installation may raise anything
        return {"error": _first_line(error)}
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "rocm": getattr(torch.version, "hip", None),
        "archs": torch.cuda.get_arch_list(),
    }
    try:
        # Raises the reason why there is no device; is_available() would only return False.
        torch.cuda.init()
    except Exception as error:  # broad: the reason is reported, whatever its type
        return facts | {"cuda_error": _first_line(error)}
    return facts | {"gpus": [_try_gpu(torch, index) for index in range(torch.cuda.device_count())]}


def _try_gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    gpu = {
        "name": properties.name,
        "memory": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "kernel_error": None,
    }
    try:
        total = torch.arange(1000, device=f"cuda:{index}").square().sum().item()
    except Exception as error:  # broad: the reason is reported, whatever its type
        return gpu | {"kernel_error": _first_line(error)}
    return gpu if total == 332_833_500 else gpu | {"kernel_error": f"a sum of squares came out as {total}"}


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(probe()))
