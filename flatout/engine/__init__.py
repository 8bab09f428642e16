"""Training that any job can use; it knows no boxes, defects or spikes.

Files:

    callbacks     What happens in a training, told to whoever wants to hear: five moments, the same for every job
    checkpoints   The two newest states of a training on disk, so that there is always one to continue from
    compile       Is compiling a network worth its time in this run? And if it cannot be compiled: go on without
    graphs        A step as one CUDA graph: the host launches it once instead of a thousand kernels
    job           What the loop asks of those it works for, and what it tells them
    loop          The training loop of every job: batches in, weights out, at any moment resumable
    meter         Numbers of steps and epochs
    optim         Optimizers whose step can be left out on the device, and the moving average of a network's weights
    reproducible  What a result may depend on beside code, config and data
    step          What one training step computes, between a batch on the device and weights that have moved
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.engine.callbacks import Callback, Callbacks, End, How, RunStart, Saved, Scores
    from flatout.engine.checkpoints import Checkpoint, CheckpointStore, load_on_all_ranks
    from flatout.engine.compile import Compiled, explain
    from flatout.engine.graphs import Padding
    from flatout.engine.job import Batches, EpochReport, IntervalStats, Job, Schedule, Sections, StepSettings
    from flatout.engine.loop import Loop, LoopConfig, StoppedAfter
    from flatout.engine.optim import MovingAverage, make_optimizer, parameters_of
    from flatout.engine.reproducible import differences, environment, seed_all, set_determinism, warn_of_waiting_threads
    from flatout.engine.step import DTYPES, Amp, default_fast_amp

__getattr__, __dir__ = face(__name__)
