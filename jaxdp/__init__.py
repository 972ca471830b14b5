"""Data-parallel designs as small, explicit JAX programs."""
