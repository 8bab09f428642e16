"""Spike streams: what a `.dat` file holds, decided by a table and never guessed, and how it is read.

size, content, wishes --layout--> Layout(T, H, W, packed or not, flipped or not) --decode--> spikes or counts
"""
