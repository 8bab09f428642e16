"""Clips of frames and spikes: from trees of files and `.dat` streams to the samples that a feed reads.

What a `.dat` file holds is decided by a table and never guessed:
size, content, wishes --stream_layout--> Layout(T, H, W, packed or not, flipped or not) --decode--> spikes or counts

Files:

    clip_set       A split, opened: which clips there are, and how every file of them is to be read
    decode         Spikes out of a file's bytes. A crop is cut from the packed bytes first, and only then unpacked
    frames         Frames and spikes of a clip set as arrays: from their files, or from a store that decoded them once
    layouts        How the spike files of a split are read: one decision for all of them, told to whoever trains
    precompute     Voxels as files, for those who want them
    prepare        The unified tree: blur, sharp and spike of every sequence side by side, as links or copies
    source         Clips for the feed, cropped and flipped by workers, or as numbers for frames that live on the GPU
    stream_layout  What does a spike file of this size and content hold? A decision table, pure
    tree           Sequences on disk by name, and which frames of them make a clip
    voxels         Voxels: how often each pixel fired in each of B bins of the exposure
"""
