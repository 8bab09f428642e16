"""Training runs, the same for every job: folder and lock, records, progress, budget, loggers, mirror, and the end.

Files:

    background   The background of a run: makes its plots in a thread, one after the other, while the training goes on
    budget       Time and cost of a training, over all processes that worked on it, and the budget that stops it
    command      The command `flatout JOB train`, the same for every job
    ends         Ends: the work after every epoch, and the end of a training with its callbacks, `--on-done` and run.log
    folder       Run folders: which run a command starts or continues, and the text files that a run appends to
    lock         The lock of a run folder, so that only one process trains in it at a time
    options      The options that every job has, and which changes of options allow a run to be continued
    preflight    Checks before a training starts: a usable GPU, enough disk space for its files, enough file descriptors
    profiled     Short trainings for `flatout profile`, of any job: measured for some steps in a temporary folder
    recipe       The interface between a job and a run: the job's `Recipe`, and the objects that are passed between them
    run          A training run from options to finished files, the same for every job and resumable at any time
    step_record  replay.jsonl of a run folder: how the input was made, and a hash of what the network saw in every step
    times        times.jsonl of a run folder: where the wall time of a run went, from the command to finished weights
    loggers/     Loggers: callbacks that send the numbers of a training to files or other programs
    mirror/      Copies of a run behind a URL, from which another machine can continue it: `--mirror s3://bucket/folder`
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.progress import StepProgress
    from flatout.runs.background import Background, BackgroundCall
    from flatout.runs.budget import Spending
    from flatout.runs.command import Given, TrainCommand
    from flatout.runs.ends import OnDone, reporting_end
    from flatout.runs.folder import (
        RunFolder,
        RunRequest,
        choose_run,
        finished_run,
        new_run_folder,
        numbered,
        read_record,
    )
    from flatout.runs.lock import Locked, RunLock
    from flatout.runs.loggers.choose import choose_loggers
    from flatout.runs.mirror.snapshot import read_position
    from flatout.runs.options import (
        CONFIG_NAME,
        Compile,
        Identity,
        RunOptions,
        check_mirror_url,
        config_of,
        flag_name,
        flat,
        from_environment,
        own_and_run_options,
        plain,
        too_small,
    )
    from flatout.runs.profiled import FILES, MANY_EPOCHS, Decoding, ProfiledTraining, Switch
    from flatout.runs.recipe import (
        ComputeSettings,
        DataFacts,
        EpochRecord,
        Model,
        Recipe,
        RunContext,
        RunResult,
        Seams,
        ValidationResult,
        write_options,
        write_yaml,
    )
    from flatout.runs.step_record import STEPS_NAME, RecordedSteps, read_steps
    from flatout.runs.times import ledger_lines, read_times

__getattr__, __dir__ = face(__name__)
