"""`DataParallel` on the same runs.

`python -m tests.torch_reference.replicated_jax DIRECTORY DTYPE`
"""

import functools
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxdp
from tests.torch_reference import files, jax_side, layout
from tests.torch_reference import replicated_problem as problem
from tests.torch_reference.problem import HYPER_PARAMETERS

Arrays = dict[str, np.ndarray]

BATCH_NORM: dict[str, Any] = {
    "momentum": problem.BATCH_NORM_MOMENTUM,
    "epsilon": problem.BATCH_NORM_EPSILON,
    "use_fast_variance": False,
}


def mlp(params, inputs: jax.Array) -> dict[str, jax.Array]:
    """Two linear layers with tanh between them."""
    hidden = jnp.tanh(jax_side.linear(params["hidden"], inputs))
    return {"outputs": jax_side.linear(params["out"], hidden)}


def head(hidden: jax.Array, linear: Any) -> dict[str, jax.Array]:
    """ReLU, average pool and linear."""
    pooled = nnx.avg_pool(nnx.relu(hidden), (2, 2), strides=(2, 2))
    return {"outputs": linear(pooled.reshape(len(pooled), -1)), "hidden": hidden}


class NnxNet(nnx.Module):
    """Convolution, BatchNorm if there is one, ReLU, average pool, linear."""

    def __init__(self, has_norm: bool, dtype: str):
        own: dict[str, Any] = {"param_dtype": dtype, "rngs": nnx.Rngs(0)}
        self.conv = nnx.Conv(2, 4, (3, 3), use_bias=not has_norm, **own)
        self.norm = nnx.BatchNorm(4, **BATCH_NORM, **own) if has_norm else None
        self.linear = nnx.Linear(36, 3, **own)

    def __call__(self, images, train: bool = True) -> dict[str, jax.Array]:
        hidden = self.conv(images)
        if self.norm is not None:
            hidden = self.norm(hidden, use_running_average=not train)
        return head(hidden, self.linear)


class LinenNet(nn.Module):
    """The same."""

    has_norm: bool
    param_dtype: str

    def setup(self):
        own: dict[str, Any] = {"param_dtype": self.param_dtype}
        self.conv = nn.Conv(4, (3, 3), use_bias=not self.has_norm, **own)
        self.norm = nn.BatchNorm(**BATCH_NORM, **own) if self.has_norm else None
        self.linear = nn.Dense(3, **own)

    def __call__(self, images, train: bool = True) -> dict[str, jax.Array]:
        hidden = self.conv(images)
        if self.norm is not None:
            hidden = self.norm(hidden, use_running_average=not train)
        return head(hidden, self.linear)


def squared_error(output, targets: jax.Array):
    """Mean squared error, with its weight."""
    errors = (output["outputs"] - targets) ** 2
    return jaxdp.Mean(errors.sum(), errors.size), jaxdp.Aux(metrics=output)


def cross_entropy(output, targets: jax.Array):
    """Mean cross-entropy, as a bare scalar."""
    losses = optax.softmax_cross_entropy_with_integer_labels(output["outputs"], targets)
    return losses.mean(), jaxdp.Aux(metrics=output)


@functools.partial(jax.jit, static_argnums=0)
def mean_loss(model: str, output, targets: jax.Array) -> jax.Array:
    """Return the loss as a plain scalar."""
    loss, _ = LOSSES[model](output, targets)
    return loss.total / loss.weight if isinstance(loss, jaxdp.Mean) else loss


LOSSES = {"mlp": squared_error, "conv_net": cross_entropy, "norm_net": cross_entropy}


def main(directory: Path, dtype: str) -> None:
    """Run every JAX run of a dtype."""
    for run in problem.all_runs():
        if run.library == "jax" and run.dtype == dtype:
            files.write_arrays(directory, run, train(run, problem.make_data(run)))


def train(run: problem.Run, data: problem.Data) -> Arrays:
    """Train; return what every step produced, see `replicated_reference`."""
    model = make_model(run.design, run.model, run.dtype)
    step = model.train_step(LOSSES[run.model], make_optimizer(run.optimizer))
    state = step.init()
    made = through_apply(run, model, data) | through_step(step, state, data)
    made["predicted/before"] = predict(run, model, None, data)
    steps = []
    for inputs, targets in data.batches:
        state, metrics = step(state, inputs, targets)
        opt_state: Any = state.opt_state
        after = named("after/", state.params) | named("after/", state.model_state)
        arrays = {"losses": metrics.pop("loss")} | metrics | after
        arrays |= named("gradients/", opt_state[0])
        # Copies: the next step takes the state's memory.
        steps.append({name: np.array(each) for name, each in arrays.items()})
    made["predicted/after"] = predict(run, model, state, data)
    return made | problem.joined(steps)


def through_apply(
    run: problem.Run, model: jaxdp.DataParallel, data: problem.Data
) -> Arrays:
    """Call the model, and take the gradient through it, on the first batch."""
    inputs, targets = data.batches[0]
    state = model.model_state

    def loss_fn(params):
        made = model.apply(params, inputs, model_state=state)
        output, model_state = made if problem.HAS_BUFFERS[run.model] else (made, None)
        return mean_loss(run.model, output, targets), (output, model_state)

    made = jax.value_and_grad(loss_fn, has_aux=True)(model.params)
    (loss, (output, model_state)), gradients = made
    parts = jaxdp.replicated.scatter(inputs, model.devices)
    results = (
        {"apply/losses": loss, "sizes": [len(part) for part in parts]}
        | {f"apply/{name}": each for name, each in output.items()}
        | named("apply/gradients/", gradients)
        | named("apply/after/", model_state)
    )
    return {name: np.array(each) for name, each in results.items()}


def through_step(
    step: jaxdp.replicated.TrainStep, state: jaxdp.replicated.State, data: problem.Data
) -> Arrays:
    """Return the gradients of all replicas before their sum, for the first batch."""
    inputs, targets = data.batches[0]
    done = step.run(state, inputs, targets, {})
    weight = done.results["loss"].weight
    structure = jax.tree.structure(state.params)
    replicas = [
        named("replicas/", jax.tree.unflatten(structure, leaves))
        for leaves in done.gradients
    ]
    return {
        name: np.stack([replica[name] for replica in replicas])
        / np.array(1 if weight is None else weight, replicas[0][name].dtype)
        for name in replicas[0]
    }


def predict(
    run: problem.Run,
    model: jaxdp.DataParallel,
    state: jaxdp.replicated.State | None,
    data: problem.Data,
) -> np.ndarray:
    """Return outputs for the first batch, by the running statistics of BatchNorm.

    Without a state by calling the model, which holds the first one.
    """
    inputs, _ = data.batches[0]
    keywords: dict[str, Any] = {} if run.model == "mlp" else {"train": False}
    if state is None:
        output = model(inputs, **keywords)
    elif state.model_state is None:
        output = model.apply(state.params, inputs, **keywords)
    else:
        keywords["model_state"] = state.model_state
        output, _ = model.apply(state.params, inputs, **keywords)
    return np.array(output["outputs"])


@functools.cache
def make_model(design: str, name: str, dtype: str) -> jaxdp.DataParallel:
    """Build a model with the initial parameters and buffers, once for all its runs."""
    params, buffers = problem.make_state(name, dtype)
    params, buffers = layout.nest(params), layout.nest(buffers)
    has_norm = problem.HAS_BUFFERS[name]
    if design == "function":
        return jaxdp.DataParallel(mlp, params)
    if design == "linen":
        variables = {"params": params} | ({"batch_stats": buffers} if buffers else {})
        # The root is not device 0, and the outputs go elsewhere.
        where = {"device_ids": [2, 0, 3, 1], "output_device": 1}
        return jaxdp.replicated.from_linen(
            LinenNet(has_norm, dtype), variables, **where
        )
    module = NnxNet(has_norm, dtype)
    nnx.update(module, params, buffers)
    return jaxdp.replicated.from_nnx(module)


@functools.cache
def make_optimizer(name: str) -> optax.GradientTransformation:
    """Build an optimizer whose state begins with the gradient that it was given."""
    hyper = HYPER_PARAMETERS[name]
    recorder = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda updates, state, params=None: (updates, updates),
    )
    return optax.chain(recorder, {"sgd": optax.sgd, "adam": optax.adam}[name](**hyper))


def named(prefix: str, tree: Any) -> dict[str, Any]:
    """Return `{"conv/kernel": ...}`, under `prefix`, from either Flax."""
    tree = {} if tree is None else tree
    flat = jax_side.flatten(tree.get("batch_stats", tree))
    return {f"{prefix}{name}": each for name, each in flat.items()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
