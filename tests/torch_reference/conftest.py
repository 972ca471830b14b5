"""Keep the doctest collector from importing torch into the test process."""

collect_ignore = [
    "ddp_hooks.py",
    "ddp_jax.py",
    "ddp_torch.py",
    "group.py",
    "jax_side.py",
    "worker.py",
    "replicated_jax.py",
    "replicated_torch.py",
    "server_jax.py",
    "server_torch.py",
    "zero_jax.py",
    "zero_torch.py",
]
