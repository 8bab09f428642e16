"""Look at the machine and say what would slow training down or stop it: `flatout doctor`."""

from flatout.doctor.cli import main

__all__ = ["main"]
