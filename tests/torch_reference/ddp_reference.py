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

from tests.torch_reference import ddp_jobs, reference
from tests.torch_reference.ddp_problem import Arrays, Job


def run_reference(job: Job) -> Arrays:
    """Return what `job` produced; see `reference.arrays_of`."""
    return reference.arrays_of(job, "ddp", tuple(ddp_jobs.all_jobs()))
