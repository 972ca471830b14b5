"""jaxdp on the same jobs: `python -m tests.torch_reference.ddp_jax DIRECTORY`.

Models have torch's layout: a linear layer is `x @ weight.T`.
"""

import sys
from pathlib import Path
from typing import Any

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxdp
from jaxdp import compression
from jaxdp.batch_norm import BatchNorm
from jaxdp.data import PaddedBatch
from tests.torch_reference import ddp_jobs, files, jax_side
from tests.torch_reference import ddp_problem as problem

AXIS_NAME = "data"


def main(directory: Path) -> None:
    """Run every JAX job."""
    for job in ddp_jobs.all_jobs():
        if job.library == "jax":
            with jax.enable_x64(job.dtype == "float64"):
                made = train(job, problem.make_data(job))
            files.write_arrays(directory, job, made)


def train(job: problem.Job, data: problem.Data) -> problem.Arrays:
    """Train through the public API; return what `ddp_reference` says."""
    mesh = jaxdp.data_mesh(job.world_size, AXIS_NAME)
    program = jaxdp.data_parallel(
        make_loss(job),
        jax_side.make_optimizer(job),
        mesh,
        design=make_design(job),
        accumulate=job.accumulate,
        model_state=None if job.buffers == "synchronized" else job.buffers or None,
        precision=make_precision(job),
    )
    state = program.init(data.params, model_state=first_buffers(job))
    batches = [make_batch(job, data, step) for step in range(problem.NUM_STEPS)]
    buckets = program.buckets(state, batches[0])
    steps = []
    for batch in batches:
        state, metrics = program.step(state, batch)
        steps.append(observe(job, state, metrics, program.params(state)))
    made = {name: np.stack([each[name] for each in steps]) for name in steps[0]}
    for name in made:
        if name.startswith(("buffers/", "replicas/")):
            made[name] = made[name].swapaxes(0, 1)  # [N, NUM_STEPS, ...]
    for name, array in program.params(state).items():
        made[f"final/{name}"] = on_devices(array)
    made["bucket_bytes"] = np.array([bucket.nbytes for bucket in buckets])
    return made


def make_design(job: problem.Job) -> jaxdp.Design:
    """Build the design, with the communication hook of the job."""
    options: dict[str, Any] = {"bucket_cap_mb": job.bucket_cap_mb}
    if job.sync_every:
        options |= {"sync_every": job.sync_every, "start_step": problem.START_STEP}
    if job.compression == "bf16":
        options["compression"] = compression.Bf16()
    elif job.compression == "powersgd":
        options["compression"] = SeededPowerSGD(
            rank=job.power_rank,
            start_step=problem.START_STEP,
            error_feedback=job.error_feedback,
        )
    return getattr(jaxdp, job.design)(**options)


class SeededPowerSGD(compression.PowerSGD):
    """PowerSGD that begins with the matrices of the torch side."""

    def seed_matrix(self, shape, dtype):
        return jnp.asarray(problem.power_seed(*shape), dtype)


def make_precision(job: problem.Job) -> jaxdp.Precision | None:
    """Build the loss scale of the job, if it has one."""
    if not job.compute:
        return None
    options = dict(problem.LOSS_SCALE)
    initial_scale = options.pop("init_scale")
    return jaxdp.Precision(
        job.compute, loss_scale="dynamic", initial_scale=initial_scale, **options
    )


def make_batch(job: problem.Job, data: problem.Data, step: int):
    """Return the rows of one step; with a mask if some replicas have fewer."""
    batch = {"inputs": data.inputs[step], "targets": data.targets[step]}
    if job.rows == "tokens":
        return batch | {"weights": data.weights[step]}
    if job.rows == "even":
        return batch
    return PaddedBatch(batch, data.weights[step] > 0)


def make_loss(job: problem.Job):
    """Build the loss function of a job: what its rows average to."""

    def loss_fn(params, batch, model_state=None, mask=None):
        outputs = batch["inputs"]
        if job.model == "mlp":
            outputs = jnp.tanh(linear(params, "first", outputs))
            outputs = jnp.tanh(linear(params, "second", outputs))
        else:
            outputs = linear(params, "first", outputs)
            outputs, model_state = normalize(job, params, outputs, model_state, mask)
            outputs = jnp.tanh(outputs)
        outputs = linear(params, "third", outputs).astype(job.dtype)
        losses = jnp.square(outputs - batch["targets"]).mean(axis=1)
        return mean_of(job, losses, batch, mask), jaxdp.Aux(model_state=model_state)

    return loss_fn


def linear(params, name: str, inputs: jax.Array) -> jax.Array:
    outputs = inputs @ params[f"{name}.weight"].T
    return outputs + params[f"{name}.bias"] if f"{name}.bias" in params else outputs


def mean_of(job: problem.Job, losses: jax.Array, batch, mask):
    """Average the losses of rows, as the job says."""
    if job.rows == "tokens":
        weights = batch["weights"]
        return jaxdp.Mean(jnp.sum(losses * weights), jnp.sum(weights))
    if mask is None:
        return losses.mean()
    mean = jaxdp.masked_mean(losses, mask)
    return mean._replace(weight=len(mask)) if job.rows == "join_slots" else mean


def normalize(job: problem.Job, params, inputs: jax.Array, old, mask):
    """Return normalized inputs and the next buffers, whose variance is unbiased."""
    scale, bias = params["norm.weight"], params["norm.bias"]
    count = jnp.asarray(len(inputs))
    if job.buffers != "synchronized":
        mean, var = inputs.mean(axis=0), inputs.var(axis=0)
        outputs = (inputs - mean) / jnp.sqrt(var + problem.BATCH_NORM_EPSILON)
        outputs = outputs * scale + bias
    else:
        by = by_flax if mask is None else by_jaxdp
        outputs, mean, var = by(scale, bias, inputs, mask)
        count = jax.lax.psum(count if mask is None else mask.sum(), AXIS_NAME)
    momentum = problem.BATCH_NORM_MOMENTUM
    return outputs, {
        "norm.running_mean": (1 - momentum) * old["norm.running_mean"]
        + momentum * mean,
        "norm.running_var": (1 - momentum) * old["norm.running_var"]
        + momentum * var * count / (count - 1),
        "norm.num_batches_tracked": old["norm.num_batches_tracked"] + 1,
    }


# So that of the running statistics only those of this batch are left.
NORM_OPTIONS: dict[str, Any] = {
    "use_running_average": False,
    "momentum": 0.0,
    "epsilon": problem.BATCH_NORM_EPSILON,
    "axis_name": AXIS_NAME,
}


def by_flax(scale: jax.Array, bias: jax.Array, inputs: jax.Array, mask):
    """Return what Flax's BatchNorm makes of the inputs, and its mean and variance."""
    del mask
    variables = {
        "params": {"scale": scale, "bias": bias},
        "batch_stats": {"mean": jnp.zeros(16), "var": jnp.ones(16)},
    }
    norm = flax.linen.BatchNorm(**NORM_OPTIONS)
    outputs, made = norm.apply(variables, inputs, mutable=["batch_stats"])
    mean, var = jax.tree.leaves(made)  # in the order of their names
    return outputs, mean, var


def by_jaxdp(scale: jax.Array, bias: jax.Array, inputs: jax.Array, mask):
    """Return the same of jaxdp's, for replicas with different numbers of rows."""
    norm = BatchNorm(16, **NORM_OPTIONS, rngs=nnx.Rngs(0))
    norm.scale, norm.bias = nnx.Param(scale), nnx.Param(bias)
    # Flax would keep them in 32 bits.
    norm.mean, norm.var = nnx.BatchStat(jnp.zeros(16)), nnx.BatchStat(jnp.ones(16))
    return norm(inputs, mask=mask), norm.mean[...], norm.var[...]


def first_buffers(job: problem.Job):
    """Return what torch's BatchNorm begins with; None if the model has none."""
    if job.model != "norm_net":
        return None
    return {
        "norm.running_mean": jnp.zeros(16),
        "norm.running_var": jnp.ones(16),
        "norm.num_batches_tracked": jnp.zeros((), int),
    }


def observe(job: problem.Job, state, metrics, params) -> problem.Arrays:
    """Copy what a step made; what may differ between devices from all, `[N, ...]`."""
    made = {"losses": metrics["loss"]}
    made |= {f"params/{name}": array for name, array in params.items()}
    if job.compute:
        made["scales"] = metrics["loss_scale"]
        made["skipped"] = metrics["skipped"]
        made["good_steps"] = state.loss_scale.good_steps
    if job.sync_every:
        made |= {f"replicas/{name}": each for name, each in state.params.items()}
    for name, array in (state.model_state or {}).items():
        is_stacked = job.buffers == "per_replica"
        made[f"buffers/{name}"] = array if is_stacked else on_devices(array)
    return {name: np.array(array) for name, array in made.items()}


def on_devices(array: jax.Array) -> np.ndarray:
    """Return what every device holds, `[N, ...]`, in the order of the devices."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return np.stack([np.array(shard.data) for shard in shards])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
