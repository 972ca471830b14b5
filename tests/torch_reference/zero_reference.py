"""Launch both sides of the ZeRO parity test, beside each other; read what they wrote.

A job writes named arrays, in JAX layout:

- `losses`, of every step: the global mean loss before the update;
- `params/NAME`, whole, after every step;
- `final/NAME`, `[N, ...]`, the last of them as each rank or device has gathered it;
- `held`, `[N]`, how many elements of Adam's two moments each rank or device holds;
- in torch `norms`, of every step: the gradient's global norm before it was clipped.
"""

import concurrent.futures
import functools
import tempfile
from pathlib import Path

from tests.torch_reference import files, reference
from tests.torch_reference import zero_problem as problem

Made = dict[problem.Job, problem.Arrays]


def run_reference(job: problem.Job) -> problem.Arrays:
    """Return what `job` produced; all jobs run once per test process.

    Raises:
        KeyError: if it is not one of `zero_problem.all_jobs()`.
        RuntimeError: if a process fails; the message holds its stderr.
    """
    result = _launches()[job.library]
    if isinstance(result, RuntimeError):
        raise result.with_traceback(None)
    return result[job]


@functools.cache
def _launches() -> dict[str, Made | RuntimeError]:
    """Run everything; what the libraries made, or why they failed."""
    libraries = ("torch", "jax")
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(libraries, pool.map(_launch, libraries), strict=True))


def _launch(library: str) -> Made | RuntimeError:
    """Run all jobs of one library."""
    jobs = [job for job in problem.all_jobs() if job.library == library]
    environment = reference.environment(library, "float64")
    with tempfile.TemporaryDirectory() as folder:
        module = f"tests.torch_reference.zero_{library}"
        try:
            reference.run_workers([[module, folder]], environment, Path(folder))
        except RuntimeError as error:
            return error
        return {job: files.read_arrays(Path(folder), job) for job in jobs}
