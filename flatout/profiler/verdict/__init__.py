"""Why is a training as slow as it is, and what would each remedy be worth? Pure functions of a measurement."""

from flatout.profiler.verdict.judge import judge, remedy_of
from flatout.profiler.verdict.remedy import Finding, Remedy, Trial, Verdict

__all__ = ["Finding", "Remedy", "Trial", "Verdict", "judge", "remedy_of"]
