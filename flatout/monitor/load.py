"""How busy is this machine? For a page that asks every few seconds."""

from contextlib import suppress
from typing import Any

import psutil


def machine_load() -> dict[str, Any]:
    """CPU and RAM in per cent of the machine; per GPU use, memory and temperature, where NVIDIA's library answers."""
    memory = psutil.virtual_memory()
    return {
        "cpu_percent": psutil.cpu_percent(interval=None),
        "cores": psutil.cpu_count() or 1,
        "ram_used_gib": (memory.total - memory.available) / 2**30,
        "ram_total_gib": memory.total / 2**30,
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, Any]]:
    import pynvml

    found: list[dict[str, Any]] = []
    # No driver, no permission, a GPU that fell off: the page shows what is left.
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
            found.append(
                {
                    "name": str(pynvml.nvmlDeviceGetName(handle)),
                    "busy_percent": pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                    "used_gib": memory.used / 2**30,
                    "total_gib": memory.total / 2**30,
                    "celsius": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
                }
            )
    return found
