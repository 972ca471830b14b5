"""What looks like a mistake with `nn.DataParallel`, and works here."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.harness.result import Rows
from experiments.parts.mistakes import ROWS, Setting
from jaxdp import replicated
from jaxdp.replicated.views.anomaly import find_nan


class Situation(NamedTuple):
    """A situation, and what becomes of it.

    Attributes:
        what: The situation.
        torch: What `nn.DataParallel` does, by its source.
        run: Gives what was found here, and whether it is right.
    """

    what: str
    torch: str
    run: Callable[[], tuple[str, bool]]


def situations(on: Setting) -> Rows:
    """Runs all of them."""
    return [
        {"situation": each.what, "nn.DataParallel": each.torch}
        | dict(zip(("jaxdp", "right"), each.run(), strict=True))
        for each in _all(on)
    ]


def _all(on: Setting) -> list[Situation]:
    count, last = len(on.ids), on.devices[-1]
    return [
        Situation(
            f"{count - 1} rows on {count} devices",
            f"runs {count - 1} replicas",
            lambda: _fewer_rows(on),
        ),
        Situation(
            f"parameters on device {last.id}",
            "RuntimeError: module must have its parameters and buffers on the first "
            "device",
            lambda: _moved(on, last),
        ),
        Situation(
            "a batch of NumPy, left on the host",
            "not split: every replica gets all of it",
            lambda: _same(on, on.model()(on.x), "split on the host, sent in slices"),
        ),
        Situation(
            "a model that returns a scalar",
            f"a vector of {count}, with a UserWarning",
            lambda: _scalars(on),
        ),
        Situation(
            "a flag and a number beside the batch",
            "go to every replica as they are",
            lambda: _same(on, _with_flag(on), "go to every replica as they are"),
        ),
        Situation(
            "log of a negative number, in one row",
            "NaN, silently",
            lambda: _nan(on),
        ),
    ]


def _same(on: Setting, output: Any, found: str) -> tuple[str, bool]:
    """Whether an output is the whole batch's."""
    return found, bool(np.array_equal(np.asarray(output), on.x @ on.w))


def _fewer_rows(on: Setting) -> tuple[str, bool]:
    x = on.x[: len(on.ids) - 1]
    model = on.model()
    with model.trace() as trace:
        output = model(x)
    used = {r.target for r in trace.records if r.stage == "4 forward"}
    right = np.array_equal(np.asarray(output), x @ on.w)
    return f"runs {len(used)} replicas", right and len(used) == len(x)


def _moved(on: Setting, device: Any) -> tuple[str, bool]:
    model = replicated.DataParallel(
        lambda w, x: x @ w, jax.device_put(on.w, device), device_ids=on.ids
    )
    (held,) = model.params.devices()
    found, same = _same(on, model(on.x), f"moved to device {held.id}")
    return found, same and held == on.devices[0]


def _scalars(on: Setting) -> tuple[str, bool]:
    output = on.model(lambda w, x: jnp.max(x))(on.x)
    expected = on.x.reshape(len(on.ids), -1).max(1)
    return f"a vector of {output.size}", bool(np.array_equal(output, expected))


def _with_flag(on: Setting) -> Any:
    def apply_fn(w, x, factor, *, train):
        return x @ w * factor if train == "yes" else x

    return on.model(apply_fn)(on.x, 1.0, train="yes")


def _nan(on: Setting) -> tuple[str, bool]:
    x, row = on.x.copy(), ROWS + 1
    x[row] *= -1
    found = find_nan(on.model(lambda w, x: jnp.log(x) @ w), x)
    named = f"replica 1 on {on.names[1]} (rows {ROWS} to {2 * ROWS - 1})"
    right = named in str(found) and "operation log" in str(found)
    return f"NaN; find_nan: {found}", right
