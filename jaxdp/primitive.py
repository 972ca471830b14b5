"""The JAX primitive of jaxdp: a collective that knows its type and its transpose.

Run bare, the `ppermute` rounds of a ring would have two faults. Under `check_vma=True`
JAX cannot infer that all devices end with the same value, so `out_specs=P()` is
refused. And autodiff would transpose the rounds one by one, through casts to wire bits
that have no derivative. The primitive wraps the rounds and states both facts:

    collective       result       transpose: result varying   result replicated
    all_reduce       replicated   all_reduce                  the cotangent itself
    all_gather       replicated   reduce_scatter              own chunk
    broadcast        replicated   reduce                      the cotangent, on the root
    reduce_scatter   varying      all_gather
    reduce           varying      broadcast
    gather           varying      scatter
    scatter          varying      gather
    push, collect    varying      none: servers are for designs, which nothing
    pull             replicated   differentiates

"Replicated" is a type that exists under `check_vma=True` only; there a cotangent is one
value for all devices and nothing has to travel. Without the check every device's result
counts as a variable of its own, as for `lax.psum`.

A second form, `collective_after_p`, also takes what it waits for, and tells when it is
done. It has no transpose.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from jaxdp import algorithms, executor
from jaxdp.schedule import Schedule, local_rows, verify
from jaxdp.waiting import never

AxisName = str | tuple[str, ...]

REPLICATED = frozenset({"all_reduce", "all_gather", "broadcast", "pull"})
SUMMING = frozenset({"all_reduce", "reduce_scatter", "reduce", "push"})
TRANSPOSED = {
    "all_reduce": "all_reduce",
    "reduce_scatter": "all_gather",
    "all_gather": "reduce_scatter",
    "reduce": "broadcast",
    "broadcast": "reduce",
    "gather": "scatter",
    "scatter": "gather",
}


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective over a mesh axis, or several: which kind, by which rounds.

    Attributes:
        kind: A row of the table above.
        schedule: The rounds.
        axis_name: The mesh axis; of several, ranks count through the last one first.
        root: Rank of the root; 0 where the kind has none.
        divisor: Results are divided by it before they are rounded to the input's dtype.
        unroll: Whether every round is written out, as in `jaxdp.executor.execute`.
    """

    kind: str
    schedule: Schedule
    axis_name: AxisName
    root: int = 0
    divisor: int = 1
    unroll: bool | None = None

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes."""
        return _axes(self.axis_name)

    def __call__(self, chunks: jax.Array) -> jax.Array:
        """Runs on `[chunks, length]`, as in `jaxdp.executor.execute`."""
        replicated = self.kind in REPLICATED and is_checked(self.axis_name)
        return self._bind(chunks, replicated)

    def run_after(
        self, after: jax.Array | None, chunks: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """As a call, but nothing is sent before something else is there.

        Not differentiable, and not for `vmap`: for designs.

        Args:
            after: `[]`, a bool of `jaxdp.waiting.never`; None to wait for nothing.
            chunks: As for a call, and not empty.

        Returns:
            What a call returns; and `[]`, such a bool of what the last round brings.
        """
        replicated = self.kind in REPLICATED and is_checked(self.axis_name)
        chunks = self._varying(chunks)
        after = jnp.zeros((), bool) if after is None else after
        rounds = jax.make_jaxpr(self._rounds_after)(chunks, after)
        how = {"collective": self, "replicated": replicated, "rounds": rounds}
        return tuple(collective_after_p.bind(chunks, after, **how))

    def _bind(self, chunks: jax.Array, replicated: bool) -> jax.Array:
        """Runs, and types the result as replicated or as varying."""
        if not chunks.size:
            return jnp.zeros((local_rows(self.schedule.ends), 0), chunks.dtype)
        chunks = self._varying(chunks)
        rounds = jax.make_jaxpr(self._rounds)(chunks)
        return collective_p.bind(
            chunks, collective=self, replicated=replicated, rounds=rounds
        )

    def _varying(self, chunks: jax.Array) -> jax.Array:
        """Chunks whose type says that they differ between devices."""
        missing = self.axes - varying_axes(chunks)
        return lax.pcast(chunks, tuple(sorted(missing)), to="varying")

    def _rounds(self, chunks: jax.Array) -> jax.Array:
        """The explicit program: `ppermute`s and additions."""
        return self._executed(None, chunks)[0]

    def _rounds_after(
        self, chunks: jax.Array, after: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """The same, but later; and that it is done."""
        result, landed = self._executed(after, chunks)
        return result, never(landed)

    def _executed(
        self, after: jax.Array | None, chunks: jax.Array
    ) -> tuple[jax.Array, list[jax.Array]]:
        """The result, and what the last round brings.

        A sum that is narrowed is divided and rounded once, by whoever completed it, and
        travels on in the narrow dtype. Other sums are divided at the end, by everybody,
        to the same bits: earlier, XLA would compute them twice, to send and to keep.
        """

        def finish(complete):
            if self.divisor > 1:
                complete = complete / self.divisor
            return complete.astype(chunks.dtype)

        narrows = executor.accumulation_dtype(chunks.dtype) != chunks.dtype
        result, landed = executor.execute_after(
            *(after, self.schedule, chunks, self.axis_name),
            **({"finish": finish} if narrows else {}),
            unroll=self.unroll,
        )
        return result if narrows else finish(result), landed

    def transpose(self, cotangent: jax.Array, replicated: bool) -> jax.Array:
        """Applies the transposed collective; see the table above."""
        if self.kind not in TRANSPOSED:
            raise NotImplementedError(
                f"A {self.kind} over {self.axis_name!r} was differentiated. Parameter "
                "servers have no gradient: only an optimizer stands behind them. "
                "Differentiate the loss function instead."
            )
        if not replicated:
            transposed = self._transposed()
            rows = local_rows(transposed.schedule.starts)
            result = transposed._bind(cotangent.reshape(rows, -1), replicated=False)
            return result.reshape(local_rows(self.schedule.starts), -1)
        if self.divisor > 1:
            cotangent = cotangent / self.divisor
        cotangent = lax.pcast(cotangent, tuple(sorted(self.axes)), to="varying")
        rank = lax.axis_index(self.axis_name)
        if self.kind == "all_gather":
            return lax.dynamic_slice_in_dim(cotangent, rank, 1)
        if self.kind == "broadcast":
            return jnp.where(rank == self.root, cotangent, 0)
        return cotangent

    def _transposed(self) -> "Collective":
        """The collective that carries cotangents back."""
        kind = TRANSPOSED[self.kind]
        if kind == self.kind:
            schedule = self.schedule
        else:
            (algorithm, *_) = algorithms.SCHEDULES[kind]
            devices = self.schedule.devices
            schedule = algorithms.build(kind, algorithm, devices, self.root)
        return dataclasses.replace(self, kind=kind, schedule=verify(schedule))


collective_p = Primitive("jaxdp_collective")


@collective_p.def_abstract_eval
def _abstract_eval(chunks, *, collective, replicated, rounds):
    """The type of the rounds' result; replicated values drop the axis from it."""
    result, *_ = rounds.out_avals
    varying = chunks.mat.varying
    if replicated:
        varying = varying - collective.axes
    return result.update(manual_axis_type=chunks.mat.update(varying=varying))


@collective_p.def_impl
def _run(chunks, *, collective, replicated, rounds):
    """Runs the rounds as they stand in the jaxpr."""
    del collective, replicated
    (result,) = jaxpr_as_fun(rounds)(chunks)
    return result


mlir.register_lowering(collective_p, mlir.lower_fun(_run, multiple_results=False))


def _transpose(cotangent, chunks, *, collective, replicated, rounds):
    """Reverse mode."""
    del chunks, rounds
    return [collective.transpose(cotangent, replicated)]


ad.deflinear2(collective_p, _transpose)


def _batch(arguments, dimensions, *, collective, replicated, rounds):
    """`vmap`: rounds are elementwise along `length`, so a batch is a longer chunk."""
    del rounds
    batch = jnp.moveaxis(arguments[0], dimensions[0], -1)
    result = collective._bind(batch.reshape(batch.shape[0], -1), replicated)
    return result.reshape(result.shape[0], *batch.shape[1:]), 2


batching.primitive_batchers[collective_p] = _batch


collective_after_p = Primitive("jaxdp_collective")
collective_after_p.multiple_results = True


@collective_after_p.def_abstract_eval
def _abstract_eval_after(chunks, after, *, collective, replicated, rounds):
    """The types of the rounds' result and of what tells that they are done."""
    del after
    how = {"collective": collective, "replicated": replicated, "rounds": rounds}
    return [_abstract_eval(chunks, **how), rounds.out_avals[1]]


@collective_after_p.def_impl
def _run_after(chunks, after, *, collective, replicated, rounds):
    """Runs the rounds as they stand in the jaxpr."""
    del collective, replicated
    return jaxpr_as_fun(rounds)(chunks, after)


mlir.register_lowering(
    collective_after_p, mlir.lower_fun(_run_after, multiple_results=True)
)


def varying_axes(x: jax.Array) -> frozenset:
    """The mesh axes along which the type of `x` says it differs between devices."""
    return jax.typeof(x).mat.varying


def is_checked(axis_name: AxisName) -> bool:
    """Whether this runs under `check_vma=True`: there ranks have a varying type."""
    return _axes(axis_name) <= varying_axes(lax.axis_index(axis_name))


def _axes(axis_name: AxisName) -> frozenset[str]:
    """The names, of one axis or of several."""
    return frozenset([axis_name] if isinstance(axis_name, str) else axis_name)
