"""Launch both sides of the parameter server parity test and read what they wrote.

A job writes named arrays, in JAX layout:

- `losses`, of every step: the global mean loss where the gradient was computed;
- `params/NAME`, after every step, as a worker sees them;
- `flushed/NAME`, of every worker (in JAX of every device), after the gradients that
  were still in flight have been applied.
"""

import functools
import tempfile
from pathlib import Path

from tests.torch_reference import files, reference
from tests.torch_reference import server_problem as problem


def run_reference(job: problem.Job) -> problem.Arrays:
    """Return what `job` produced; all jobs of a library run once per test process.

    Raises:
        KeyError: if it is not one of `problem.all_jobs()`.
        RuntimeError: if a process fails; the message holds its stderr.
    """
    result = _launch(job.library)
    if isinstance(result, RuntimeError):
        raise result.with_traceback(None)
    return result[job]


@functools.cache
def _launch(library: str) -> dict[problem.Job, problem.Arrays] | RuntimeError:
    """Run all jobs of one library; return what they made, or why it failed."""
    jobs = [job for job in problem.all_jobs() if job.library == library]
    environment = reference.environment(library, "float64")
    with tempfile.TemporaryDirectory() as folder:
        module = f"tests.torch_reference.server_{library}"
        try:
            reference.run_workers([[module, folder]], environment, Path(folder))
        except RuntimeError as error:
            return error
        return {job: files.read_arrays(Path(folder), job) for job in jobs}
