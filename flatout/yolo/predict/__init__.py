"""Detection in images, videos and streams: `detect.py`, and prediction in Python.

    source -> frames, prefetched by threads -> network, NMS, batch by batch -> results in order
           -> plotted and written by threads

Nothing is imported here, so that `--help` answers at once; start reading with `flatout.yolo.predict.detect`.

Files:

    detect    `detect.py`: weights and a source in; images, videos, labels, crops and JSON in a run folder out
    exported  Prediction with an exported network in any runtime: `flatout.yolo.predict_with`
    files     What `--source` means; images and videos in files, frame by frame
    given     Sources given in Python: paths, arrays, PIL images, tensors, bytes, a camera, and lists of them, as frames
    options   Options of a prediction and of `detect.py`: one field per flag, under the flag's own name
    outputs   Files made from results: images and videos with boxes, label files, crops, JSON
    result    The detections of one image: arrays, plots, conversions for other tools, and a line for the log
    results   Frames in, results out, in order: threads read and prepare frames while the network runs
    streams   Cameras and streams: a thread reads each, keeps its newest frame, and reconnects
    threads   Threads around the network: prefetching calls, and a write queue
    tracks    Tracking: objects get ids that stay the same from frame to frame, by ByteTrack of the package `trackers`
    windows   Results on the screen: windows of `--view-img`, and one image in a window or a notebook
"""
