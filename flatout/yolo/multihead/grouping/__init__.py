"""Which classes should share a head? Four answers, from names, boxes, or what a trained network mixes up.

data YAML, COCO file, confusion matrix -> Source -> standard, geometry, hybrid, anticonfusion -> Grouping -> YAML, PNG

NumPy only: no torch, and the picture is the one part that needs OpenCV.

Files:

    chart       A grouping as a picture
    choose      From a source and a method to heads: what `flatout yolo group` does, before anything is written
    methods     Classes whose boxes have like proportions share a head
    statistics  What grouping looks at
"""
