"""The life of a training run: its folder and lock, records, progress, budget, loggers, mirror, and its end.

Files:

    budget     What a training costs
    command    `flatout JOB train`
    ends       After every epoch: validate, write the results down, keep the best, decide whether to go on
    folder     Where a run lives, and whether a command begins a new one or continues one
    lock       One training per run folder: a lock that says who holds it, and that no crash leaves behind
    options    What every training can be asked for, whatever it trains
    preflight  Before a training begins
    profiled   A training that is looked at for some steps and leaves nothing behind
    recipe     What a job hands to a run, and what it learns from it
    run        The life of a training run, the same for every job
    loggers/   Callbacks that pass a training's numbers on to other programs
    mirror/    Copies of a run elsewhere, so that a machine may be taken away: `--mirror s3://bucket/folder`
"""

from typing import TYPE_CHECKING

from flatout.lazy import face

if TYPE_CHECKING:
    from flatout.progress import StepProgress
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
    from flatout.runs.options import (
        Compile,
        Identity,
        RunOptions,
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
        CONFIG_NAME,
        ComputeSettings,
        DataFacts,
        EpochRecord,
        Model,
        Recipe,
        RunContext,
        RunResult,
        Seams,
        ValidationResult,
        write_yaml,
    )

__getattr__, __dir__ = face(__name__)
