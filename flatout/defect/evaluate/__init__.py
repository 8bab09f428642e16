"""Evaluation of a network: heat maps of whole images, and scores computed from them.

Files:

    blobs     Blobs: connected components of a heat map at a threshold, compared with labelled defects
    evaluate  Evaluates a network on whole images: heat maps against masks, one image at a time
    maps      Heat maps: the patches of an image as one batch, stitched so that every pixel comes from exactly one patch
    scores    Scores of an evaluation: pixel and image ranking, detections, recall
    sweep     Mean probability of painted defects, by amplitude and by the planes they are in
"""
