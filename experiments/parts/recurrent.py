"""A recurrent network whose hidden state is carried over: `T` times, `L` layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.result import Rows
from experiments.parts.beliefs import square
from experiments.parts.gradients import difference
from jaxdp import DataParallel

PyTree = Any
LAYERS, FEATURES = 2, 3  # as many hidden numbers as features
APART = ("state apart", "parameters' gradient apart", "first state's gradient apart")
WINDOWS = 2  # the state goes from one to the next


class Problem(NamedTuple):
    """Parameters, inputs and the first state, in PyTorch's default layout."""

    params: tuple[np.ndarray, np.ndarray]  # of x and h: [L, 3, FEATURES, FEATURES]
    windows: list[np.ndarray]  # [T, rows, FEATURES]
    hidden: np.ndarray  # [L, rows, FEATURES]


def gru(params: PyTree, x: Any, hidden: Any) -> tuple[jax.Array, jax.Array]:
    """All outputs `[T, rows, FEATURES]` and the last state `[L, rows, FEATURES]`."""

    def layer(x, given):
        (of_x, of_h), start = given

        def cell(h, x):
            update = jax.nn.sigmoid(x @ of_x[0] + h @ of_h[0])
            reset = jax.nn.sigmoid(x @ of_x[1] + h @ of_h[1])
            new = jnp.tanh(x @ of_x[2] + (reset * h) @ of_h[2])
            h = h + update * (new - h)
            return h, h

        last, outputs = jax.lax.scan(cell, start, x)
        return outputs, last

    return jax.lax.scan(layer, x, (params, hidden))


def batch_first(params: PyTree, x: Any, hidden: Any) -> tuple[jax.Array, jax.Array]:
    """`gru` for `[rows, T, FEATURES]` and `[rows, L, FEATURES]`."""
    output, last = gru(params, _swapped(x), _swapped(hidden))
    return _swapped(output), _swapped(last)


def problem(times: int, rows: int) -> Problem:
    """Random numbers."""
    random = np.random.default_rng(0)

    def normal(*shape):
        return random.normal(size=shape).astype(np.float32)

    of_x, of_h = (normal(LAYERS, 3, FEATURES, FEATURES) for _ in "xh")
    windows = [normal(times, rows, FEATURES) for _ in range(WINDOWS)]
    return Problem((of_x, of_h), windows, normal(LAYERS, rows, FEATURES))


def compare(given: Problem, ids: list[int]) -> Rows:
    """Layouts of the batch and the state, beside one device."""
    forms = [
        (gru, 1, _same, _same),
        (batch_first, 0, _swapped, _swapped),
        (lambda p, x, h: batch_first(p, x, _swapped(h)), 0, _swapped, _same),
    ]
    return [_compared(given, ids, *form) for form in forms]


def _compared(
    given: Problem, ids: list[int], apply_fn: Any, dim: int, of_x: Any, of_state: Any
) -> dict[str, Any]:
    """One layout: the last state and both gradients, or whether it is refused."""
    model = DataParallel(apply_fn, given.params, device_ids=ids, dim=dim)
    start = of_state(given.hidden)
    row: dict[str, Any] = {
        "batch": str(of_x(given.windows[0]).shape),
        "state": str(start.shape),
        "dim": dim,
    }
    windows = [of_x(window) for window in given.windows]
    try:
        last, gradients = through(model.apply, given.params, windows, start)
    except ValueError as error:
        if "different length" not in str(error):
            raise
        return row | {"refused": True} | dict.fromkeys(APART)
    alone, expected = through(jax.jit(gru), given.params, given.windows, given.hidden)
    pairs = zip(
        (of_state(np.asarray(last)), gradients[0], of_state(np.asarray(gradients[1]))),
        (alone, *expected),
        strict=True,
    )
    apart = [difference(jax.device_get(a), jax.device_get(b)) for a, b in pairs]
    return row | {"refused": False} | dict(zip(APART, apart, strict=True))


def through(
    run: Callable[..., Any], params: PyTree, windows: list[Any], start: Any
) -> tuple[Any, tuple[PyTree, Any]]:
    """The last state, and the gradients of parameters and first state."""

    def loss(params, hidden):
        total = 0.0
        for x in windows:
            output, hidden = run(params, x, hidden)
            total += square(output)
        return total, hidden

    grad = jax.grad(loss, (0, 1), has_aux=True)
    gradients, last = grad(params, start)
    return last, gradients


def _swapped(array: Any) -> Any:
    return array.swapaxes(0, 1)


def _same(array: Any) -> Any:
    return array
