"""Training steps: a loss function, an optax optimizer and a design become one program.

One step, on each of the `N` devices of the mesh: the gradient of the loss of the local
rows; the design's exchange, which averages over replicas and updates; the averaged loss
and metrics. The gradient is that of the global mean loss, whatever the design.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxdp.buckets import Buckets
from jaxdp.contribution import LocalLoss
from jaxdp.designs import Design, RingAllReduce
from jaxdp.mesh import auto_mesh
from jaxdp.model_states import POLICIES
from jaxdp.precision import Precision
from jaxdp.replica import Replica
from jaxdp.state import TrainState
from jaxdp.trainer import Trainer

PyTree = Any


class DataParallel(NamedTuple):
    """A training program: pure functions, made by `data_parallel`.

    Attributes:
        init: `init(params, *, rng=None, model_state=None) -> TrainState`. Copies, so
            the caller's arrays survive.
        step: `step(state, batch) -> (TrainState, metrics)`. The state given is donated.
            It returns while the devices compute; on several CPU devices of one process
            it first waits for the step before, since they share threads.
        params: `params(state)`: a copy of the full parameters, on every device.
        model_state: `model_state(state)`: a copy of the model state that survives: with
            `model_state="per_replica"` that of the first replica.
        buckets: `buckets(params_or_state, batch=None)`: which gradients travel
            together, in which order; prints as a table. Given a batch, and a state if
            loss_fn takes `rng` or `model_state`, exactly what a step does; without a
            batch, gradients alone, in reversed order of the tree.
        flush: `flush(state) -> TrainState`. Applies the gradients that a design with
            bounded delay still has in flight; the state given is donated. Other designs
            have none, and get their state back.
        lower: `lower(state, batch)`: the step as a `jax.stages.Lowered`, whose
            `.compile()` can be analyzed.
        trace: `trace(state, batch)`: the step as a `jax.stages.Traced`, the program as
            it is written, which `jaxdp.analyze(compiled, traced)` sets beside what the
            compiler made of it.
    """

    init: Callable[..., TrainState]
    step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]
    params: Callable[[TrainState], PyTree]
    model_state: Callable[[TrainState], PyTree]
    buckets: Callable[..., Buckets]
    flush: Callable[[TrainState], TrainState]
    lower: Callable[[TrainState, PyTree], jax.stages.Lowered]
    trace: Callable[[TrainState, PyTree], jax.stages.Traced]


def data_parallel(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    design: Design = RingAllReduce(),  # noqa: B008 (frozen and stateless)
    *,
    axis_name: str | tuple[str, ...] | None = None,
    accumulate: int = 1,
    model_state: Literal["mean", "per_replica", "broadcast"] | None = None,
    precision: Precision | None = None,
) -> DataParallel:
    """Makes a data-parallel training program.

    Devices: before and after a step, what the design says; parameters are the same bits
    everywhere.

    Cost: that of the design's exchange; nothing else travels.

    Args:
        loss_fn: `loss_fn(params, batch)` of one replica's rows. Returns a scalar, the
            mean over those rows, or `jaxdp.Mean(total, weight)`; alone, or as `(loss,
            jaxdp.Aux(metrics=..., model_state=...))`. It receives `rng=` (another key
            per replica and step) and `model_state=` if `init` did, and `mask=` for a
            batch padded by `shard_batch`.
        optimizer: Any optax transformation; it sees the gradient of the global mean
            loss.
        mesh: A mesh with one axis, such as `jaxdp.data_mesh()`; for `ParameterServer`
            it may have two, as `jax.make_mesh((4, 2), ("worker", "device"))`.
        design: How replicas exchange gradients.
        axis_name: The mesh axis, or all axes; None takes what the mesh has.
        accumulate: Micro-batches: a device goes through its rows in so many equal
            slices, in one `lax.scan`, sums gradients in float32 or wider, and exchanges
            once. Model state goes from slice to slice, and each has an `rng` of its
            own.
        model_state: What becomes of the model state where replicas differ. None: they
            must not, which is proven (BatchNorm with `axis_name`); nothing travels.
            "mean": float leaves are averaged with the weight of the loss, and others
            must be alike. "broadcast": all get the first replica's, as by DDP's
            `broadcast_buffers`. "per_replica": each keeps its own. A replica whose rows
            are all padding leaves its model state as it was.
        precision: What computes in 16 bits, and how the loss is scaled. With a loss
            scale, a step whose averaged gradients are not finite is skipped by all, and
            `metrics` has "loss_scale", the one that this step used, and "skipped".

    Returns:
        The program, with `init`, `step`, `params`, `model_state`, `buckets`, `flush`,
        `lower` and `trace`.

    Raises:
        ValueError: The mesh lacks the axis or has others; an option does not fit the
            mesh, or is unknown. From `init`, `step` and `lower`: a batch that cannot be
            split, a state of another design, tree or mesh, a loss that is no scalar,
            gradients that would be summed twice or never, a model state that differs
            between replicas without a policy.
        TypeError: A design that is none; parameters or a loss that are not floating.
        RuntimeError: From `step`, `params`, `lower` and `trace`: a state that was
            given to a step before.
        FloatingPointError: From `step` and `params`: gradients overflow at the smallest
            loss scale. `step` notices once the step that did it is done.

    Example:
        >>> import jax.numpy as jnp, jaxdp, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean((batch["x"] * params - batch["y"]) ** 2)
        >>> mesh = jaxdp.data_mesh(4)
        >>> train = jaxdp.data_parallel(loss_fn, optax.sgd(0.01), mesh)
        >>> state = train.init(jnp.array(0.0))
        >>> x = jnp.arange(8.0)
        >>> state, metrics = train.step(state, {"x": x, "y": 3 * x})
        >>> print(metrics["loss"], train.params(state))
        157.5 1.05
    """
    if not isinstance(design, Design):
        raise TypeError(
            f"data_parallel got design={design!r}. It must be an instance of a design. "
            "Pass, for example, jaxdp.RingAllReduce()."
        )
    _check_options(design, accumulate, model_state, precision)
    mesh = auto_mesh(mesh, axis_name, "data_parallel", design.most_axes)
    design.check(mesh.devices.shape[0])
    axes = mesh.axis_names
    loss = LocalLoss(loss_fn, precision, accumulate, model_state)
    replica = Replica(loss, optimizer, design, axes if axes[1:] else axes[0])
    program = Trainer(replica, mesh)
    return DataParallel(
        *(program.init, program.step, program.params, program.model_state),
        *(program.buckets, program.flush, program.lower, program.trace),
    )


def trainer_of(train: Any, caller: str, purpose: str) -> Trainer:
    """What is behind the functions of a training.

    Args:
        train: What `data_parallel` returned.
        caller: Whom the error speaks for.
        purpose: What it needs a training for, as a sentence.

    Raises:
        TypeError: `train` is no training.
    """
    trainer = getattr(getattr(train, "step", None), "__self__", None)
    if isinstance(trainer, Trainer):
        return trainer
    raise TypeError(
        f"{caller} got train={type(train).__name__}. {purpose} Pass what "
        "jaxdp.data_parallel returned."
    )


def _check_options(
    design: Design, accumulate: Any, policy: Any, precision: Precision | None
) -> None:
    """Checks the options that need no mesh."""
    if not isinstance(accumulate, int | np.integer) or accumulate < 1:
        raise ValueError(
            f"data_parallel got accumulate={accumulate!r}. It is a number of "
            "micro-batches per step, at least 1. Leave it out for one."
        )
    if policy not in POLICIES:
        raise ValueError(
            f"data_parallel got model_state={policy!r}. It must be one of "
            f"{', '.join(map(repr, POLICIES))}. Leave it out where replicas cannot "
            "differ, or use 'mean'."
        )
    if precision is not None and precision.loss_scale is not None and not design.skips:
        raise ValueError(
            f"data_parallel got a loss scale and {type(design).__name__}, which "
            "refuses single pushes that are not finite and goes on with the others, so "
            "that a scale could not back off. Compute in bf16, which needs no loss "
            "scale, or use another design."
        )
