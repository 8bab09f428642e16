"""Wrong labels, found by comparing them with what networks detect: `flatout yolo audit`.

weights, images -> passes -> fused detections; labels -> evidence -> ranking -> audit.html, .csv, .json -> fix list

Files:

    audit       The audit: weights and a data set in; a ranked list of labels that are probably wrong out, as files
    config      What is audited, and how
    fixes       The fix list: what a person agreed to, and corrected copies of the label files
    in_step     What steps of a training see of each label, summed up on its device
    kernels     GPU kernels that add a step's targets to the sums per label
    page        audit.html: the worst findings on one page, with a box to tick for each
    passes      Passes of a network over an image set with a low threshold
    rank        From labels and detections to a ranked list of labels that are probably wrong
    records     The list as people and programs read it: every finding with its file, line, reason and fix
    set_boxes   Boxes of a whole image set: labels, detections of one pass, detections fused from several passes
    statistics  What the steps of a training saw of each label, over its epochs
"""
