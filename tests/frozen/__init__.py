"""What users see of the three jobs, written down in text files: help, callbacks, files of a run, closing lines."""
