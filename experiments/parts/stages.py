"""The eight stages of `nn.DataParallel`'s training step, each a program of its own.

`N` devices, one of them the root. Every value is held per device, as a global array
`[N, ...]` whose row r lies on device r; of a value that only the root has, the other
rows mean nothing. A stage reads some values and writes others, so stages run one by
one, to be timed, or all in one program, to see what XLA makes of the whole.

    1  batch and parameters lie on the root; inputs are checked   by the host
    2  parameters to all devices                                  broadcast
    3  a slice of the batch to each device                        scatter
    4  forward, side by side
    5  outputs to the root                                        gather
    6  loss there, and its gradient with respect to the outputs
    7  that gradient back along the gather, then backward         scatter
    8  parameter gradients summed on the root, optimizer there    reduce

Then parameters go out again: that is stage 2 of the next step.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp

PyTree = Any
ROOT = 0
# What the root has before a step, and after it.
GIVEN: tuple[str, ...] = ("params", "opt_state", "images", "labels")
RESULT: tuple[str, ...] = ("loss", "gradient", "params", "opt_state")


class Stage(NamedTuple):
    """One stage.

    Attributes:
        name: Its number in the article, and what it does.
        work: Who is busy.
        reads: Names of the values it takes.
        writes: Names of the values it makes.
        run: Maps the one to the other on a device, inside `shard_map` over "data".
    """

    name: str
    work: Literal["traffic", "all devices", "root only", "whole step"]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    run: Callable[..., tuple[Any, ...]]


def stages(
    apply: Callable[[PyTree, jax.Array], jax.Array],
    optimizer: optax.GradientTransformation,
) -> list[Stage]:
    """The stages on devices, in order; `apply(params, images)` gives logits."""

    def forward(params, images):
        return jax.vjp(lambda params: apply(params, images), params)

    def mean_loss(outputs, labels):
        logits = outputs.reshape(-1, outputs.shape[-1])  # [N, B / N, C] to [B, C]
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return entropy.mean()

    def update(gradient, params, opt_state):
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def stage(name, work, run, reads, writes):
        return Stage(name, work, tuple(reads.split()), tuple(writes.split()), run)

    state = "params opt_state"
    moved, everyone, root = "traffic", "all devices", "root only"
    loss, update = _on_root(jax.value_and_grad(mean_loss)), _on_root(update)
    return [
        stage("2 replicate", moved, _broadcast, "params", "replica"),
        stage("3 scatter batch", moved, _scatter, "images", "slice"),
        stage("4 forward", everyone, forward, "replica slice", "outputs pullback"),
        stage("5 gather outputs", moved, _gather, "outputs", "gathered"),
        stage("6 loss", root, loss, "gathered labels", "loss cotangents"),
        stage("7 scatter back", moved, _scatter, "cotangents", "cotangent"),
        stage("7 backward", everyone, _backward, "pullback cotangent", "part"),
        stage("8 reduce gradient", moved, _reduce, "part", "gradient"),
        stage("8 optimizer", root, update, f"gradient {state}", state),
    ]


def fuse(parts: Sequence[Stage]) -> Stage:
    """All stages as one."""

    def run(*given):
        values = dict(zip(GIVEN, given, strict=True))
        for part in parts:
            results = part.run(*(values[name] for name in part.reads))
            values.update(zip(part.writes, results, strict=True))
        return tuple(values[name] for name in RESULT)

    return Stage("all in one program", "whole step", GIVEN, RESULT, run)


def compiled(stage: Stage, mesh: Mesh, values: dict[str, Any]) -> jax.stages.Compiled:
    """A stage as a program, for values of these shapes."""

    def program(*given):
        results = stage.run(*jax.tree.map(lambda row: row[0], given))
        return jax.tree.map(lambda value: value[None], tuple(results))

    spread = jax.shard_map(
        program,
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        # Values are per device throughout: no replication to prove, and JAX must not
        # sum gradients by itself where a broadcast made parameters equal.
        check_vma=False,
    )
    given = tuple(values[name] for name in stage.reads)
    return jax.jit(spread).lower(*given).compile()


def on_root(tree: PyTree, mesh: Mesh) -> PyTree:
    """Puts values into the root's rows, zeros into the others."""

    def place(leaf):
        rows = np.zeros((mesh.size, *np.shape(leaf)), jnp.result_type(leaf))
        rows[ROOT] = leaf
        return jax.device_put(rows, NamedSharding(mesh, P("data")))

    return jax.tree.map(place, tree)


def from_root(tree: PyTree) -> PyTree:
    """The root's rows."""
    return jax.tree.map(lambda rows: np.asarray(rows)[ROOT], tree)


def _on_root(run: Callable[..., Any]) -> Callable[..., Any]:
    """Runs on the root only; other devices get zeros and do nothing."""

    def only(*given):
        shapes = jax.eval_shape(run, *given)

        def nothing(*given):
            del given
            return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

        return lax.cond(lax.axis_index("data") == ROOT, run, nothing, *given)

    return only


def _broadcast(tree):
    return (jaxdp.broadcast(tree, "data", ROOT),)


def _scatter(rows):
    return (jaxdp.scatter(rows, "data", ROOT),)


def _gather(part):
    return (jaxdp.gather(part, "data", ROOT),)


def _reduce(tree):
    return (jaxdp.reduce(tree, "data", ROOT),)


def _backward(pullback, cotangent):
    return pullback(cotangent)
