"""Several heads on one backbone (1B4H): the groups of classes, the layer, its maps and its loss (docs/multihead.md).

Files:

    head_config  The head configuration of 1B4H: which head predicts which classes, and the channels of a joined map
    joined_maps  Joined maps of several heads, processed as if every head were an image of its own
    layer        Detection layers with several heads (1B4H), with or without attention
    router       The loss of a network with several heads, in one assignment and one pass over the maps
    training     Options of a training with several heads: their classes, and augmentation per head
    grouping/    Groups of classes for the heads of a network, from names, boxes or a confusion matrix
"""
