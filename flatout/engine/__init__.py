"""Training that any job can use; it knows no boxes, defects or spikes."""
