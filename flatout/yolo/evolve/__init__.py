"""`--evolve`: better hyper-parameters by mutation and selection, one whole training per generation.

best rows of evolve.txt -> parent -> mutated values -> training -> scores -> next row of evolve.txt

Files:

    search  The whole of `--evolve`
"""

from flatout.yolo.evolve.search import EvolveResult, evolve

__all__ = ["EvolveResult", "evolve"]
