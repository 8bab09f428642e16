"""Which classes should share a head? Four answers, from names, boxes, or what a trained network mixes up.

data YAML, COCO file, confusion matrix -> Source -> standard, geometry, hybrid, anticonfusion -> Grouping -> YAML, PNG

NumPy only: no torch, and the picture is the one part that needs OpenCV.
"""
