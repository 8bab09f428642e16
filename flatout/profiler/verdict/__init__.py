"""Why is a training as slow as it is, and what would each remedy be worth? Pure functions of a measurement."""

from flatout.profiler.verdict.judge import judge
from flatout.profiler.verdict.remedy import Finding, Remedy, Trial, Verdict, WholeTrial
from flatout.profiler.verdict.trials import remedy_of

__all__ = ["Finding", "Remedy", "Trial", "Verdict", "WholeTrial", "judge", "remedy_of"]
