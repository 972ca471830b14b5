"""Benchmarks: what explicit designs cost against the same programs written by hand."""
