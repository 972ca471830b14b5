"""Training steps: a loss function, an optax optimizer and a design become one program.

One step, on each of the `N` devices of the mesh: the gradient of the loss of the local
rows; the design's exchange, which averages over replicas and updates; the averaged loss
and metrics. The gradient is that of the global mean loss, whatever the design.

Why `check_vma=False`: the body runs any loss function, and those with a scan or a
custom derivative are often refused by the replication types though they are right. In
exchange `jaxdp.guard` proves on the traced program that gradients are summed exactly
once and that parameters end equal everywhere; the tests compare all replicas bit for
bit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp import guard
from jaxdp.data import shard_batch, with_servers
from jaxdp.designs import Design, RingAllReduce
from jaxdp.mesh import auto_mesh, without_mesh, worker_mesh
from jaxdp.replica import Replica
from jaxdp.state import (
    TrainState,
    check_opt_state,
    check_params,
    check_state,
    own_copy,
)

PyTree = Any


class DataParallel(NamedTuple):
    """A training program: pure functions, made by `data_parallel`.

    Attributes:
        init: `init(params, *, rng=None, model_state=None) -> TrainState`. Copies, so
            the caller's arrays survive.
        step: `step(state, batch) -> (TrainState, metrics)`. The state given is donated.
        params: `params(state)`: a copy of the full parameters, on every device.
        flush: `flush(state) -> TrainState`. Applies the gradients that a design with
            bounded delay still has in flight; the state given is donated. Other designs
            have none, and get their state back.
        lower: `lower(state, batch)`: the step as a `jax.stages.Lowered`, whose
            `.compile()` can be analyzed.
    """

    init: Callable[..., TrainState]
    step: Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]
    params: Callable[[TrainState], PyTree]
    flush: Callable[[TrainState], TrainState]
    lower: Callable[[TrainState, PyTree], jax.stages.Lowered]


def data_parallel(
    loss_fn: Callable[..., Any],
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    design: Design = RingAllReduce(),  # noqa: B008 (frozen and stateless)
    *,
    axis_name: str | tuple[str, ...] | None = None,
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

    Returns:
        The program: `init`, `step`, `params`, `flush`, `lower`.

    Raises:
        ValueError: The mesh lacks the axis or has others; an option of the design does
            not fit the mesh. From `init`, `step` and `lower`: a batch that cannot be
            split, a state of another design, tree or mesh, a loss that is no scalar,
            gradients that would be summed twice or never.
        TypeError: A design that is none; parameters or a loss that are not floating.
        RuntimeError: From `step`, `params` and `lower`: a state that was given to a
            step before.

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
    mesh = auto_mesh(mesh, axis_name, "data_parallel", design.most_axes)
    design.check(mesh.devices.shape[0])
    axes = mesh.axis_names
    replica = Replica(loss_fn, optimizer, design, axes if axes[1:] else axes[0])
    program = _Program(replica, mesh)
    return DataParallel(
        program.init, program.step, program.params, program.flush, program.lower
    )


class _Program:
    """The functions of one training program, and what they share."""

    def __init__(self, replica: Replica, mesh: Mesh):
        self.replica = replica
        self.mesh = mesh
        self.replicated = NamedSharding(mesh, P())
        design, axis_name = replica.design, replica.axis_name
        spec = TrainState(P(), P(), design.opt_state_spec(axis_name), P(), P(), design)
        self.specs = (spec, P(axis_name))
        self.worker_mesh = worker_mesh(mesh, design.serving_ranks)
        sharding = jax.tree.map(
            lambda part: NamedSharding(mesh, part),
            spec,
            is_leaf=lambda part: isinstance(part, P),
        )
        self.jitted_init = jax.jit(self._init, out_shardings=sharding)
        self.jitted_step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(sharding, NamedSharding(mesh, P(axis_name))),
            out_shardings=(sharding, self.replicated),
        )
        self.jitted_flush = jax.jit(
            self._flush,
            donate_argnums=0,
            in_shardings=(sharding,),
            out_shardings=sharding,
        )

    def init(
        self,
        params: PyTree,
        *,
        rng: jax.Array | None = None,
        model_state: PyTree = None,
    ) -> TrainState:
        """The state before the first step."""
        check_params(params, "train.init")
        design, sizes = self.replica.design, self.mesh.devices.shape
        without_mesh(design.check_training)(self.replica.optimizer, params, sizes)
        # Moves arrays from other devices or meshes; the copy in `_init` unties them.
        given = jax.device_put((params, rng, model_state), self.replicated)
        return without_mesh(self.jitted_init)(*given)

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict]:
        """One optimizer update."""
        check_state(state, self.replica.design, self.replicated, "step")
        return without_mesh(self.jitted_step)(state, self._placed(batch))

    def flush(self, state: TrainState) -> TrainState:
        """Applies the gradients still in flight."""
        check_state(state, self.replica.design, self.replicated, "flush")
        if not self.replica.design.max_staleness:
            return state
        return without_mesh(self.jitted_flush)(state)

    def params(self, state: TrainState) -> PyTree:
        """A copy of the parameters, which later steps do not donate."""
        check_state(state, self.replica.design, self.replicated, "params")
        return jax.tree.map(jnp.copy, state.params)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """The step's program."""
        check_state(state, self.replica.design, self.replicated, "lower")
        leaves = jax.tree.leaves(batch)
        abstract = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
        batch = self._described(batch) if abstract else self._placed(batch)
        return without_mesh(self.jitted_step.lower)(state, batch)

    def _init(self, params, rng, model_state) -> TrainState:
        """The state of copies of what was given."""
        params, rng, model_state = own_copy((params, rng, model_state))
        design, sizes = self.replica.design, self.mesh.devices.shape
        opt_state = design.init_opt_state(self.replica.optimizer, params, sizes)
        step = jnp.zeros((), jnp.int32)
        return TrainState(step, params, opt_state, rng, model_state, design)

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict]:
        """The global program: traced, proven, then inlined."""
        fresh = jax.eval_shape(self.jitted_init, state.params, state.rng, None)
        check_opt_state(state.opt_state, fresh.opt_state)
        step = self._on_replicas(self.replica.step, (self.specs[0], P()))
        program, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
        self._prove(program, shapes, state, batch)
        results = jaxpr_as_fun(program)(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _flush(self, state: TrainState) -> TrainState:
        """The global program of a flush."""
        spec = self.specs[0]
        return self._on_replicas(self.replica.flush, spec, (spec,))(state)

    def _placed(self, batch: PyTree) -> PyTree:
        """The batch on the devices: no rows where a device only serves."""
        batch = shard_batch(batch, self.worker_mesh, axis_name=self.mesh.axis_names)
        if self.worker_mesh is self.mesh:
            return batch
        return with_servers(batch, self.mesh, self.replica.design.serving_ranks)

    def _described(self, batch: PyTree) -> PyTree:
        """An abstract batch with rows for all devices, as `_placed` makes it."""
        if self.worker_mesh is self.mesh:
            return batch

        def extend(leaf):
            rows = leaf.shape[0] // self.worker_mesh.size * self.mesh.size
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(extend, batch)

    def _on_replicas(
        self, body: Callable, out_specs: Any, in_specs: Any = None
    ) -> Callable:
        """Runs `body(state, batch)` on every device."""
        return jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs or self.specs,
            out_specs=out_specs,
            check_vma=False,  # see the module docstring
        )

    def _prove(
        self, program: ClosedJaxpr, outputs: PyTree, state: TrainState, batch: PyTree
    ) -> None:
        """Proves that the program sums its gradients exactly once, over each axis."""
        (new, metrics) = jax.tree_util.tree_map_with_path(
            lambda path, _: jax.tree_util.keystr(path[1:]).lstrip("."), outputs
        )
        opt_state = jax.tree.map(  # devices may hold different parts of it
            lambda spec, names: jax.tree.map(lambda n: n if spec == P() else "", names),
            *(self.specs[0].opt_state, new.opt_state),
            is_leaf=lambda spec: isinstance(spec, P),
        )
        new = dataclasses.replace(new, opt_state=opt_state)
        metrics = jax.tree.map(lambda name: f"metrics{name}", metrics)
        names = [name or None for name in jax.tree.leaves((new, metrics))]

        def total(state, batch):
            return self.replica.local_loss(state, batch, state.params)[0]

        @functools.cache
        def loss() -> ClosedJaxpr:
            return jax.make_jaxpr(self._on_replicas(total, P()))(state, batch)

        for axis_name in self.mesh.axis_names:
            if self.replica.design.serving_ranks:
                check_alone(loss(), axis_name, self.replica.design)
            guard.check_summed_once(
                program,
                axis_name,
                names,
                lambda axis_name=axis_name: guard.sums_over(loss(), axis_name),
            )


def check_alone(loss: ClosedJaxpr, axis_name: str, design: Design) -> None:
    """Refuses a loss in which workers wait for devices that compute none.

    Raises:
        ValueError: The loss communicates.
    """
    if guard.talks_over(loss, axis_name):
        raise ValueError(
            f"data_parallel got a loss_fn that communicates over axis {axis_name!r}, "
            f"and a design whose first {design.serving_ranks} rank(s) only serve: they "
            "compute no loss, so the others would wait for ever. Remove the collective "
            "from loss_fn (axis_name= of BatchNorm is one), or let the servers work "
            "with dedicated=False."
        )
