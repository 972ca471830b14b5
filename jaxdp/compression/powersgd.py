"""PowerSGD: a gradient matrix travels as the product of two thin ones.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical low-rank gradient compression for
distributed optimization", NeurIPS 2019, algorithm 1: one step of subspace iteration,
from the factor `Q` of the step before. Replica w has the matrix `M_w`, and `mean` is
over replicas:

    P = mean(M_w Q)           [rows, rank]        travels
    P = an orthonormal basis of its columns       the same on all replicas
    Q_w = M_w' P              [columns, rank]
    Q = mean(Q_w)                                 travels, and is kept
    mean of M_w ~ P Q'        a replica's own share of it is P Q_w'

A leaf of more than two dimensions is cut into rows and columns where the two are
fewest; a convolution `[3, 3, 16, 32]` makes 144 rows and 32 columns. A leaf that two
thin matrices would not make smaller travels whole: all with fewer than two dimensions.

Why QR: Gram-Schmidt, as in the paper, makes zeros of a zero gradient, and `Q` would be
zero from then on.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdp import marks
from jaxdp.compression.base import Compression, Exact, PyTree, Travelled, Wire
from jaxdp.executor import accumulation_dtype


class Factor(NamedTuple):
    """What is kept for one matrix: `Q`, and what `inner` keeps of both factors."""

    q: jax.Array
    inner: tuple[PyTree, PyTree]


@dataclasses.dataclass(frozen=True)
class PowerSGD(Compression):
    """Low-rank matrices, by subspace iteration.

    Cost: two all-reduces, of rank * (rows + columns) numbers for every matrix, and of
    the leaves that travel whole. Each matrix takes 6 rank rows columns flops, and one
    QR decomposition of `[rows, rank]`.

    Attributes:
        rank: Of the product, at least 1.
        start_step: Until so many optimizer steps are done, leaves travel exactly.
        error_feedback: On: the product is biased.
        inner: How factors and whole leaves travel; None for exactly. Its own error
            feedback is not used: this one's covers it.
        seed: Of the first `Q`.

    Raises:
        ValueError: `rank` is below 1, or `start_step` negative.
    """

    rank: int
    start_step: int = 0
    error_feedback: bool = True
    inner: Compression | None = None
    seed: int = 0

    def __post_init__(self):
        """Checks the options."""
        if self.rank < 1 or self.start_step < 0:
            raise ValueError(
                f"PowerSGD got rank={self.rank} and start_step={self.start_step}. "
                "The rank must be at least 1, and the step at least 0. Use rank=4, "
                "start_step=0."
            )

    @property
    def carries_nonfinite(self):
        """As what factors travel as: they are non-finite where a matrix is."""
        return self._inner.carries_nonfinite

    @property
    def _inner(self) -> Compression:
        return Exact() if self.inner is None else self.inner

    def check(self, params):
        """Checks the leaves' dtypes, and that some are large enough.

        Raises:
            TypeError: Names the leaves that are not real floating.
            ValueError: Every leaf would travel whole.
        """
        super().check(params)
        leaves = jax.tree_util.tree_leaves_with_path(params)
        if any(self.matrix_shape(jnp.shape(leaf)) for _, leaf in leaves):
            return
        sizes = [
            f"{jax.tree_util.keystr(path) or 'the array'} {jnp.shape(leaf)}"
            + self._arithmetic(jnp.shape(leaf))
            for path, leaf in leaves
        ]
        raise ValueError(
            f"PowerSGD got rank={self.rank}, and no parameter that it makes smaller. "
            "A matrix must have rank x (rows + columns) < rows x columns: "
            f"{'; '.join(sizes)}. Use a smaller rank, or no compression."
        )

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """Rows and columns of a leaf of this shape; None if it travels whole."""
        if len(shape) < 2:
            return None
        rows, columns = _cut(shape)
        return (
            (rows, columns) if self.rank * (rows + columns) < rows * columns else None
        )

    def seed_matrix(self, shape: tuple[int, int], dtype: Any) -> jax.Array:
        """The first `Q`: normal numbers, the same on all replicas."""
        return jax.random.normal(jax.random.key(self.seed), shape, dtype)

    def init(self, leaf):
        """The factor of a matrix; of a whole leaf what `inner` keeps."""
        matrix = self.matrix_shape(leaf.shape)
        if matrix is None:
            return self._inner.init(leaf)
        dtype = accumulation_dtype(leaf.dtype)
        q = self.seed_matrix((matrix[1], self.rank), dtype)
        p = jnp.zeros((matrix[0], self.rank), dtype)
        return Factor(q, (self._inner.init(p), self._inner.init(q)))

    def mean(self, leaves, states, wire):
        """Averages: exactly before `start_step`, as thin matrices from then on."""
        leaves = [leaf.astype(accumulation_dtype(leaf.dtype)) for leaf in leaves]
        if not self.start_step:
            return self._thin(leaves, states, wire)
        return lax.cond(  # all replicas are at the same step
            wire.step < self.start_step,
            lambda: Travelled(wire.mean(leaves), leaves, states),
            lambda: self._thin(leaves, states, wire),
        )

    def _thin(self, leaves: list[jax.Array], states: list[PyTree], wire: Wire):
        """Averages the factors, then multiplies them; whole leaves travel with P."""
        shapes = [self.matrix_shape(leaf.shape) for leaf in leaves]
        thin = [i for i, shape in enumerate(shapes) if shape]
        matrices = [leaves[i].reshape(shapes[i]) for i in thin]
        first: list[jax.Array] = list(leaves)
        kept: list[PyTree] = list(states)
        for i, matrix in zip(thin, matrices, strict=True):
            first[i] = _product(matrix, states[i].q)
            kept[i] = states[i].inner[0]
        travelled = self._inner.mean(first, kept, wire.only(range(len(leaves)), 0))
        if not thin:
            return travelled
        means, sent, kept = travelled
        bases = [jnp.linalg.qr(means[i])[0] for i in thin]
        own = [_product(m.T, basis) for m, basis in zip(matrices, bases, strict=True)]
        # The guard may not take P, a sum, for the gradient of one replica: from here on
        # these count as gradients of their own, to be summed once.
        own = marks.gradients({"PowerSGD": own})["PowerSGD"]
        old = [states[i].inner[1] for i in thin]
        second = self._inner.mean(own, old, wire.only(thin, 1))
        for i, basis, q, share, state in zip(thin, bases, *second, strict=True):
            means[i] = _product(basis, q.T).reshape(leaves[i].shape)
            sent[i] = _product(basis, share.T).reshape(leaves[i].shape)
            kept[i] = Factor(q, (kept[i], state))
        return Travelled(means, sent, kept)

    def _arithmetic(self, shape: tuple[int, ...]) -> str:
        """Why a leaf of this shape travels whole."""
        if len(shape) < 2:
            return " is no matrix"
        rows, columns = _cut(shape)
        thin, whole = self.rank * (rows + columns), rows * columns
        return f": {self.rank} x ({rows} + {columns}) = {thin} >= {whole}"


def _cut(shape: tuple[int, ...]) -> tuple[int, int]:
    """The rows and columns of a leaf: the cut where their sum is least."""
    cuts = [
        (math.prod(shape[:axis]), math.prod(shape[axis:]))
        for axis in range(1, len(shape))
    ]
    return min(cuts, key=sum)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A matrix product that no accelerator rounds to fewer bits."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
