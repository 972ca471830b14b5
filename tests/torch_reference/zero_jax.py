"""`jaxdp.Zero` on the same jobs: `python -m tests.torch_reference.zero_jax DIRECTORY`.

Optimizers are optax's own; `clip_as_torch` differs from `optax.clip_by_global_norm` in
the epsilon that torch adds to the norm.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from tests.torch_reference import files, jax_side, layout
from tests.torch_reference import zero_problem as problem


def main(directory: Path) -> None:
    """Run every JAX job."""
    for job in problem.all_jobs():
        if job.library == "jax":
            files.write_arrays(directory, job, train(job))


def train(job: problem.Job) -> problem.Arrays:
    """Train through the public API; return what `zero_reference` says."""
    data = job.data()
    program = jaxdp.data_parallel(
        jax_side.LOSSES[job.model],
        make_optimizer(job),
        jaxdp.data_mesh(job.world_size),
        # Of 8 float64: one bucket does not hold everything.
        design=jaxdp.Zero(job.stage, bucket_cap_mb=64 / 2**20),
    )
    state = program.init(layout.nest(data.params))
    params, losses = [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        batch = {"inputs": inputs, "targets": targets}
        state, metrics = program.step(state, batch)
        params.append(jax_side.host_params(program.params(state)))
        losses.append(np.array(metrics["loss"]))
    made = {
        f"params/{name}": np.stack([step[name] for step in params])
        for name in params[0]
    }
    final = jax_side.device_params(program.params(state))
    made |= {f"final/{name}": np.stack([f[name] for f in final]) for name in params[0]}
    return made | {"losses": np.stack(losses), "held": held(job, state.opt_state)}


def make_optimizer(job: problem.Job) -> optax.GradientTransformation:
    """Build Adam behind a clip by the global norm."""
    clip = {"torch": clip_as_torch, "optax": optax.clip_by_global_norm}[job.clip]
    return optax.chain(clip(problem.MAX_NORM[job.model]), optax.adam(**problem.ADAM))


def clip_as_torch(max_norm: float) -> optax.GradientTransformation:
    """Scale as `torch.nn.utils.clip_grad_norm_` does."""

    def scale(updates, params=None):
        del params
        norm = optax.global_norm(updates)
        factor = jnp.minimum(max_norm / (norm + problem.TORCH_CLIP_EPSILON), 1.0)
        return jax.tree.map(lambda update: update * factor, updates)

    return optax.stateless(scale)


def held(job: problem.Job, opt_state) -> np.ndarray:
    """Count the elements of Adam's moments on each device, `[N]`."""
    arrays = [each for each in jax.tree.leaves(opt_state) if each.ndim]
    counts = [
        sum(array.addressable_shards[rank].data.size for array in arrays)
        for rank in range(job.world_size)
    ]
    return np.array(counts)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
