"""Several trainings as one job, each from the best weights of the one before: gradual unfreezing.

stages.yaml + flags -> Plan -> job folder -> train() per stage -> one table, one plot, one best.pt

Files:

    plan    The file of stages
    stages  All stages of a plan, one training after the other, continued wherever it was left
"""

from flatout.yolo.stages.plan import Plan, read_plan
from flatout.yolo.stages.stages import StagesResult, run_stages

__all__ = ["Plan", "StagesResult", "read_plan", "run_stages"]
