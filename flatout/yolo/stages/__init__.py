"""Training in stages: several trainings as one job, each from the best weights of the one before.

stages.yaml + flags -> StagePlan -> job folder -> train() per stage -> one table, one plot, one best.pt

Files:

    plan    The stages file: options that all stages share, and options of each
    stages  Running a job of stages: one training after another, continued where it was interrupted
"""

from flatout.yolo.stages.plan import StagePlan, read_plan
from flatout.yolo.stages.stages import StagesResult, run_stages

__all__ = ["StagePlan", "StagesResult", "read_plan", "run_stages"]
