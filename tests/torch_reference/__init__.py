"""PyTorch references that run as real processes over gloo.

`problem` says what is trained, `worker` trains it with torch (one process per rank),
`jax_side` trains it with jaxdp, and `reference` launches both and returns what every
step produced. Importing this package imports neither torch nor jax.
"""
