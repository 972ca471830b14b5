"""Mixed precision: 16-bit compute on float32 master weights.

The step casts parameters and batch to `compute`, so that activations and the products
of forward and backward pass are 16-bit; the gradient with respect to the master weights
is theirs, and so are the reduction and the optimizer: Micikevicius et al., "Mixed
Precision Training", ICLR 2018, section 3. bfloat16 has the range of float32 and needs
no more. float16 has not, and takes a loss scale (`jaxdp.loss_scale`).
"""

import contextlib
import dataclasses
import functools
import math
import numbers
import warnings
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxdp.loss_scale import LossScale as LossScale
from jaxdp.loss_scale import next_loss_scale as next_loss_scale

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
