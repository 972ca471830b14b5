"""Delayed gradients on f(x) = x ** 2 / 2, whose gradient is x: numbers by hand.

With a delay of tau steps, `sliding` makes no update in the first tau steps, and then
x[t + 1] = x[t] - lr * x[t - tau], as if x had been 1 ever before. Numbers compared
with `==` are sums of few powers of two.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.state import TrainState
from jaxdp.training import DataParallel

# Of the four rows; their mean is 1, and each worker pushes another gradient.
CURVATURES = np.array([0.25, 0.5, 1.5, 1.75], np.float32)
# The mean of these is exact for any x: only the last row pulls.
ONE_ROW = np.array([0, 0, 0, 4], np.float32)

over_workers = pytest.mark.parametrize("workers", [1, 4], ids="n{}".format)


class Run(NamedTuple):
    """x and loss of every step, and x and the state after the flush."""

    params: list[float]
    losses: list[float]
    flushed: float
    state: TrainState


def loss_fn(params: jax.Array, batch: jax.Array) -> jax.Array:
    """The mean over rows of curvature * x ** 2 / 2."""
    return jnp.mean(batch) * params**2 / 2


@functools.cache
def make_program(
    workers: int,
    policy: Literal["sliding", "window"],
    max_staleness: int,
    learning_rate: optax.ScalarOrSchedule = 1.0,
) -> DataParallel:
    """SGD. Curvatures may hold the learning rate, so that cases share a compilation."""
    design = jaxdp.ParameterServer(max_staleness=max_staleness, policy=policy)
    return jaxdp.data_parallel(
        loss_fn, optax.sgd(learning_rate), jaxdp.data_mesh(workers), design=design
    )


def run(
    program: DataParallel, batches: list[np.ndarray], state: TrainState | None = None
) -> Run:
    """Train, from x = 1 by default; each batch holds the curvatures of a step."""
    state = state or program.init(jnp.ones(()))
    params, losses = [], []
    for batch in batches:
        state, metrics = program.step(state, batch)
        params.append(program.params(state).item())
        losses.append(metrics["loss"].item())
    state = program.flush(state)
    return Run(params, losses, program.params(state).item(), state)


@over_workers
@pytest.mark.parametrize(
    ("max_staleness", "params", "flushed"),
    [
        (0, [0.5, 0.25, 0.125], 0.125),
        # In flight before the flush: -0.25.
        (1, [1, 0.5, 0, -0.25, -0.25, -0.125], 0),
        # -0.75 and -0.75.
        (2, [1, 1, 0.5, 0, -0.5, -0.75, -0.75, -0.5], 0.25),
        # -0.5, -1 and -1.25.
        (3, [1, 1, 1, 0.5, 0, -0.5, -1, -1.25, -1.25], 0.125),
    ],
    ids=range(4),
)
def test_sliding(workers, max_staleness, params, flushed):
    program = make_program(workers, "sliding", max_staleness)
    made = run(program, [0.5 * CURVATURES] * len(params))
    losses = [0.5 * x**2 / 2 for x in [1, *params[:-1]]]
    assert made[:3] == (params, losses, flushed)


@pytest.mark.parametrize(
    ("max_staleness", "learning_rate", "params", "flushed"),
    [
        (0, 0.5, [0.5, 0.25, 0.125], 0.125),
        (1, 0.25, [1, 0.5, 0.5, 0.25, 0.25], 0.1875),
        (2, 0.5, [1, 1, -0.5, -0.5, -0.5, 0.25, 0.25, 0.25], 0),
        # Four gradients of the same weights act like four times the learning rate.
        (3, 0.5, [1, 1, 1, -1, -1], -0.5),
    ],
    ids=range(4),
)
def test_window(max_staleness, learning_rate, params, flushed):
    program = make_program(4, "window", max_staleness)
    made = run(program, [learning_rate * CURVATURES] * len(params))
    losses = [learning_rate * x**2 / 2 for x in [1, *params[:-1]]]
    assert made[:3] == (params, losses, flushed)


@over_workers
def test_published_sequence_with_a_delay_of_one(workers):
    """x[t + 1] = x[t] - 0.9 * x[t - 1]."""
    made = run(make_program(workers, "sliding", 1), [0.9 * CURVATURES] * 6)
    expected = [1, 0.1, -0.8, -0.89, -0.17, 0.631]
    np.testing.assert_allclose(made.params, expected, rtol=0, atol=1e-6)
    np.testing.assert_allclose(made.flushed, 0.631 + 0.9 * 0.17, rtol=0, atol=1e-6)


def halved(count: jax.Array) -> jax.Array:
    """Learning rates 1 / 2, 1 / 4, ... that count the updates."""
    return 0.5 ** (count + 1)


@pytest.mark.parametrize(
    ("policy", "params", "flushed"),
    [
        # 1 / 2 of 1, then 1 / 4 of 3. In flight: 4 * 1 and 2 * 0.5.
        ("sliding", [1, 1, 0.5, -0.25], -0.25 - 4 / 8 - 1 / 16),
        # 1 / 2 of 1, 1 / 4 of 3, 1 / 8 of 4. In flight: 2 * -0.75.
        ("window", [1, 1, -0.75, -0.75], -0.75 + 1.5 / 16),
    ],
    ids=["sliding", "window"],
)
def test_each_gradient_is_one_update_oldest_first(policy, params, flushed):
    program = make_program(4, policy, 2, halved)
    made = run(program, [scale * CURVATURES for scale in (1, 3, 4, 2)])
    assert (made.params, made.flushed) == (params, flushed)


@pytest.mark.parametrize("policy", ["sliding", "window"])
def test_flush_starts_again_and_keeps_the_optimizer_state(policy):
    """Three steps with a delay of two, as at the beginning, but for the count."""
    program = make_program(4, policy, 2, halved)
    first = run(program, [scale * CURVATURES for scale in (1, 3, 4, 2)])
    again = run(program, [8 * CURVATURES] * 3, first.state)
    x = first.flushed
    after = [x - 8 * x / 32, x - 8 * x / 32 - 8 * x / 64 - 8 * x / 128]
    assert again.params == [x, x, after[0] if policy == "sliding" else after[1]]
    assert again.flushed == after[1]


@pytest.mark.parametrize(("workers", "policy"), [(1, "sliding"), (4, "window")])
def test_without_delay_equals_plain_sgd_bit_for_bit(workers, policy):
    optimizer = optax.sgd(0.9)

    @jax.jit
    def step(x, opt_state):
        updates, opt_state = optimizer.update(jax.grad(loss_fn)(x, ONE_ROW), opt_state)
        return optax.apply_updates(x, updates), opt_state

    x = jnp.ones(())
    opt_state = optimizer.init(x)
    made = run(make_program(workers, policy, 0, learning_rate=0.9), [ONE_ROW] * 8)
    for params in made.params:
        x, opt_state = step(x, opt_state)
        assert params == x.item()
    assert made.flushed == made.params[-1]


@over_workers
@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_stable_exactly_below_the_bound(workers, max_staleness):
    """Three percent below and above, 250 steps halve or double what oscillates."""
    bound = 2 * math.sin(math.pi / (2 * (2 * max_staleness + 1)))
    program = make_program(workers, "sliding", max_staleness)
    growths = []
    for learning_rate in (0.97 * bound, 1.03 * bound):
        params = np.abs(run(program, [learning_rate * CURVATURES] * 250).params)
        growths.append(params[-50:].max() / params[:50].max())
    below, above = growths
    assert below < 0.5 and above > 2
