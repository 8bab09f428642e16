"""From a measurement to a verdict: the cause of slow training, and remedies with predicted speeds (pure functions).

Files:

    diagnosis      From a measurement to a verdict: all bottlenecks, the most expensive first
    predict_step   The step time of a changed training, predicted from the numbers of the present one
    remedy         The parts of a verdict: bottlenecks, remedies with a predicted speed
    rules_code     Bottlenecks in the user's own code: the function or line that takes the time
    rules_host     Bottlenecks of the main thread, and between host and GPU
    rules_input    Bottlenecks of the input: batches come too late, and why
    rules_network  Bottlenecks of the network's own part of a step: small batches, threads, slow settings
"""

from flatout.profiler.verdict.diagnosis import diagnose
from flatout.profiler.verdict.predict_step import remedy_of
from flatout.profiler.verdict.remedy import Bottleneck, EndToEndTrial, Remedy, Trial, Verdict

__all__ = ["Bottleneck", "EndToEndTrial", "Remedy", "Trial", "Verdict", "diagnose", "remedy_of"]
