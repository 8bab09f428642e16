"""Pictures of a run: batches with their boxes, curves, the confusion matrix, label statistics. OpenCV and NumPy only.

batch, labels, evaluation, results.txt -> a file that people look at
"""
