"""What a trained network finds in pictures, videos and streams: the whole of `detect.py`, and prediction in Python.

    source -> frames, read ahead by threads -> network, NMS, batch by batch -> results in order
           -> drawn and written behind by threads

Nothing is imported here, because help must answer at once; begin with `flatout.yolo.predict.detect`.

Files:

    detect   The whole of `detect.py`
    files    What `--source` means, and pictures and videos in files, one frame after the other
    options  How to detect, and what else `detect.py` was asked to do: one field per flag, under the flag's own name
    outputs  Everything that is written about results: pictures and videos with boxes, label files, crops, JSON
    result   What was found in one picture: plain arrays, the forms that other tools read, and a line for people
    results  Frames in, results out, in order: reading and preparing happens in threads while the network works
    streams  One camera or stream: a thread that reads it, keeps its newest frame, and mends lost connections
    threads  Threads around the network: reading ahead of it, and writing behind it
"""
