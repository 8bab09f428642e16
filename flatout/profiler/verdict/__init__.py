"""Why is a training as slow as it is, and what would each remedy be worth? Pure functions of a measurement.

Files:

    diagnosis     From a measurement to a verdict
    predict_step  How long would a step take if one thing were different?
    remedy        The words of a verdict
    rules_host    Findings about the main thread
    rules_input   Findings about the input: batches come too late, and why
"""

from flatout.profiler.verdict.diagnosis import diagnose
from flatout.profiler.verdict.predict_step import remedy_of
from flatout.profiler.verdict.remedy import Bottleneck, EndToEndTrial, Remedy, Trial, Verdict

__all__ = ["Bottleneck", "EndToEndTrial", "Remedy", "Trial", "Verdict", "diagnose", "remedy_of"]
