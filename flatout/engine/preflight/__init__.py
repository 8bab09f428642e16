"""Before a training begins: is there a GPU that can be used, room on the disk for what will be saved, and may this
process open as many files as that takes?"""

from flatout.errors import ResourceError
from flatout.profiler import machine

DESCRIPTORS = 40
"""Beyond those that are open at the start: 16 for each of two feeds, training and validation, and some for files.
Measured: 19 with two workers on a CPU."""
DESCRIPTORS_OF_GPU = 80
"""More, where the driver opens its device files: its number varies, this is about twice what it takes."""


def check_descriptors(*, uses_gpu: bool) -> None:
    """ResourceError if this process may open too few files: now, and not when the validation's workers start."""
    limits = machine.descriptors()
    needed = limits.open + DESCRIPTORS + (DESCRIPTORS_OF_GPU if uses_gpu else 0)
    if limits.soft is not None and limits.soft < needed:
        raise ResourceError(
            f"A training needs about {needed} file descriptors, and this process may have {limits.soft}. "
            f"Raise the limit: ulimit -n {needed} or more."
        )
