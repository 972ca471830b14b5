"""The claims of two articles on data parallelism, and what became of each."""
