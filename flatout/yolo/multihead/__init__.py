"""Several heads on one backbone (1B4H): which classes share one, the layer, its maps and its loss.

docs/multihead.md explains them.

Files:

    head_config  Which head of a network answers for which classes: the head configuration of 1B4H, read and checked
    joined_maps  Several heads as one
    layer        Several heads on one backbone (1B4H), with or without attention
    router       The loss of a network with several heads: all of them in one assignment and one pass over the maps
    training     Several heads in a training: which classes each has, and how its mosaics are turned
    grouping/    Which classes should share a head? Four answers
"""
