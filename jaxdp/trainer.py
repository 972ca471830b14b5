"""The compiled programs of one training: made, proven, and called.

Why `check_vma=False`: the body runs any loss function, and those with a scan or a
custom derivative are often refused by the replication types though they are right. In
exchange `jaxdp.guard` proves on the traced program that gradients are summed exactly
once and that parameters end equal everywhere; the tests compare all replicas bit for
bit.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdp.batches import Batches
from jaxdp.buckets import Buckets
from jaxdp.loss import Contribution
from jaxdp.loss_scale import check_not_failed, has_failed
from jaxdp.mesh import without_mesh
from jaxdp.processes.agreement import (
    check_same_devices,
    check_same_program,
    check_same_tree,
)
from jaxdp.processes.values import on_all, ranks_of
from jaxdp.proof import prove
from jaxdp.replica import Replica
from jaxdp.state import (
    TrainState,
    check_opt_state,
    check_params,
    check_state,
    own_copy,
)
from jaxdp.trees import place, stacked

PyTree = Any


class Trainer:
    """The functions of one training program, and what they share."""

    def __init__(self, replica: Replica, mesh: Mesh):
        """Makes them; nothing compiles before it is called."""
        self.replica = replica
        self.mesh = mesh
        self.replicated = NamedSharding(mesh, P())
        self.ranks = ranks_of(mesh)  # of processes
        self.agreed: set[Any] = set()  # shapes whose programs have been compared
        design, axis_name = replica.design, replica.axis_name
        per_replica = replica.loss.policy == "per_replica"
        spec = TrainState(
            step=P(),
            params=design.params_spec(axis_name, replica.loss.precision),
            opt_state=design.opt_state_spec(axis_name),
            rng=P(),
            model_state=P(axis_name) if per_replica else P(),
            loss_scale=P(),
            design=design,
        )
        self.specs = (spec, P(axis_name))
        self.batches = Batches(mesh, design.serving_ranks)
        sharding = jax.tree.map(
            lambda part: NamedSharding(mesh, part),
            spec,
            is_leaf=lambda part: isinstance(part, P),
        )
        self.jitted_init = jax.jit(self._init, out_shardings=sharding)
        platform = mesh.devices.flat[0].platform
        # XLA's CPU devices of a process share threads, and a device that waits in a
        # permute holds one: with many steps in flight none is left to send, and after
        # a while XLA ends the process.
        self.one_by_one = platform == "cpu" and len(mesh.local_devices) > 1
        self.jitted_step = jax.jit(
            self._step,
            donate_argnums=0,
            in_shardings=(sharding, NamedSharding(mesh, P(axis_name))),
            out_shardings=(sharding, self.replicated),
            compiler_options=design.compiler_options(platform) or None,
        )
        self.run_step = without_mesh(self.jitted_step)
        self.jitted_flush = jax.jit(
            self._flush,
            donate_argnums=0,
            in_shardings=(sharding,),
            out_shardings=sharding,
        )
        self.jitted_params = jax.jit(
            lambda kept: jax.tree.map(jnp.copy, design.full_params(kept)),
            out_shardings=self.replicated,
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
        given = {"params": params, "rng": rng, "model_state": model_state}
        check_same_devices(self.mesh, self.ranks)
        check_same_tree(given, self.ranks)
        # Moves arrays from other devices or meshes; the copy in `_init` unties them.
        given = on_all((params, rng, model_state), self.replicated)
        return without_mesh(self.jitted_init)(*given)

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict]:
        """One optimizer update."""
        self._check(state, "step")
        batch = self.batches.placed(batch)
        if len(self.ranks) > 1:
            self._agree(state, batch)
        if self.one_by_one:
            jax.block_until_ready(state.step)
        return self.run_step(state, batch)

    def params(self, state: TrainState) -> PyTree:
        """A copy of the parameters, which later steps do not donate."""
        self._check(state, "params", wait=True)
        if self.specs[0].params == P():
            return without_mesh(jax.tree.map)(jnp.copy, state.params)
        return without_mesh(self.jitted_params)(state.params)

    def model_state(self, state: TrainState) -> PyTree:
        """A copy of the model state that survives."""
        self._check(state, "model_state")
        if self.specs[0].model_state == P():
            return without_mesh(jax.tree.map)(jnp.copy, state.model_state)
        return self.surviving(state.model_state)

    def surviving(self, model_state: PyTree) -> PyTree:
        """Of copies of all replicas the first worker's. NumPy arrays stay such."""
        first = self.batches.first_worker
        return jax.tree.map(lambda leaf: leaf[first], model_state)

    def buckets(self, params: PyTree, batch: PyTree = None) -> Buckets:
        """Which gradients travel together."""
        state = params
        if not isinstance(state, TrainState):
            check_params(params, "train.buckets")
            state = jax.eval_shape(self.jitted_init, params, None, None)
        design = self.replica.design
        if batch is not None:
            contribution = self._contribution(state, batch)
        else:
            full = jax.eval_shape(design.full_params, state.params)
            contribution = self.replica.gradients_only(full)
        return Buckets.of(design.buckets(contribution), _named(contribution))

    def _contribution(self, state: TrainState, batch: PyTree) -> Contribution:
        """Shapes of what a replica contributes to a step."""
        body = self.on_replicas(self.replica.contribution, P())
        return without_mesh(jax.eval_shape)(body, state, self.batches.given(batch))

    def flush(self, state: TrainState) -> TrainState:
        """Applies the gradients still in flight."""
        self._check(state, "flush")
        if not self.replica.design.max_staleness:
            return state
        return without_mesh(self.jitted_flush)(state)

    def trace(self, state: TrainState, batch: PyTree) -> jax.stages.Traced:
        """The step's program as it is written, before XLA has seen it."""
        self._check(state, "trace")
        return without_mesh(self.jitted_step.trace)(state, self.batches.given(batch))

    def trace_on(self, mesh: Any, state: PyTree, batch: PyTree) -> ClosedJaxpr:
        """The step's program on a mesh that may be abstract, of shapes alone.

        Args:
            mesh: With the axes of this training's mesh.
            state: Shapes of the state of a training on that mesh.
            batch: Shapes of the batch as a compiled step takes it.
        """
        step = self.on_replicas(self.replica.step, (self.specs[0], P()), mesh=mesh)
        return without_mesh(jax.make_jaxpr(step))(state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """The step's program."""
        self._check(state, "lower")
        return without_mesh(self.jitted_step.lower)(state, self.batches.given(batch))

    def on(self, mesh: Mesh) -> "Trainer":
        """The same training on another mesh, whose devices need not be here.

        Raises:
            ValueError: The design needs another number of devices.
        """
        self.replica.design.check(mesh.devices.shape[0])
        return Trainer(self.replica, mesh)

    def lower_abstract(self, given: PyTree, batch: PyTree) -> jax.stages.Lowered:
        """The step's program, of `shapes` alone."""
        shapes = self.shapes(given, batch)
        return without_mesh(self.jitted_step.lower)(*shapes)

    def shapes(self, given: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Shapes of state and batch as the step takes them.

        Args:
            given: Parameters, or a state of this training on any mesh.
            batch: The global batch.
        """
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
        state = jax.eval_shape(self.jitted_init, *self.initial(given))
        return state, self.batches.given(shapes)

    def initial(self, given: PyTree) -> tuple[PyTree, Any, PyTree]:
        """Parameters, key and model state that a state was made of.

        Args:
            given: Parameters, or a state of this training on any mesh.
        """
        if not isinstance(given, TrainState):
            return given, None, None
        model_state = given.model_state
        if self.specs[0].model_state != P():  # a copy for each replica
            model_state = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), model_state
            )
        params = jax.eval_shape(given.design.full_params, given.params)
        return params, given.rng, model_state

    def _check(self, state: TrainState, caller: str, wait: bool = False) -> None:
        """Refuses a state of another program, or one whose loss scale has failed.

        The loss scale is looked at when it is there, unless `wait`: a step must not
        wait for the step before it.
        """
        caller = f"train.{caller}"
        check_state(state, self.replica.design, self.replicated, caller)
        if state.loss_scale is None:
            return
        is_ready = getattr(state.loss_scale.failed_step, "is_ready", lambda: True)
        if (wait or is_ready()) and has_failed(state.loss_scale):
            params = jax.eval_shape(self.replica.design.full_params, state.params)
            names = [name for name, _ in _named(params, "params")]
            check_not_failed(state.loss_scale, names, caller)

    def _agree(self, state: TrainState, batch: PyTree) -> None:
        """Compares the program for these shapes with that of the other processes."""
        leaves, structure = jax.tree.flatten((state, batch))
        shapes = structure, *((leaf.shape, leaf.dtype) for leaf in leaves)
        if shapes not in self.agreed:
            lowered = without_mesh(self.jitted_step.lower)(state, batch)
            check_same_program(lowered.as_text(), self.ranks)
            self.agreed.add(shapes)

    def _init(self, params, rng, model_state) -> TrainState:
        """The state of copies of what was given."""
        params, rng, model_state = own_copy((params, rng, model_state))
        design, sizes = self.replica.design, self.mesh.devices.shape
        precision = self.replica.loss.precision
        if precision is not None:
            params = precision.to_params(params)
        opt_state = design.init_opt_state(self.replica.optimizer, params, sizes)
        if self.specs[0].model_state != P():
            model_state = stacked(model_state, (self.mesh.size,))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=design.init_params(params, sizes, precision),
            opt_state=opt_state,
            rng=rng,
            model_state=model_state,
            loss_scale=precision.initial() if precision else None,
            design=design,
        )

    def _step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict]:
        """The global program: traced, proven, then inlined."""
        full = jax.eval_shape(self.replica.design.full_params, state.params)
        fresh = jax.eval_shape(self.jitted_init, full, state.rng, None)
        check_opt_state(state.opt_state, fresh.opt_state)
        step = self.on_replicas(self.replica.step, (self.specs[0], P()))
        loss = self.on_replicas(self.replica.total, P())

        def traced_loss():
            return jax.make_jaxpr(loss)(state, batch)

        program, shapes = jax.make_jaxpr(step, return_shape=True)(state, batch)
        prove(program, shapes, self.specs[0], self.mesh.axis_names, traced_loss)
        results = jaxpr_as_fun(program)(*jax.tree.leaves((state, batch)))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    def _flush(self, state: TrainState) -> TrainState:
        """The global program of a flush."""
        spec = self.specs[0]
        return self.on_replicas(self.replica.flush, spec, (spec,))(state)

    def on_replicas(
        self, body: Callable, out_specs: Any, in_specs: Any = None, mesh: Any = None
    ) -> Callable:
        """Runs `body(state, batch)` on every device, here or on a mesh like this one.

        Args:
            body: Of a state and a batch, or of what `in_specs` says.
            out_specs: How its results lie on the mesh.
            in_specs: How its arguments do; None for those of a state and a batch.
            mesh: Another one, which may be abstract; None for this training's.
        """
        return jax.shard_map(
            body,
            mesh=self.mesh if mesh is None else mesh,
            in_specs=in_specs or self.specs,
            out_specs=out_specs,
            check_vma=False,  # see the module docstring
        )


def _named(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """Leaves with their names; gradients are called as their parameters."""
    named = jax.tree_util.tree_leaves_with_path(tree)
    return [
        (place(path, root).replace("gradients", "params", 1), leaf)
        for path, leaf in named
    ]
