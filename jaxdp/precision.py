"""Mixed precision: 16-bit compute on float32 master weights, with loss scaling.

The step casts parameters and batch to `compute`, so that activations and the products
of forward and backward pass are 16-bit; the gradient with respect to the master weights
is theirs, and so are the reduction and the optimizer: Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3. bfloat16 has the range of float32 and needs
no more. float16 flushes values below 2^-25 to zero and overflows above 65,504: a loss
scale lifts gradients into its range, and a dynamic one finds out how far. A step with a
gradient that is not finite is skipped on all replicas, and the scale backs off; after
`growth_interval` good steps in a row it grows. It stays between `min_scale` and
`max_scale`. Powers of two make scaling and unscaling exact.

Why not Flax's `DynamicScale`: it computes the gradient, averages it by `pmean` and
updates its scale in one function, so that no other exchange fits in between, and it
knows no cap, no floor that fails, and not which gradient overflowed.
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

PyTree = Any
DTYPES = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(jnp.bfloat16),
    "fp16": np.dtype(np.float16),
    "f64": np.dtype(np.float64),
}
_NAMES = {name: name for name in DTYPES} | {"f16": "fp16"}
_FLOAT32 = np.finfo(np.float32)


class LossScaleWarning(UserWarning):
    """float16 is about to lose gradients that a loss scale would keep."""


class LossScale(NamedTuple):
    """What a loss scale carries from step to step, the same on all replicas.

    Attributes:
        scale: `[]`, float32, what the loss of the next step is multiplied by.
        good_steps: `[]`, int32, steps since the scale changed, or could not.
        skipped: `[]`, int32, steps skipped in all.
        failed_step: `[]`, int32, the first step that overflowed at the floor, or -1.
        failed_leaf: `[]`, int32, the first leaf that was not finite in it, or -1.
    """

    scale: Any
    good_steps: Any
    skipped: Any
    failed_step: Any
    failed_leaf: Any


@dataclasses.dataclass(frozen=True)
class Precision:
    """Which dtype computes, which one keeps the parameters, and how a loss is scaled.

    With float16, let `loss_fn` average in float32: a loss that is itself float16
    overflows as soon as the scale passes 65,504. Layers that widen are not noticed: in
    Flax, give `nnx.Embed` and `nnx.BatchNorm` a `dtype`; others follow their inputs.

    Attributes:
        compute: Of parameters and batch inside `loss_fn`: "f32", "bf16", "fp16", "f64",
            or a NumPy dtype, which becomes such a name.
        params: Of the parameters between steps, of their gradients, and of the
            optimizer state. Updates below half a unit in the last place are lost, which
            in bfloat16 is up to a 256th of the parameter: keep "f32".
        loss_scale: "dynamic", a fixed number, or None. A fixed scale never changes and
            never fails: overflows skip steps and are counted.
        initial_scale: A dynamic scale starts here.
        growth_factor: What it grows by, above 1.
        backoff_factor: What an overflow multiplies it by, between 0 and 1.
        growth_interval: After how many steps without overflow it grows.
        min_scale: Its floor. An overflow at the floor fails the run: a smaller scale
            would lose more and not help.
        max_scale: Its cap.
        cast_batch: Whether the batch is cast, too.

    Raises:
        ValueError: An unknown dtype, or a number out of its range.

    Example:
        >>> import jaxdp
        >>> jaxdp.precision.Precision("fp16", loss_scale="dynamic").initial().scale
        Array(65536., dtype=float32)
    """

    compute: DTypeLike
    params: DTypeLike = "f32"
    loss_scale: Literal["dynamic"] | float | None = None
    initial_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 1.0
    max_scale: float = 2.0**24
    cast_batch: bool = True

    def __post_init__(self):
        """Checks the options and names the dtypes."""
        for field in ("compute", "params"):
            object.__setattr__(self, field, _name(field, getattr(self, field)))
        low, high = self.min_scale, self.max_scale
        if self.loss_scale is not None and not self.dynamic:
            self._check("loss_scale", _is_normal, "'dynamic', None, or normal float32")
        self._check("min_scale", _is_normal, "normal in float32, above 0")
        self._check("max_scale", _is_normal, "normal in float32, above 0")
        self._check("max_scale", lambda x: x >= low, f"at least min_scale={low:g}")
        between = f"from min_scale={low:g} to max_scale={high:g}"
        self._check("initial_scale", lambda x: low <= x <= high, between)
        above, below = (float(np.nextafter(np.float32(1), end)) for end in (2, 0))
        self._check("growth_factor", lambda x: above <= x < math.inf, "above 1, finite")
        self._check("backoff_factor", lambda x: 0 < x <= below, "above 0, below 1")
        whole = isinstance(self.growth_interval, numbers.Integral)
        count = "a whole number from 1 to 2^31 - 1"  # good steps are int32
        self._check("growth_interval", lambda x: whole and 1 <= x < 2**31, count)
        if self.compute == "fp16" and self.loss_scale is None:
            _warn_once()

    @property
    def dynamic(self) -> bool:
        """Whether the loss scale changes by itself."""
        return isinstance(self.loss_scale, str) and self.loss_scale == "dynamic"

    def to_params(self, tree: PyTree) -> PyTree:
        """Casts the real floating leaves to the dtype of parameters."""
        return _cast(tree, DTYPES[str(self.params)])

    def to_compute(self, tree: PyTree) -> PyTree:
        """Casts the real floating leaves to the dtype that computes."""
        return _cast(tree, DTYPES[str(self.compute)])

    def initial(self) -> LossScale | None:
        """The loss scale before the first step; None if losses are not scaled."""
        if self.loss_scale is None:
            return None
        scale = self.initial_scale if self.dynamic else self.loss_scale
        zero, none = jnp.zeros((), jnp.int32), jnp.full((), -1, jnp.int32)
        return LossScale(jnp.asarray(scale, jnp.float32), zero, zero, none, none)

    def _check(self, field: str, holds: Callable[[float], bool], required: str) -> None:
        """Refuses what is no number, or not the one required."""
        given = getattr(self, field)
        if isinstance(given, numbers.Real) and not isinstance(given, bool):
            if holds(float(given)):
                return
        raise ValueError(
            f"Precision got {field}={given!r}. It must be {required}. Leave it out to "
            f"take the default, {getattr(type(self), field)!r}."
        )


def unscaled(gradients: PyTree, scale: jax.Array | None) -> PyTree:
    """Divides gradients by the scale of their loss, in float32 or wider.

    Every replica divides its own, before they are summed: so sums cannot overflow
    because of the scale, and replicas with other scales would still agree.
    """
    if scale is None:
        return gradients

    def divide(leaf):
        wide = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
        return (wide / scale).astype(leaf.dtype)

    return jax.tree.map(divide, gradients)


def next_loss_scale(
    precision: Precision, state: LossScale, nonfinite_leaf: jax.Array, step: jax.Array
) -> LossScale:
    """The loss scale after a step: the rule of PyTorch's `GradScaler`, with limits.

    Devices: all must give the same `nonfinite_leaf`, that of the averaged gradients.

    Args:
        precision: The options.
        state: The loss scale of this step.
        nonfinite_leaf: `[]`, int32, as of `first_nonfinite`.
        step: `[]`, int32, how errors name this step.

    Returns:
        That of the next step; to the bit PyTorch's if float32 holds both factors.

    Example:
        >>> import jax.numpy as jnp, jaxdp
        >>> precision = jaxdp.precision.Precision("fp16", loss_scale="dynamic")
        >>> state = jaxdp.precision.next_loss_scale(
        ...     precision, precision.initial(), jnp.array(2), jnp.array(0))
        >>> print(state.scale, state.skipped)
        32768.0 1
    """
    overflow = nonfinite_leaf >= 0
    skipped = state.skipped + overflow
    if not precision.dynamic:
        return state._replace(skipped=skipped)
    good_steps = jnp.where(overflow, 0, state.good_steps + 1)
    grows = good_steps >= precision.growth_interval
    larger = jnp.minimum(state.scale * precision.growth_factor, precision.max_scale)
    smaller = jnp.maximum(state.scale * precision.backoff_factor, precision.min_scale)
    scale = jnp.where(overflow, smaller, jnp.where(grows, larger, state.scale))
    fails = overflow & (state.scale <= precision.min_scale) & (state.failed_step < 0)
    return LossScale(
        scale,
        jnp.where(grows, 0, good_steps),
        skipped,
        jnp.where(fails, step, state.failed_step),
        jnp.where(fails, nonfinite_leaf, state.failed_leaf),
    )


def first_nonfinite(leaves: Sequence[jax.Array]) -> jax.Array:
    """The index of the first leaf with an element that is not finite, or -1.

    Cost: reads every element once.

    Args:
        leaves: Floating or complex arrays.

    Returns:
        `[]`, int32.
    """
    found = jnp.full((), -1, jnp.int32)
    for index, leaf in reversed([*enumerate(leaves)]):
        found = jnp.where(jnp.all(jnp.isfinite(leaf)), found, index)
    return found


def has_failed(state: LossScale) -> bool:
    """Whether gradients overflowed at the floor; waits for the step that says so."""
    return not isinstance(state.failed_step, Tracer) and int(state.failed_step) >= 0


def check_not_failed(state: LossScale, names: Sequence[str], caller: str) -> None:
    """Ends a run whose gradients overflow at the smallest scale.

    Waits until the step that made the state is done; on tracers it does nothing.

    Args:
        state: The loss scale.
        names: Of the leaves of the parameters.
        caller: Whom the error speaks for.

    Raises:
        FloatingPointError: It has failed; names the step and the leaf.
    """
    if not has_failed(state):
        return
    raise FloatingPointError(
        f"{caller} got a state whose loss scale was at its floor, {state.scale:g}, "
        f"when step {state.failed_step} overflowed; {state.skipped} step(s) were "
        "skipped in all. Gradients must be finite at the smallest scale. The first "
        f"that was not is that of {names[int(state.failed_leaf)]}. Look for infinities "
        "in the batch, lower the learning rate, or compute in bf16; a smaller "
        "min_scale= only helps if the gradients overflow by a small factor."
    )


def _is_normal(number: float) -> bool:
    """Whether a number is positive and normal in float32: XLA may flush others."""
    return float(_FLOAT32.tiny) <= number <= float(_FLOAT32.max)


def _name(field: str, given: Any) -> str:
    """The short name of a dtype."""
    if isinstance(given, str) and given in _NAMES:  # NumPy's "f16" has 16 bytes
        return _NAMES[given]
    if given is not None:  # which NumPy takes for float64
        with contextlib.suppress(TypeError):
            dtype = jnp.dtype(given)
            for name, known in DTYPES.items():
                if dtype == known:
                    return name
    raise ValueError(
        f"Precision got {field}={given!r}. It must be one of "
        f"{', '.join(map(repr, DTYPES))} or such a NumPy dtype. Use "
        f"{field}={'f32' if field == 'params' else 'bf16'!r}."
    )


def _cast(tree: PyTree, dtype: np.dtype) -> PyTree:
    """Casts real floating leaves; others, such as keys and counts, are left alone."""
    if dtype.itemsize > 4 and not jax.config.jax_enable_x64:  # pyright: ignore
        raise ValueError(
            "Precision got 'f64', and JAX keeps no 64-bit arrays. Set "
            "jax.config.update('jax_enable_x64', True) first, or use 'f32'."
        )

    def cast(leaf):
        kind = getattr(leaf, "dtype", None)
        real = kind is not None and jnp.issubdtype(kind, jnp.floating)
        return leaf.astype(dtype) if real else leaf

    return jax.tree.map(cast, tree)


@functools.cache
def _warn_once() -> None:
    """Warns of float16 without a loss scale."""
    warnings.warn(
        "Precision got compute='fp16' and no loss_scale. float16 flushes gradients "
        "below 2**-25 to zero. Pass loss_scale='dynamic', or compute in 'bf16', which "
        "needs none.",
        LossScaleWarning,
        stacklevel=4,  # past __post_init__ and __init__, where it is made
    )
