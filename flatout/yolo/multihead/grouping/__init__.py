"""Groups of classes for the heads of a network, from names, boxes or a confusion matrix.

    data YAML, COCO file, confusion matrix -> Source -> one of four methods -> Grouping -> YAML, PNG

NumPy only: no torch, and only the chart needs OpenCV.

Files:

    chart       The chart of a grouping: a column of class names per head
    choose      The grouping of a source by a method, and its head configuration file: `flatout yolo group`
    methods     The four methods of grouping, and their clustering algorithms
    statistics  Statistics of classes for grouping: number and shape of boxes, co-occurrence in images; and the result
"""
