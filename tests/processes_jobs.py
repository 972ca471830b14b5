"""Designs over several processes: `python -m tests.processes_jobs FOLDER CASE...`.

Four devices, whatever the number of processes. A case trains a few steps, each process
on the rows of its own devices, and keeps every metric and the whole last state.
"""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from jaxdp import compression
from tests import contract, processes_helpers

PyTree = Any
STEPS = 3
OVERFLOW = 1  # the step whose last row is infinite, if a loss scale is to see it
CAP = {"bucket_cap_mb": 48 / 2**20, "first_bucket_mb": None}  # splits what follows
COMPILED: list[float] = []  # how long each compilation of this process took
PARAMS = {  # 37 elements
    "kernel": contract.waves(5, 3),
    "output": contract.waves(3, 7, start=0.7),
    "scale": np.float32(1.1),
}


def count(event: str, duration_secs: float, **_: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        COMPILED.append(duration_secs)


def row_losses(params: PyTree, batch: PyTree) -> jax.Array:
    hidden = jnp.tanh(batch["x"] @ params["kernel"])
    errors = params["scale"] * hidden @ params["output"] - batch["y"]
    return jnp.mean(errors**2, axis=1).astype(jnp.float32)


def mean_loss(params: PyTree, batch: PyTree) -> jax.Array:
    return row_losses(params, batch).mean()


def masked_loss(params: PyTree, batch: PyTree, mask: jax.Array) -> jaxdp.Mean:
    return jaxdp.masked_mean(row_losses(params, batch), mask)


def dropout_loss(params: PyTree, batch: PyTree, rng: jax.Array) -> jax.Array:
    kept = jax.random.bernoulli(rng, 0.8, batch["x"].shape)
    return row_losses(params, batch | {"x": batch["x"] * kept}).mean()


def counting_loss(params: PyTree, batch: PyTree, model_state: PyTree) -> tuple:
    seen = {
        "mean": 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(0),
        "count": model_state["count"] + 1,
    }
    return row_losses(params, batch).mean(), jaxdp.Aux(model_state=seen)


def normalized_loss(params: PyTree, batch: PyTree) -> jax.Array:
    """Of inputs normalized over the rows of all devices."""
    mean, variance = (
        jax.lax.pmean((batch["x"] ** power).mean(0), "data") for power in (1, 2)
    )
    x = (batch["x"] - mean[None]) / jnp.sqrt(variance - mean**2 + 1)[None]
    return row_losses(params, batch | {"x": x}).mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Attributes:
        design: How gradients travel.
        options: Of `jaxdp.data_parallel`.
        loss_fn: What is trained.
        init: What `train.init` gets beside the parameters.
        rows: Of a global batch.
        padded: Whether devices do not divide them.
        shape: Of the mesh.
        exact: Whether all sums have an order that the design fixes.
    """

    design: jaxdp.Design
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    loss_fn: Callable[..., Any] = mean_loss
    init: dict[str, Any] = dataclasses.field(default_factory=dict)
    rows: int = contract.ROWS
    padded: bool = False
    shape: tuple[int, ...] = (4,)
    exact: bool = True


def counting(policy: str) -> Case:
    return Case(
        design=jaxdp.RingAllReduce(**CAP),
        loss_fn=counting_loss,
        init={"model_state": {"mean": np.zeros(5, "f"), "count": np.int32(0)}},
        options={"model_state": policy},
    )


def compressed(method: jaxdp.Compression, **options: Any) -> Case:
    return Case(design=jaxdp.RingAllReduce(compression=method, **options))


CASES = {
    "root-bf16": Case(
        design=jaxdp.GatherToRoot(), options={"precision": jaxdp.Precision("bf16")}
    ),
    "root-last-accumulated": Case(
        design=jaxdp.GatherToRoot(root=3), options={"accumulate": 3}
    ),
    "ring-buckets": Case(design=jaxdp.RingAllReduce(**CAP)),
    "ring-padded": Case(
        design=jaxdp.RingAllReduce(), loss_fn=masked_loss, rows=17, padded=True
    ),
    "ring-dropout": Case(
        design=jaxdp.RingAllReduce(),
        loss_fn=dropout_loss,
        init={"rng": 7},
        options={"accumulate": 2},
    ),
    "ring-loss-scale": Case(
        design=jaxdp.RingAllReduce(**CAP),
        options={
            "precision": jaxdp.Precision(
                "fp16", loss_scale="dynamic", initial_scale=1024.0
            )
        },
    ),
    "doubling": Case(design=jaxdp.AllReduce("recursive_doubling", **CAP)),
    "native-buckets": Case(design=jaxdp.NativeAllReduce(**CAP), exact=False),
    "normalized": Case(
        design=jaxdp.RingAllReduce(), loss_fn=normalized_loss, exact=False
    ),
    "state-mean": counting("mean"),
    "state-broadcast": counting("broadcast"),
    "state-per-replica": counting("per_replica"),
    "bf16-hook": compressed(compression.Bf16(), **CAP),
    "int8": compressed(compression.Int8()),
    "topk": compressed(compression.TopK(0.25)),
    "powersgd": compressed(compression.PowerSGD(1)),
    "zero-1-accumulated": Case(design=jaxdp.Zero(1, **CAP), options={"accumulate": 2}),
    "zero-2-bf16": Case(
        design=jaxdp.Zero(2, **CAP), options={"precision": jaxdp.Precision("bf16")}
    ),
    "zero-3": Case(design=jaxdp.Zero(3, **CAP)),
    "zero-3-hybrid": Case(design=jaxdp.Zero(3), shape=(2, 2)),
    "local": Case(design=jaxdp.LocalSGD(3, start_step=1)),
    "servers": Case(design=jaxdp.ParameterServer(servers=2)),
    "servers-worker": Case(design=jaxdp.ParameterServer(servers=4, update_on="worker")),
    "server-dedicated": Case(design=jaxdp.ParameterServer(dedicated=True)),
    "servers-dedicated": Case(design=jaxdp.ParameterServer(servers=2, dedicated=True)),
    "servers-median": Case(
        design=jaxdp.ParameterServer(aggregate=jaxdp.aggregation.median)
    ),
    "servers-sliding": Case(design=jaxdp.ParameterServer(servers=2, max_staleness=1)),
    "server-window": Case(
        design=jaxdp.ParameterServer(max_staleness=1, policy="window")
    ),
    "workers-of-two": Case(design=jaxdp.ParameterServer(servers=2), shape=(2, 2)),
}
# What depends on where processes end: a start with more of them runs only these.
EDGES = (
    *("root-last-accumulated", "ring-buckets", "ring-padded", "doubling"),
    *("native-buckets", "state-per-replica", "powersgd", "local"),
    *("server-dedicated", "servers-dedicated", "servers-sliding"),
    *("zero-3", "zero-3-hybrid"),
)


def main(folder: str, *cases: str) -> None:
    """Runs cases."""
    jax.monitoring.register_event_duration_secs_listener(count)
    jaxdp.initialize()
    found = {name: run(CASES[name]) for name in cases}
    processes_helpers.write(folder, jax.process_index(), found)


def run(case: Case) -> dict[str, Any]:
    """Trains, and returns what became of it."""
    mesh = mesh_of(case)
    optimizer = optax.sgd(0.1, momentum=0.9)
    train = jaxdp.data_parallel(
        case.loss_fn, optimizer, mesh, case.design, **case.options
    )
    init = dict(case.init)
    if "rng" in init:
        init["rng"] = jax.random.key(init["rng"])
    state = train.init(PARAMS, **init)
    history, compilations = [], []
    for step in range(STEPS):
        batch = own_rows(case, mesh, whole_batch(case, step))
        if case.padded:
            batch = jaxdp.shard_batch(batch, mesh, "pad")
        before = len(COMPILED)
        state, metrics = train.step(state, batch)
        compilations.append(len(COMPILED) - before)
        history.append({name: np.asarray(kept) for name, kept in metrics.items()})
    cached = train.step.__self__.jitted_step._cache_size()
    state = train.flush(state)
    return {
        "metrics": history,
        "params": leaves(train.params(state)),
        "state": leaves(state),
        "model_state": leaves(train.model_state(state)),
        "compilations": compilations,
        "cached": cached,
        "replicas": replicas(train.params(state)),
        "processes": jax.process_count(),
    }


def mesh_of(case: Case) -> jax.sharding.Mesh:
    if case.shape == (4,):
        return jaxdp.data_mesh()
    return jax.make_mesh(case.shape, ("worker", "device"))


def whole_batch(case: Case, step: int) -> PyTree:
    """The global batch of a step."""
    batch = jax.tree.map(lambda leaf: leaf[: case.rows].copy(), contract.BATCHES[step])
    if "precision" in case.options and step == OVERFLOW:
        if case.options["precision"].loss_scale:
            batch["y"][-1] = np.inf
    return batch


def own_rows(case: Case, mesh: jax.sharding.Mesh, batch: PyTree) -> PyTree:
    """The rows of the devices of this process."""
    working = [*mesh.devices[case.design.serving_ranks :].flat]
    each = -(-case.rows // len(working))
    here = jax.process_index()
    ranks = [r for r, device in enumerate(working) if device.process_index == here]
    start, stop = (ranks[0], ranks[-1] + 1) if ranks else (0, 0)
    return jax.tree.map(lambda leaf: leaf[start * each : stop * each], batch)


def leaves(tree: PyTree) -> dict[str, np.ndarray]:
    """All arrays of a tree, whole, by name."""
    named = jax.tree_util.tree_leaves_with_path(jaxdp.fetch(tree))
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in named}


def replicas(tree: PyTree) -> list[str]:
    """What each device of this process has, as bits."""
    copies: dict[Any, str] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            bits = np.asarray(shard.data).tobytes().hex()
            copies[shard.device.id] = copies.get(shard.device.id, "") + bits
    return [*copies.values()]


if __name__ == "__main__":
    main(*sys.argv[1:])
