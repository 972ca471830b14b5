"""Losses trained in one program and on two streams; run as a script, compares bits.

As a script it prints, as JSON, for every problem what differs after three steps. It is
run where XLA has no instruction that rounds a product and a sum once: for which pairs
it uses one depends on what else is in the program. For the same reason no problem here
has a transpose between two segments: layouts of matrices depend on it, too.
"""

import itertools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxdp
import jaxdp.streams
from jaxdp.designs import Design

STEPS = 3


class Problem(NamedTuple):
    """A training; the defaults are those of most.

    Attributes:
        devices: Replicas.
        loss_fn: The loss.
        params: Its parameters.
        batch: `batch(step)`, rows for all replicas.
        cap_mb: Of a bucket: so small that there are several.
        key: Whether the loss takes `rng`.
        optimizer: Made of nothing.
        algorithm: Of the exchange.
        x64: Whether 64-bit types are on.
    """

    devices: int
    loss_fn: Callable[..., Any]
    params: Any
    batch: Callable[[int], Any]
    cap_mb: float
    key: bool = False
    optimizer: Callable[[], optax.GradientTransformation] = lambda: optax.adam(0.01)
    algorithm: str = "ring"
    x64: bool = False


def normal(seed: Any, *shape: int, dtype: Any = np.float32) -> np.ndarray:
    """Distinct numbers."""
    scale = 1 / np.sqrt(shape[0]) if len(shape) > 1 else 0.1
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


def layers(*sizes: int, dtype: Any = np.float32) -> list[dict[str, np.ndarray]]:
    """Parameters of dense layers."""
    return [
        {"w": normal(i, *pair, dtype=dtype), "b": normal([i, 1], pair[1], dtype=dtype)}
        for i, pair in enumerate(itertools.pairwise(sizes))
    ]


def rows(step: int, count: int, width: int, out: int, dtype: Any = np.float32) -> Any:
    """A batch."""
    return {
        "x": np.sqrt(count).astype(dtype)
        * normal([step, 2], count, width, dtype=dtype),
        "y": normal([step, 3], count, out, dtype=dtype),
    }


def dense(params: Any, x: jax.Array) -> jax.Array:
    """Layers with tanh between them."""
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return x


def mlp_loss(params, batch):
    return jnp.mean((dense(params, batch["x"]) - batch["y"]) ** 2)


def _weighted(params, batch, mask):
    error = jnp.mean((dense(params, batch["x"]) - batch["y"]) ** 2, axis=1)
    loss = jaxdp.masked_mean(error, mask)
    high = jaxdp.Mean(jnp.sum(jnp.where(mask, error > 0.5, 0)), mask.sum())
    return loss, jaxdp.Aux(metrics={"high": high, "error": error[0]})


def _padded(step: int):
    mesh = jaxdp.data_mesh(4)
    return jaxdp.shard_batch(rows(step, 13, 6, 3), mesh, remainder="pad")


def _convolution(params, batch):
    x = lax.conv(batch["x"], params["kernel"], (1, 1), "SAME")
    x = jax.nn.relu(x + params["bias"][None, :, None, None]).reshape(x.shape[0], -1)
    logits = dense(params["top"], x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def _images(step: int):
    return {"x": normal([step, 4], 8, 2, 6, 6), "y": np.arange(8) * (step + 1) % 5}


def _recurrent(params, batch):
    def cell(h, x):
        h = jnp.tanh(x @ params["in"] + h @ params["hidden"])
        return h, h.sum()

    start = jnp.zeros((batch["x"].shape[0], 7))
    h, sums = lax.scan(cell, start, batch["x"].swapaxes(0, 1))
    return jnp.mean((h @ params["out"]) ** 2) + 0.01 * sums.mean()


def _sequences(step: int):
    return {"x": normal([step, 5], 8, 4, 5)}  # [rows, time, width]


def _tied(params, batch):
    table = params["table"]  # [words, width], read first and last; "unused" never
    x = jnp.tanh(table[batch["ids"]].mean(axis=1) @ params["w"])
    logits = jnp.einsum("bw,vw->bv", x, table)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["next"]).mean()


def _words(step: int):
    ids = (np.arange(32).reshape(8, 4) * (step + 2)) % 11
    return {"ids": ids, "next": ids[:, 0] * 2 % 11}


def _mixed(params, batch):
    x = jnp.tanh(batch["x"].astype(jnp.bfloat16) @ params["half"]).astype(jnp.float32)
    return jnp.mean((dense(params["whole"], x) - batch["y"]) ** 2)


def _dropout(params, batch, rng):
    x = jnp.tanh(batch["x"] @ params[0]["w"] + params[0]["b"][None])
    x = jnp.where(jax.random.bernoulli(rng, 0.7, x.shape), x / 0.7, 0)
    block = jax.checkpoint(dense)  # its backward pass is one operation
    return jnp.mean((block(params[1:], x) - batch["y"]) ** 2)


def _frozen() -> optax.GradientTransformation:
    labels: Any = {"table": "train", "w": "train", "unused": "train", "fixed": "freeze"}
    kinds: Any = {"train": optax.adam(0.01), "freeze": optax.set_to_zero()}
    return optax.partition(kinds, labels)


_MLP = layers(6, 17, 12, 3)
_TIED = {
    "table": normal(5, 11, 6),
    "w": normal(6, 6, 6),
    "unused": normal(7, 4),
    "fixed": normal(8, 5),
}
_IMAGE = {
    "kernel": normal(9, 4, 2, 3, 3),
    "bias": normal(10, 4),
    "top": layers(144, 9, 5),
}
_CELL = {"in": normal(11, 5, 7), "hidden": normal(12, 7, 7), "out": normal(13, 7, 2)}
_HALF = {"half": normal(14, 6, 10, dtype=jnp.bfloat16), "whole": layers(10, 8, 3)}

PROBLEMS = {
    "mlp-n1": Problem(1, mlp_loss, _MLP, lambda s: rows(s, 4, 6, 3), 0.0005),
    "mlp-n2": Problem(2, mlp_loss, _MLP, lambda s: rows(s, 8, 6, 3), 0.0005),
    "mlp-n3": Problem(3, mlp_loss, _MLP, lambda s: rows(s, 9, 6, 3), 0.0005),
    "weighted-n4": Problem(4, _weighted, _MLP, _padded, 0.0005),
    "convolution": Problem(2, _convolution, _IMAGE, _images, 0.001),
    "scan": Problem(2, _recurrent, _CELL, _sequences, 0.0001),
    "tied-unused-frozen": Problem(2, _tied, _TIED, _words, 0.0002, optimizer=_frozen),
    "bf16": Problem(2, _mixed, _HALF, lambda s: rows(s, 8, 6, 3), 0.0002),
    "dropout-checkpoint": Problem(
        2, _dropout, _MLP, lambda s: rows(s, 8, 6, 3), 0.0005, key=True
    ),
    "float64": Problem(
        *(2, mlp_loss, layers(6, 17, 12, 3, dtype=np.float64)),
        *(lambda s: rows(s, 8, 6, 3, dtype=np.float64), 0.001),
        x64=True,
    ),
    "native": Problem(
        2, mlp_loss, _MLP, lambda s: rows(s, 8, 6, 3), 0.0005, algorithm="native"
    ),
}


def design(problem: Problem) -> Design:
    """That of the one program."""
    caps = problem.cap_mb, problem.cap_mb / 4
    if problem.algorithm == "native":
        return jaxdp.NativeAllReduce(*caps)
    return jaxdp.RingAllReduce(*caps)


def trainings(problem: Problem, **options) -> tuple[Any, Any]:
    """On two streams, and in one program on the same compute devices."""
    streams = jaxdp.streams.two_streams(jax.devices()[: 2 * problem.devices])
    optimizer = problem.optimizer()
    on_streams = jaxdp.streams.data_parallel(
        problem.loss_fn,
        optimizer,
        streams,
        bucket_cap_mb=problem.cap_mb,
        first_bucket_mb=problem.cap_mb / 4,
        algorithm=problem.algorithm,
        **options,
    )
    in_one = jaxdp.data_parallel(
        problem.loss_fn, optimizer, streams.compute, design(problem)
    )
    return on_streams, in_one


def run(train: Any, problem: Problem, steps: int = STEPS) -> tuple[Any, list[Any]]:
    """The state after so many steps, and the metrics of all."""
    key = {"rng": jax.random.key(3)} if problem.key else {}
    state, metrics = train.init(problem.params, **key), []
    for step in range(steps):
        state, found = train.step(state, problem.batch(step))
        metrics.append(jax.tree.map(np.asarray, found))
    return state, metrics


def differing(problem: Problem) -> dict[str, Any]:
    """Names of what differs; which parameters moved; numbers of buckets, programs."""
    on_streams, in_one = trainings(problem)
    results = []
    for train in (on_streams, in_one):
        state, metrics = run(train, problem)
        results.append({"params": state.params, "opt": state.opt_state, "m": metrics})
    named = [jax.tree_util.tree_leaves_with_path(tree) for tree in results]
    bad = [
        jax.tree_util.keystr(path)
        for (path, a), (_, b) in zip(*named, strict=True)
        if np.asarray(a).tobytes() != np.asarray(b).tobytes()
    ]
    moved = jax.tree.map(
        lambda new, old: bool(np.any(np.asarray(new) != old)),
        *(results[0]["params"], problem.params),
    )
    return {
        "differing": bad,
        "moved": jax.tree.leaves(moved),
        "buckets": len(in_one.buckets(state, problem.batch(0))),
        "programs": [*on_streams.lower(state, problem.batch(0))],
    }


def main() -> None:
    """Prints what `differing` finds."""
    jax.config.update("jax_num_cpu_devices", 8)
    import sys

    for name, problem in PROBLEMS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with jax.enable_x64(problem.x64):
            print(json.dumps([name, differing(problem)]), flush=True)


if __name__ == "__main__":
    main()
