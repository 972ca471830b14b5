"""Launch both sides of the ZeRO parity test, beside each other; read what they wrote.

A job writes named arrays, in JAX layout:

- `losses`, of every step: the global mean loss before the update;
- `params/NAME`, whole, after every step;
- `final/NAME`, `[N, ...]`, the last of them as each rank or device has gathered it;
- `held`, `[N]`, how many elements of Adam's two moments each rank or device holds;
- in torch `norms`, of every step: the gradient's global norm before it was clipped.
"""

from tests.torch_reference import reference
from tests.torch_reference import zero_problem as problem


def run_reference(job: problem.Job) -> problem.Arrays:
    """Return what `job` produced; see `reference.arrays_of`."""
    return reference.arrays_of(job, "zero", tuple(problem.all_jobs()))
