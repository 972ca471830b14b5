"""Step times on one device: every design, and the same step in plain JAX."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from experiments.gpu_check.clock import Clock
from experiments.harness import timing
from jaxdp.prediction import Model

PyTree = Any
PLAIN = "plain JAX"


class Measured(NamedTuple):
    """A model's steps: a row for each, and their programs."""

    rows: list[dict[str, Any]]
    programs: dict[str, jax.stages.Compiled]


def measure(
    model: Model,
    designs: Mapping[str, jaxdp.Design],
    repeats: int,
    clock: Clock,
    keep_s: float,
) -> Measured:
    """Times plain JAX and designs against each other, in turns.

    Args:
        model: What is trained.
        designs: By name; those that there is no time to compile are left out.
        repeats: Measured steps of each.
        clock: Says how much time is left.
        keep_s: How much of it others need.
    """
    mesh = jaxdp.data_mesh(1)
    given = (filled(model.params), filled(model.model_state), filled(model.batch))
    programs, calls = {}, {}
    slowest_s = 0.0
    for name, design in {PLAIN: None, **designs}.items():
        if design is not None and clock.left_s - slowest_s < keep_s:
            clock.say(f"{model.name}, {name}: left out, too little time")
            continue
        before_s = clock.passed_s
        make = plain(model) if design is None else of(model, design, mesh)
        programs[name], calls[name] = make(*given)
        slowest_s = max(slowest_s, clock.passed_s - before_s)
        clock.say(f"{model.name}, {name}: compiled")
    times = timing.interleaved(calls, repeats)
    rows = [
        {
            "model": model.name,
            "step": name,
            "median_ms": took.median_ms,
            "low_ms": took.low_ms,
            "high_ms": took.high_ms,
            "of_plain_jax": took.median_ms / times[PLAIN].median_ms,
            "label": took.label,
        }
        for name, took in times.items()
    ]
    return Measured(rows, programs)


def plain(model: Model) -> Callable:
    """The step without any design: gradient and update."""

    def step(params, opt_state, model_state, batch):
        def loss(params):
            assert model.precision is not None
            params, given = model.precision.to_compute((params, batch))
            kept = {} if model_state is None else {"model_state": model_state}
            return model.loss_fn(params, given, **kept)

        (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = model.optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        return (params, opt_state, aux.model_state), value

    def make(params, model_state, batch):
        params, model_state = jax.tree.map(jnp.copy, (params, model_state))
        state = params, model.optimizer.init(params), model_state
        jitted = jax.jit(step, donate_argnums=(0, 1, 2))
        program = jitted.lower(*state, batch).compile()
        return program, _repeated(lambda state: program(*state, batch), state)

    return make


def of(model: Model, design: jaxdp.Design, mesh: jax.sharding.Mesh) -> Callable:
    """The step of a design on one device."""

    def make(params, model_state, batch):
        train = model.training(design, mesh)
        state = train.init(params, model_state=model_state)
        batch = jaxdp.shard_batch(batch, mesh)
        program = train.lower(state, batch).compile()
        return program, _repeated(lambda state: program(state, batch), state)

    return make


def filled(shapes: PyTree) -> PyTree:
    """Arrays of some shapes, of small numbers; variances stay positive."""
    generator = np.random.default_rng(0)

    def fill(x):
        if np.issubdtype(x.dtype, np.integer):
            return jnp.asarray(generator.integers(0, 8, x.shape, x.dtype))
        return jnp.asarray(generator.uniform(0.01, 0.05, x.shape), x.dtype)

    return jax.tree.map(fill, shapes)


def _repeated(step: Callable, state: PyTree) -> Callable[[], Any]:
    """Calls a step that donates its state, each time on the state before it."""
    kept = [state]

    def call():
        kept[0], loss = step(kept[0])
        return loss

    return call
