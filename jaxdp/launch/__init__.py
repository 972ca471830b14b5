"""Starts processes on this machine: `python -m jaxdp.launch -n 4 script.py ...`.

Each process learns from its environment who it is, and `jaxdp.initialize()` reads that:
its rank, which here is `jax.process_index()` and no rank of a mesh, how many processes
there are, and the address of the coordinator, which is rank 0. A process that fails
ends them all, and the launcher says which one failed first. Nothing is left running:
not after an interrupt, and not if the launcher itself is killed.

Nothing in here uses JAX. It is the launcher's job to work when JAX does not.

Its modules:

    environment       what each process is told
    attempts, group   starting all, waiting, ending and restarting them
    output, report    their lines by rank; who failed first
    sweep             killing what is left, also without a launcher
"""
