"""One training step of TinyNet, run in several ways from the same start."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

import jaxdp
from experiments import models
from experiments.harness import show, timing
from experiments.harness.result import Rows
from experiments.parts import stages
from jaxdp.program import analyze

PyTree = Any


class Problem(NamedTuple):
    """What the step starts from: the same for every way of running it."""

    apply: Callable[[PyTree, Any], jax.Array]
    params: PyTree
    optimizer: optax.GradientTransformation
    images: np.ndarray  # [B, 32, 32, 3]
    labels: np.ndarray  # [B]

    def losses(self, params: PyTree, images: Any, labels: Any) -> jax.Array:
        """One loss per row."""
        logits = self.apply(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels)

    def loss_fn(self, params: PyTree, batch: tuple[Any, Any]) -> jax.Array:
        """The mean loss of a batch."""
        return self.losses(params, *batch).mean()


class Way(NamedTuple):
    """One stage, or one whole step, ready to be timed."""

    name: str
    work: str
    program: jax.stages.Compiled | None
    call: Callable[[], Any]


def problem(batch_size: int, learning_rate: float) -> Problem:
    """TinyNet and random images."""
    apply, params = models.functional(models.TinyNet, seed=0)
    optimizer = optax.sgd(learning_rate, momentum=0.9)
    return Problem(apply, params, optimizer, *random_batch(batch_size))


def random_batch(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Random images and labels."""
    random = np.random.default_rng(0)
    images = random.normal(size=(size, 32, 32, 3)).astype(np.float32)
    return images, random.integers(0, 10, size).astype(np.int32)


def on_one_device(given: Problem) -> tuple[PyTree, PyTree]:
    """The gradient of the whole batch, and the parameters after the step."""
    batch = (given.images, given.labels)
    gradient = jax.jit(jax.grad(given.loss_fn))(given.params, batch)
    opt_state = given.optimizer.init(given.params)
    updates, _ = given.optimizer.update(gradient, opt_state, given.params)
    return gradient, optax.apply_updates(given.params, updates)


def by_stages(given: Problem, mesh: Mesh) -> tuple[list[Way], dict[str, Any]]:
    """Runs every stage, then all in one program; returns what the root then has."""
    checked = Way("1 check and place", "host", None, lambda: _check(given, mesh))
    checked.call()
    parts = stages.stages(given.apply, given.optimizer)
    start = stages.on_root(
        {
            "params": given.params,
            "opt_state": given.optimizer.init(given.params),
            "images": given.images.reshape(mesh.size, -1, *given.images.shape[1:]),
            "labels": given.labels,
        },
        mesh,
    )
    values, one = dict(start), dict(start)
    ways = [checked, *(_run(part, mesh, values) for part in parts)]
    ways.append(_run(stages.fuse(parts), mesh, one))
    ends = {"stage by stage": values, "one program": one}
    return ways, {name: stages.from_root(v) for name, v in ends.items()}


def by_design(given: Problem, mesh: Mesh) -> tuple[Way, PyTree]:
    """The library's GatherToRoot step; returns the parameters after it."""
    design = jaxdp.GatherToRoot(root=stages.ROOT)
    train = jaxdp.data_parallel(given.loss_fn, given.optimizer, mesh, design=design)
    batch = jaxdp.shard_batch((given.images, given.labels), mesh)
    state = train.init(given.params)
    program = train.lower(state, batch).compile()
    state, _ = train.step(state, batch)
    params = train.params(state)

    def step():
        nonlocal state  # donated
        state, metrics = train.step(state, batch)
        return metrics

    return Way("GatherToRoot step", "whole step", program, step), params


def measure(ways: list[Way], repeats: int) -> Rows:
    """Times all ways in turns and counts what the root's link carries."""
    with show.progress("timing stages", repeats) as advance:
        calls = {way.name: way.call for way in ways}
        times = timing.interleaved(calls, repeats, advance)
    rows = []
    for way in ways:
        report = analyze(way.program) if way.program else None
        rows.append(
            {
                "stage": way.name,
                "work": way.work,
                **times[way.name]._asdict(),
                "root_sends_bytes": report.sent_bytes[stages.ROOT] if report else 0,
                "root_gets_bytes": report.received_bytes[stages.ROOT] if report else 0,
            }
        )
    return rows


def _run(stage: stages.Stage, mesh: Mesh, values: dict[str, Any]) -> Way:
    """Runs a stage, and adds what it writes to the values."""
    program = stages.compiled(stage, mesh, values)
    call = functools.partial(program, *(values[name] for name in stage.reads))
    values.update(zip(stage.writes, call(), strict=True))
    return Way(stage.name, stage.work, program, call)


def _check(given: Problem, mesh: Mesh) -> PyTree:
    """What the host does first: checks lengths, moves the batch to the root."""
    if len(given.images) != len(given.labels) or len(given.labels) % mesh.size:
        raise ValueError(
            f"dp got {len(given.images)} images and {len(given.labels)} labels for "
            f"{mesh.size} devices. Every device takes equally many rows. Choose a "
            "--batch-size that --devices divides."
        )
    batch = (given.images, given.labels)
    return jax.device_put(batch, mesh.devices.flat[stages.ROOT])
