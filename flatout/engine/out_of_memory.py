"""A GPU that is too small, in a sentence that says what would fit."""

import re

import torch

from flatout.errors import ResourceError

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
MARGIN = 0.9


def no_room(error: BaseException, *, batch_size: int, device: torch.device) -> ResourceError:
    """The error to raise for torch's own; the batch is never made smaller in silence."""
    used, total = _used_and_total(device)
    asked = _asked(str(error))
    fitting = fitting_batch(batch_size, used=used + asked, total=total)
    where = f"{used / 2**30:.1f} GiB of {total / 2**30:.1f} GiB were in use" if total else "its size is unknown"
    return ResourceError(
        f"out of GPU memory with {batch_size} pictures per step ({where}, {asked / 2**20:.0f} MiB more were asked). "
        f"About {fitting} would fit: use --batch-size {fitting}, a smaller --img-size, or --amp bf16. "
        "Everything up to the last saved state is kept; a smaller batch is a new run."
    )


def fitting_batch(batch_size: int, *, used: int, total: int) -> int:
    """Memory grows with the batch, near enough; a tenth is left free."""
    if not total or not used:
        return max(1, batch_size // 2)
    return max(1, min(batch_size - 1, int(MARGIN * batch_size * total / used)))


def _asked(text: str) -> int:
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


def _used_and_total(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
