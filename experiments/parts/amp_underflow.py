"""What float16 loses without a loss scale, and what a dynamic one keeps.

Eight sigmoid layers on top of each other: the gradient shrinks from layer to layer, the
first one's is around 1e-7 in the beginning (Hochreiter 1991 named it: it vanishes).
Adam divides by the size of gradients, so that in float32 all layers learn. In float16
the first layers' gradients are zero, and what is zero stays.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from experiments.harness.result import Rows
from experiments.parts import digits
from experiments.parts.amp_training import unscaled_fp16
from jaxdp.precision import Precision

PyTree = Any
LAYERS, WIDTH, LEARNING_RATE = 8, 32, 1e-2
EXPONENTS = tuple(range(0, 25, 2))  # of loss scales
SCALED = "fp16, scaled"


def precisions(interval: int) -> dict[str, Precision]:
    """The runs: the dynamic scale grows after so many good steps."""
    scaled = Precision("fp16", loss_scale="dynamic", growth_interval=interval)
    return {
        "f32": Precision("f32"),
        "bf16": Precision("bf16"),
        "fp16": unscaled_fp16(),
        SCALED: scaled,
    }


class Run(NamedTuple):
    """What training saw, step by step, and the parameters it ended with."""

    losses: list[float]
    scales: list[float]  # none without a loss scale
    skipped: list[bool]
    params: PyTree


def init(seed: int) -> PyTree:
    """Parameters of the deep network: 11 x 32 x 32 numbers, more or less."""
    random = np.random.default_rng(seed)
    sizes = [64, *[WIDTH] * LAYERS, 10]
    return [
        {
            "w": random.standard_normal((m, n)).astype("f") / np.float32(np.sqrt(m)),
            "b": np.zeros(n, np.float32),
        }
        for m, n in itertools.pairwise(sizes)
    ]


def apply(params: PyTree, images: Any) -> jax.Array:
    """Images to logits."""
    x = images.reshape(images.shape[0], -1)
    for i, layer in enumerate(params):
        x = x @ layer["w"] + layer["b"][None]
        if i < LAYERS:
            x = jax.nn.sigmoid(x)
    return x


def loss_fn(params: PyTree, batch: digits.Batch) -> jax.Array:
    """The mean loss, averaged in float32."""
    images, labels = batch
    logits = apply(params, images).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return losses.mean()


def batches(
    data: digits.Batch, size: int, steps: int, seed: int
) -> Iterator[digits.Batch]:
    """So many batches, as many epochs as they take."""
    epochs = -(-steps // (len(data[1]) // size))
    for _, batch in zip(
        range(steps), digits.batches(data, size, epochs, seed), strict=False
    ):
        yield batch


def flushed(params: PyTree, batch: digits.Batch) -> Rows:
    """For each loss scale, how many elements of gradients float16 makes zero.

    Args:
        params: Of the network, as it starts.
        batch: Images and labels.

    Returns:
        A row for each loss scale: shares of the elements that are not zero in float32.
    """
    exact = jax.tree.map(np.asarray, _gradient(Precision("f32"))(params, batch, 1.0))
    half = _gradient(unscaled_fp16())
    rows = []
    for exponent in EXPONENTS:
        found = jax.tree.map(np.asarray, half(params, batch, 2.0**exponent))
        leaves = zip(jax.tree.leaves(exact), jax.tree.leaves(found), strict=True)
        lost = np.concatenate([(b == 0)[a != 0] for a, b in leaves])
        first = (found[0]["w"] == 0)[exact[0]["w"] != 0]
        finite = all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
        rows.append(
            {
                "loss scale": f"2^{exponent}",
                "all layers, zero (%)": 100 * float(lost.mean()),
                "first layer, zero (%)": 100 * float(first.mean()),
                "finite": finite,
            }
        )
    return rows


def _gradient(precision: Precision) -> Callable:
    """The gradient of a scaled loss; whether it is zero does not ask for the scale."""

    @jax.jit
    def gradient(params, batch, scale):
        def scaled(params):
            return loss_fn(*precision.to_compute((params, batch))) * scale

        return jax.grad(scaled)(params)

    return gradient


def train(
    precision: Precision, params: PyTree, data: list, mesh: Mesh, on_step: Any
) -> Run:
    """Trains in one precision."""
    optimizer = optax.adam(LEARNING_RATE)
    program = jaxdp.data_parallel(loss_fn, optimizer, mesh, precision=precision)
    state, run = program.init(params), Run([], [], [], None)
    for batch in data:
        state, metrics = program.step(state, jaxdp.shard_batch(batch, mesh))
        run.losses.append(float(metrics["loss"]))
        if "skipped" in metrics:
            run.scales.append(float(metrics["loss_scale"]))
            run.skipped.append(bool(metrics["skipped"]))
        on_step()
    return run._replace(params=jax.device_get(program.params(state)))


def compare(runs: dict[str, Run], test: digits.Batch) -> Rows:
    """What each run reached."""
    images, labels = test
    rows = []
    for name, run in runs.items():
        guesses = np.argmax(jax.jit(apply)(run.params, images), axis=-1)
        last = max(1, len(run.losses) // 10)
        rows.append(
            {
                "run": name,
                "first loss": run.losses[0],
                "loss, last tenth": float(np.mean(run.losses[-last:])),
                "test accuracy": float(np.mean(guesses == labels)),
                "skipped": sum(run.skipped),
                "lowest scale": min(run.scales, default=None),
                "highest scale": max(run.scales, default=None),
            }
        )
    return rows


def rule(run: Run, precision: Precision) -> list[float]:
    """The scales that PyTorch's rule gives for the steps that were skipped."""
    scale, good, found = precision.initial_scale, 0, []
    for skipped in run.skipped:
        found.append(scale)
        good = 0 if skipped else good + 1
        if skipped:
            scale = max(scale * precision.backoff_factor, precision.min_scale)
        elif good == precision.growth_interval:
            scale = min(scale * precision.growth_factor, precision.max_scale)
            good = 0
    return found
