"""Evaluation of a network: heat maps of whole images, and scores computed from them.

Files:

    blobs           Blobs: connected components of a heat map at a threshold, compared with labelled defects
    evaluate        Evaluates a way to heat maps on whole images: compared with masks, or with boxes
    maps            Heat maps of many images: read ahead in threads, mapped in batches, finished in threads
    network         A trained network, rewritten for prediction: the same function in fewer operations
    network_triton  Kernels of the rewritten network, for channels_last maps: each value is read and written once
    scores          Scores of an evaluation: pixel and image ranking, detections, recall
    sweep           Mean probability of painted defects, by amplitude and by the planes they are in
"""
