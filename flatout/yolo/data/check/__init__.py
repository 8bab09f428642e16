"""flatout yolo check: look at every file of a data set and say what would spoil a training."""
