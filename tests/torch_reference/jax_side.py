"""jaxdp on the same jobs: `python -m tests.torch_reference.jax_side DIRECTORY`.

A process of its own, because float64 is a switch of the whole process
(`JAX_ENABLE_X64`) and the number of devices is fixed at start-up
(`JAX_NUM_CPU_DEVICES`). The design `single` is a plain optax loop without jaxdp.
"""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from tests.torch_reference import files, layout, problem


def mlp_loss(params, batch) -> jax.Array:
    """Mean squared error of two linear layers with tanh between them."""
    hidden = jnp.tanh(linear(params["hidden"], batch["inputs"]))
    return jnp.mean((linear(params["out"], hidden) - batch["targets"]) ** 2)


def tiny_net_loss(params, batch) -> jax.Array:
    """Mean cross-entropy of convolution, ReLU, global average pool and linear."""
    features = jax.lax.conv_general_dilated(
        batch["inputs"],
        params["conv"]["kernel"],
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    active = jax.nn.relu(features + params["conv"]["bias"][None, None, None])
    logits = linear(params["linear"], active.mean(axis=(1, 2)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return losses.mean()


def linear(params, inputs: jax.Array) -> jax.Array:
    return inputs @ params["kernel"] + params["bias"][None]


LOSSES = {"mlp": mlp_loss, "tiny_net": tiny_net_loss}


def main(directory: Path) -> None:
    """Run every job of `directory`."""
    for job in files.read_jobs(directory):
        data = files.read_inputs(directory, job)
        train = train_single if job.design == "single" else train_data_parallel
        params, losses, final = train(job, data)
        if len(final) != job.world_size:
            raise RuntimeError(
                f"{job}: train.params(state) lies on {len(final)} devices, but the "
                f"mesh has {job.world_size}. Every device must hold the parameters."
            )
        files.write_trajectory(directory, job, params, losses)
        for rank, worker_params in enumerate(final):
            files.write_final(directory, job, rank, worker_params)


def make_optimizer(job: problem.Job) -> optax.GradientTransformation:
    """Build SGD with momentum or Adam with the job's hyper-parameters."""
    make = {"sgd": optax.sgd, "adam": optax.adam}[job.optimizer]
    return make(**problem.HYPER_PARAMETERS[job.optimizer])


def train_data_parallel(job: problem.Job, data: problem.Inputs):
    """Train through the public API; return params, losses, last params per device."""
    mesh = jaxdp.data_mesh(job.world_size)
    train = jaxdp.data_parallel(
        LOSSES[job.model],
        make_optimizer(job),
        mesh,
        design=getattr(jaxdp, job.design)(),
    )
    state = train.init(layout.nest(data.params))
    params, losses = [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        batch = jaxdp.shard_batch({"inputs": inputs, "targets": targets}, mesh)
        state, metrics = train.step(state, batch)
        params.append(host_params(train.params(state)))
        losses.append(metrics["loss"].item())
    return params, losses, device_params(train.params(state))


def train_single(job: problem.Job, data: problem.Inputs):
    """Train on one device, without jaxdp; return the same."""
    optimizer = make_optimizer(job)

    @jax.jit
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(LOSSES[job.model])(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    tree = layout.nest(data.params)
    opt_state = optimizer.init(jax.tree.map(jnp.asarray, tree))
    params, losses = [], []
    for inputs, targets in zip(data.inputs, data.targets, strict=True):
        batch = {"inputs": inputs, "targets": targets}
        tree, opt_state, loss = step(tree, opt_state, batch)
        params.append(host_params(tree))
        losses.append(loss.item())
    return params, losses, [params[-1]]


def flatten(tree) -> dict[str, jax.Array]:
    """Return `{"conv/kernel": ...}` for `{"conv": {"kernel": ...}}`."""
    return {
        f"{layer}/{leaf}": array
        for layer, leaves in tree.items()
        for leaf, array in leaves.items()
    }


def host_params(tree) -> dict[str, np.ndarray]:
    """Copy the parameters to NumPy under flat names."""
    return {name: np.array(array) for name, array in flatten(tree).items()}


def device_params(tree) -> list[dict[str, np.ndarray]]:
    """Return what each device holds, in the order of the devices."""
    copies = {
        name: [
            np.array(shard.data)
            for shard in sorted(array.addressable_shards, key=lambda s: s.device.id)
        ]
        for name, array in flatten(tree).items()
    }
    return [
        dict(zip(copies, leaves, strict=True))
        for leaves in zip(*copies.values(), strict=True)
    ]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
