"""Checks one GPU in under five minutes: does it compute right, how fast, as predicted?

    python -m experiments.gpu_check [--platform auto|cpu|gpu] [--tiny]

Needs jax, flax, optax and numpy, and no network. Into `results/gpu-check/result.json`
go: rates of matrix products and of memory; the step time of every design on one device
beside the same step in plain JAX; step times predicted from the compiled programs, with
the data sheet's figures and with the rates just measured, beside those measured; and,
where pytest is installed, the tests that need no accelerator.
"""
