"""The visible behaviour of the three jobs in text files: help, callbacks, files of a run, closing lines."""
