"""Every quirk of YOLOv7 that its users bring along: old flags, old YAML, old pickles."""
