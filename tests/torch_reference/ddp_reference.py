"""Launch both sides of the DistributedDataParallel parity test, beside each other.

A job writes named arrays. Of every step, stacked, from the rank `Job.recorder`:

- `losses`, the mean over all rows of the step before the update, and `params/NAME`
  after it;
- with a loss scale `scales`, which the step used, `skipped`, and `good_steps` after it.

From every rank, `[N, ...]`:

- `buffers/NAME`, and with local SGD `replicas/NAME`, the parameters of each, after
  every step, `[N, NUM_STEPS, ...]`; `params/NAME` is then their mean;
- `final/NAME`, the parameters after the last one;
- in torch `gradients/NAME`, of the first step, where a hook is going to round them.

And `bucket_bytes`, how much travels together.
"""

import concurrent.futures
import functools
import tempfile
from pathlib import Path

from tests.torch_reference import ddp_jobs, files, reference
from tests.torch_reference.ddp_problem import Arrays, Job

Made = dict[Job, Arrays]


def run_reference(job: Job) -> Arrays:
    """Return what `job` produced; all jobs run once per test process.

    Raises:
        KeyError: if it is not one of `ddp_jobs.all_jobs()`.
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
    environment = reference.environment(library, "float64")
    with tempfile.TemporaryDirectory() as folder:
        module = f"tests.torch_reference.ddp_{library}"
        try:
            # They share the cores, so each may take as long as both together.
            reference.run_workers(
                [[module, folder]], environment, Path(folder), 2 * reference.TIMEOUT_S
            )
        except RuntimeError as error:
            return error
        return {
            job: files.read_arrays(Path(folder), job)
            for job in ddp_jobs.all_jobs()
            if job.library == library
        }
