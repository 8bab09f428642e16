"""Synthetic defects: drawn for whole batches first, then painted, with nothing left to chance in the painting."""
