"""Detection: YOLOv7's networks, loss, data and commands on flatout's engine."""
