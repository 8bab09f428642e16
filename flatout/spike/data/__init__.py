"""Clips of frames and spikes: from folders of files and `.dat` streams to the samples of a feed.

The format of a `.dat` file is decided by a table and never guessed:
size, content, settings --stream_layout--> Layout(T, H, W, packed or not, flipped or not) --decode--> spikes or counts

Files:

    clip_set         The clips of a split: which frames form each clip, and how every file is read
    decode           Decodes spikes from the bytes of a file; a crop is cut from the packed bytes before unpacking
    frames           Frames and spikes of a clip set as arrays, from files or from a store of decoded frames
    geometry         Width and height of spike frames: by name, or from a small file beside the spikes
    layouts          Decides how the spike files of a split are read: one decision for the whole split, which is logged
    precompute       Writes voxels as files: uint8 counts at spike resolution
    prepare          Arranges a data set as training expects it: blur, sharp and spike of every sequence side by side
    representations  Images from spikes: raw, TFP, TFI and voxels, as pure functions
    source           Sources of clips: cropped and flipped by workers, or as parameters for a GPU renderer
    stream_files     Opens spike streams: `.dat` files, and arrays of spikes in `.npz`, `.npy` and `.h5` files
    stream_layout    Decides the layout of a spike file from its size and content, by a table
    tree             Finds sequences on disk, and the frames of each that form a clip
    voxels           Voxels: how often each pixel fired in each bin of the exposure; and other spike representations
"""
