"""Experiments: one question per file, run by `python -m experiments NAME`."""
