"""Mistakes in what replicas run, and how: functions, outputs, steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.parts.mistakes import ROWS, Mistake, Setting, linear
from jaxdp import replicated


def about_models(on: Setting) -> list[Mistake]:
    """Functions that replicas cannot share, and outputs that cannot be joined."""
    first, last, count = on.names[0], on.names[-1], len(on.ids)
    rows = len(on.x)
    scale = jax.device_put(np.array([[2, 3]], np.float32), on.devices[0])
    uneven = on.x[:-1]  # the last slice is a row shorter

    class Net:
        def forward(self, x):
            return x

    def strict(w, x):
        if len(x) < ROWS:
            raise ValueError(f"This layer wants {ROWS} rows: pad the batch.")
        return x @ w

    return [
        Mistake(
            "a module with forward(), as PyTorch has it",
            lambda: on.model(Net()),
            TypeError,
            ("apply_fn of type Net", "apply_fn(params, *inputs)"),
            "use jaxdp.replicated.from_nnx",
        ),
        Mistake(
            "an array of device 0 in every replica (hard-wired cuda:0)",
            lambda: on.model(lambda w, x: x @ w * scale)(on.x),
            ValueError,
            (f"captured scale of shape (1, 2) on {first}", ", ".join(on.names)),
            "Pass the array as a parameter or as an input",
        ),
        Mistake(
            "x.to('cuda:0') inside the model",
            lambda: on.model(lambda w, x: jax.device_put(x, on.devices[0]) @ w)(on.x),
            ValueError,
            (f"jax.device_put to {first}", ", ".join(on.names)),
            "Remove the transfer",
        ),
        Mistake(
            "outputs whose structure depends on the number of rows",
            lambda: on.model(lambda w, x: {"y": x @ w} if len(x) < ROWS else x)(uneven),
            ValueError,
            (f"from {first}", f"from {last} (replica {count - 1})", "'y'"),
            "Do not let it depend on the number of rows",
        ),
        Mistake(
            "squeeze(), with a last slice of one row",
            lambda: on.model(lambda w, x: jnp.squeeze(x @ w))(on.x[: 2 * count - 1]),
            ValueError,
            (f"float32[2, 2] from {first}", f"float32[2] from {last}", "output is"),
            "Return arrays with one entry per row",
        ),
        Mistake(
            "one replica raises",
            lambda: on.model(strict)(uneven),
            ValueError,
            (
                f"Replica {count - 1} on {last}, rows {rows - 4} to {rows - 2} raised",
                "ValueError: This layer wants 4 rows",
            ),
            "pad the batch",
        ),
    ]


def about_steps(on: Setting) -> list[Mistake]:
    """Pieces that do not fit together, and training steps."""
    first, last, count = on.names[0], on.names[-1], len(on.ids)
    return [
        Mistake(
            "by hand: more replicas than slices",
            lambda: _by_hand(on.w, on.x[: count - 1], on.ids, on.ids),
            ValueError,
            (f"{count} replicas, {count - 1} inputs",),
            "device_ids[:len(inputs)]",
        ),
        Mistake(
            "by hand: slices in another order than replicas",
            lambda: _by_hand(on.w, on.x, on.ids, on.ids[::-1]),
            ValueError,
            (f"replica 0 on 2 devices ({first}, {last})",),
            "for the same device_ids",
        ),
        Mistake(
            f"a model that returns its loss, and nobody averages the {count} of them",
            lambda: _step(on, lambda losses, y: losses)(on.x),
            ValueError,
            (f"a loss of shape ({count},)", "must be a scalar"),
            "Average it with jnp.mean",
        ),
        Mistake(
            "a state that was used already",
            lambda: _step(on, lambda losses, y: losses.mean(), times=2)(on.x),
            RuntimeError,
            ("arrays have been deleted", "each serves one step"),
            "Go on with the state that the step returned",
        ),
    ]


def _step(on: Setting, loss_fn: Any, times: int = 1) -> Callable[[Any], None]:
    """Steps from the same state; the model returns a loss itself."""
    step = on.model(lambda w, x: jnp.mean(x @ w)).train_step(loss_fn, optax.sgd(0.1))
    state = step.init()

    def run(x):
        for _ in range(times):
            step(state, x, None)

    return run


def _by_hand(w: Any, x: Any, replicas: list[int], slices: list[int]) -> Any:
    """Replicates to some devices, scatters to others, and applies."""
    parts = [(part,) for part in replicated.scatter(x, slices)]
    return replicated.parallel_apply(linear, replicated.replicate(w, replicas), parts)
