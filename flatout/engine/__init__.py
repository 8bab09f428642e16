"""The training loop and its parts, independent of what is trained.

Files:

    callbacks         Callbacks: five events of a training run, the same for every job
    checkpoints       The two newest checkpoints of a training on disk, so that there is always one to continue from
    compile           torch.compile: whether it pays within a run
    graphs            CUDA graphs of training steps: the host launches a graph once instead of a thousand kernels
    job               Interfaces of the training loop: batches, job, schedule, the work after an epoch
    loop              The training loop of every job: batches in, weights out, resumable at any time
    meter             Numbers of steps and epochs: copied from the device many steps at a time, averaged
    optim             Optimizers whose step can be skipped on the device, and the moving average of a network's weights
    reproducible      Reproducibility: versions, processor, threads
    step              One training step, from a batch on the device to updated weights: precision, batch norm, optimizer
    step_hash         Hashes of what a step is trained on, made on the device and read many steps later
    step_hash_triton  The kernel that hashes a tensor in one pass
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.engine.callbacks import Callback, Callbacks, End, RunOutcome, RunStart, Saved, Scores
    from flatout.engine.checkpoints import Checkpoint, CheckpointStore, load_on_all_ranks
    from flatout.engine.compile import Compiled, explain, never_compiled
    from flatout.engine.graphs import Padding, without_tuning
    from flatout.engine.job import Batches, EpochEnd, EpochReport, IntervalStats, Job, Schedule, Sections, StepSettings
    from flatout.engine.loop import Loop, LoopConfig, StoppedAfter
    from flatout.engine.optim import AdamW, MovingAverage, make_optimizer, parameters_of
    from flatout.engine.reproducible import differences, environment, seed_all, set_determinism, warn_of_waiting_threads
    from flatout.engine.step import DTYPES, Amp, default_amp, has_native_bf16
    from flatout.engine.step_hash import HashedStep, hash_inputs

__getattr__, __dir__ = face(__name__)
