"""How fast this device multiplies matrices and moves memory.

Each program repeats its operation in a loop on the device, so that the time of a call
hardly counts; its operand is the result before it, so that nothing can be left out.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.harness import timing

LOOPS = 10
COPIED_BYTES = 2**30
SIZE = 8192  # of square matrices
TINY_SIZE, TINY_BYTES = 128, 2**16
# By the name of the row: what HLO calls the type, the arrays' type, the precision.
PRODUCTS = {
    "matrix product, bf16": ("bf16", jnp.bfloat16, None),
    "matrix product, f32 as JAX does it by default": ("tf32", jnp.float32, "default"),
    "matrix product, f32 in full": ("f32", jnp.float32, "highest"),
}
COPY = "copy, read and written"


def measure(tiny: bool, repeats: int) -> list[dict[str, Any]]:
    """Rows with the rates of this device.

    Args:
        tiny: Small arrays, to see that it runs.
        repeats: Measured calls of each program.
    """
    size, copied = (TINY_SIZE, TINY_BYTES) if tiny else (SIZE, COPIED_BYTES)
    calls = {name: _product(size, *how[1:]) for name, how in PRODUCTS.items()}
    calls[COPY] = _copy(copied)
    times = timing.interleaved(calls, repeats)
    amounts = dict.fromkeys(PRODUCTS, 2 * size**3 / 1e12) | {COPY: 2 * copied / 1e12}
    units = dict.fromkeys(PRODUCTS, "TFLOP/s") | {COPY: "TB/s"}
    return [
        {
            "operation": name,
            "rate": amounts[name] / (took.median_ms / 1e3 / LOOPS),
            "unit": units[name],
            "median_ms": took.median_ms / LOOPS,
            "label": took.label,
        }
        for name, took in times.items()
    ]


def flops_per_s(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Rates of products, by HLO's names of types; float16's are bfloat16's."""
    rates = {row["operation"]: 1e12 * row["rate"] for row in rows}
    found = {how[0]: rates[name] for name, how in PRODUCTS.items()}
    return found | {"f16": found["bf16"]}


def bytes_per_s(rows: list[dict[str, Any]]) -> float:
    """The rate of a copy."""
    return next(1e12 * row["rate"] for row in rows if row["operation"] == COPY)


def _product(size: int, dtype: Any, precision: str | None) -> Callable[[], jax.Array]:
    """A program of products of square matrices, whose elements stay of one size."""
    left, right = (
        jax.random.normal(jax.random.key(seed), (size, size), dtype) for seed in (0, 1)
    )
    right = right / size**0.5

    def repeated(left, right):
        def once(_, left):
            return jnp.matmul(left, right, precision=precision)

        return lax.fori_loop(0, LOOPS, once, left)

    jitted = jax.jit(repeated)
    return lambda: jitted(left, right)


def _copy(size_bytes: int) -> Callable[[], jax.Array]:
    """A program that reads and writes an array."""
    array = jnp.arange(size_bytes // 4, dtype=jnp.float32)
    jitted = jax.jit(
        lambda array: lax.fori_loop(0, LOOPS, lambda _, kept: kept + 1, array)
    )
    return lambda: jitted(array)
