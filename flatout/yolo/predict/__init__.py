"""What a trained network finds in pictures, videos and streams: the whole of `detect.py`, and prediction in Python.

    source -> frames, read ahead by threads -> network, NMS, batch by batch -> results in order
           -> drawn and written behind by threads

Nothing is imported here, because help must answer at once; begin with `flatout.yolo.predict.whole`.
"""
