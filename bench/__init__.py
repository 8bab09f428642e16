"""One question per file; see README.md."""
