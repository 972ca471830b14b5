"""What a compression is: one function from a bucket's gradients to their mean.

A compression of your own is a frozen dataclass with one method. Signs, scaled by their
mean magnitude (Bernstein et al., "signSGD", ICML 2018), gathered from all replicas:

    @dataclasses.dataclass(frozen=True)
    class Sign(jaxdp.Compression):
        error_feedback: bool = True

        def mean(self, leaves, states, wire):
            signs = [jnp.sign(x).astype(jnp.int8) for x in leaves]
            scales = [jnp.abs(x).mean() for x in leaves]
            pairs = zip(wire.gather(scales), wire.gather(signs), strict=True)
            means = [jnp.tensordot(*pair, 1) / wire.devices for pair in pairs]
            sent = [sign * scale for sign, scale in zip(signs, scales, strict=True)]
            return Travelled(wire.aggregated(means), sent, states)

`wire` moves arrays and says who and when this is. Whatever is made of the gathered
contributions of all replicas must pass `wire.aggregated`, which tells jaxdp's guard
that no sum is missing.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

PyTree = Any


class Travelled(NamedTuple):
    """What became of a bucket.

    Attributes:
        means: For each leaf the mean over replicas, as all of them end with it: the
            same bits everywhere, in the leaf's shape.
        sent: For each leaf what this replica's own has contributed to N times the mean:
            summed over replicas it is N times the mean, but for rounding. Error
            feedback keeps the difference between the leaf and this.
        states: For each leaf the next state.
    """

    means: list[jax.Array]
    sent: list[jax.Array]
    states: list[PyTree]


class Wire(Protocol):
    """What one bucket travels by; runs inside `shard_map`, on every replica.

    Arrays have any dtype that JAX can move, narrow floats as bits; those of one dtype
    travel together.
    """

    @property
    def devices(self) -> int:
        """N."""
        ...

    @property
    def rank(self) -> jax.Array:
        """Of this replica, an int32 scalar."""
        ...

    @property
    def step(self) -> jax.Array:
        """How many optimizer steps came before, an int32 scalar."""
        ...

    def keys(self, draw: int) -> jax.Array:
        """A key for each leaf, of this step, rank and draw; of no bucket.

        Args:
            draw: A number for each time that a step draws random numbers.
        """
        ...

    def only(self, indices: Sequence[int], draw: int) -> "Wire":
        """The wire of some of the leaves, whose keys are those of no other `draw`."""
        ...

    def mean(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """The mean over replicas by the design's all-reduce, in float32 or wider."""
        ...

    def to_owners(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Entry r to rank r: `[N, ...]` becomes `[N, ...]`, entry r from rank r."""
        ...

    def gather(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """From all to all: `[...]` becomes `[N, ...]`, the same bits everywhere."""
        ...

    def aggregated(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Names what was made of the contributions of all replicas, for the guard."""
        ...


class Compression(abc.ABC):
    """Base of all compressions: frozen, hashable dataclasses.

    Attributes:
        error_feedback: Whether what a step loses is added to the next step's gradient
            (Seide et al., "1-bit stochastic gradient descent", Interspeech 2014;
            Karimireddy et al., "Error feedback fixes SignSGD", ICML 2019). It costs a
            residual of the gradient's size on every replica.
    """

    error_feedback: bool = False

    @property
    def carries_nonfinite(self) -> bool:
        """Whether NaN or infinity on one replica always shows in the means of all.

        Otherwise `exchange` sees to it, by one more scalar that travels.
        """
        return False

    def check(self, params: PyTree) -> None:
        """Checks that gradients like these parameters can be compressed.

        Args:
            params: The parameters, or anything with `shape` and `dtype`.

        Raises:
            TypeError: Names the leaves that are not real floating.
        """
        bad = [
            f"{jax.tree_util.keystr(path) or 'the array'} {jnp.result_type(leaf)}"
            for path, leaf in jax.tree_util.tree_leaves_with_path(params)
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
        ]
        if bad:
            raise TypeError(
                f"{self} got parameters that are not real floating: {', '.join(bad)}. "
                "Only those have an order of magnitude to round to. Keep the others "
                "in model_state, or train without compression."
            )

    def init(self, leaf: jax.Array) -> PyTree:
        """What is kept for one parameter, the same on all replicas: nothing."""
        del leaf
        return ()

    @abc.abstractmethod
    def mean(
        self, leaves: list[jax.Array], states: list[PyTree], wire: Wire
    ) -> Travelled:
        """Averages the leaves of one bucket over the replicas.

        Devices: runs inside `shard_map`. Before, the leaves differ between replicas and
        the states are the same; after, means and states are the same.

        Args:
            leaves: This replica's, real floating, of one dtype.
            states: Of each leaf, as `init` made it or the last call left it.
            wire: Moves arrays between the replicas.
        """


@dataclasses.dataclass(frozen=True)
class Exact(Compression):
    """No compression: the exact mean, by the design's own all-reduce.

    Cost: ring, 2 (N - 1) K / N bytes sent per device.
    """

    @property
    def carries_nonfinite(self):
        """Sums do."""
        return True

    def mean(self, leaves, states, wire):
        """Averages."""
        return Travelled(wire.mean(leaves), leaves, states)
