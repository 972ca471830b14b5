"""Launch both sides of the parameter server parity test and read what they wrote.

A job writes named arrays, in JAX layout:

- `losses`, of every step: the global mean loss where the gradient was computed;
- `params/NAME`, after every step, as a worker sees them;
- `flushed/NAME`, of every worker (in JAX of every device), after the gradients that
  were still in flight have been applied.
"""

from tests.torch_reference import reference
from tests.torch_reference import server_problem as problem


def run_reference(job: problem.Job) -> problem.Arrays:
    """Return what `job` produced; see `reference.arrays_of`."""
    return reference.arrays_of(job, "server", tuple(problem.all_jobs()))
