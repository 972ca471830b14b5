"""Launch both sides of the `DataParallel` parity test and read what they wrote.

A run writes named arrays. Of every step, stacked:

- `losses`, before the update; `outputs`, gathered, and `hidden`, what enters the ReLU,
  both with the rows of all steps one after the other;
- `gradients/NAME`, the sum over replicas, and `after/NAME`, parameters and buffers
  after the step.

Of the first step alone: `sizes` of the slices; `replicas/NAME`, the gradient of each
replica before the sum; in JAX also `apply/...`, from `jax.value_and_grad` through a
call. And `predicted/before` and `predicted/after` the training: the outputs for the
first batch, with BatchNorm's running statistics.
"""

import concurrent.futures
import functools
import tempfile
from pathlib import Path

from tests.torch_reference import files, reference
from tests.torch_reference import replicated_problem as problem

Runs = dict[problem.Run, problem.Arrays]


def run_reference(run: problem.Run) -> problem.Arrays:
    """Return what `run` produced; all runs happen once per test process.

    Raises:
        KeyError: if it is not one of `problem.all_runs()`.
        RuntimeError: if its process fails; the message holds its stderr.
    """
    result = _launches()[_process(run)]
    if isinstance(result, RuntimeError):
        raise result.with_traceback(None)
    return result[run]


def _process(run: problem.Run) -> tuple[str, str]:
    """Name the process of a run: one for torch, one per dtype for JAX."""
    return run.library, "" if run.library == "torch" else run.dtype


@functools.cache
def _launches() -> dict[tuple[str, str], Runs | RuntimeError]:
    """Run everything, process beside process; what they made, or why they failed."""
    names = list(dict.fromkeys(map(_process, problem.all_runs())))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(names, pool.map(_launch, names), strict=True))


def _launch(name: tuple[str, str]) -> Runs | RuntimeError:
    """Run everything of one process."""
    library, dtype = name
    environment = reference.environment(library, dtype)
    with tempfile.TemporaryDirectory() as folder:
        module = f"tests.torch_reference.replicated_{library}"
        command = [module, folder, *filter(None, [dtype])]
        try:
            # They share the cores, so each may take as long as all together.
            reference.run(command, environment, Path(folder), 2 * reference.TIMEOUT_S)
        except RuntimeError as error:
            return error
        return {
            run: files.read_arrays(Path(folder), run)
            for run in problem.all_runs()
            if _process(run) == name
        }
