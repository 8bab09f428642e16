"""Benchmarks, one question per file; see README.md."""
