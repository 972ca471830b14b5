"""jaxdp on the same jobs: `python -m tests.torch_reference.server_jax DIRECTORY`."""

import sys
from pathlib import Path

import jax
import numpy as np
import optax

import jaxdp
from tests.torch_reference import files, jax_side, layout
from tests.torch_reference import problem as parity_problem
from tests.torch_reference import server_problem as problem

OPTIMIZERS = {"sgd": optax.sgd, "momentum": optax.sgd, "adam": optax.adam}


def main(directory: Path) -> None:
    """Run every JAX job."""
    for job in problem.all_jobs():
        if job.library == "jax":
            with jax.enable_x64(job.dtype == "float64"):
                made = train(job, problem.make_data(job.dtype))
            files.write_arrays(directory, job, made)


def train(job: problem.Job, data: parity_problem.Inputs) -> problem.Arrays:
    """Train through the public API; return what `server_reference` says."""
    program = jaxdp.data_parallel(
        jax_side.LOSSES[job.model],
        OPTIMIZERS[job.optimizer](**problem.HYPER_PARAMETERS[job.optimizer]),
        jaxdp.data_mesh(job.world_size),
        design=jaxdp.ParameterServer(
            servers=job.servers,
            dedicated=job.dedicated,
            update_on=job.update_on,
            max_staleness=job.max_staleness,
            policy=job.policy,
        ),
    )
    state = program.init(layout.nest(data.params))
    params, losses = [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        batch = {"inputs": inputs, "targets": targets}
        state, metrics = program.step(state, batch)
        params.append(jax_side.host_params(program.params(state)))
        losses.append(np.array(metrics["loss"]))
    flushed = program.params(program.flush(state))
    return (
        {"losses": np.stack(losses)}
        | problem.stacked("params", params)
        | problem.stacked("flushed", jax_side.device_params(flushed))
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
