"""Several trainings as one job, each from the best weights of the one before: gradual unfreezing.

stages.yaml + flags -> Plan -> job folder -> train() per stage -> one table, one plot, one best.pt
"""

from flatout.yolo.stages.plan import Plan, read_plan
from flatout.yolo.stages.whole import StagesResult, run_stages

__all__ = ["Plan", "StagesResult", "read_plan", "run_stages"]
