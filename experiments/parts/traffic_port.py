"""What `jaxdp.DataParallel` moves between devices in a step, read from its trace.

It is one program per device and stage, so there is no compiled program to read: the
trace has every transfer. Besides parameters and gradients, outputs go to the first
device and the gradients of outputs back.
"""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from experiments.parts import traffic_formulas as formulas
from experiments.parts.traffic_counts import GRADIENTS, Counted
from experiments.parts.traffic_designs import PORT, Case, Way
from experiments.parts.traffic_formulas import Exchange, Message
from jaxdp.replicated import Trace
from jaxdp.replicated.devices import name

ROWS = 2  # on each device


def way(gradient: str) -> Way:
    """Its closed form: a star."""
    _, columns = GRADIENTS[gradient]
    outputs = formulas.FLOAT * ROWS * columns

    def exchanges(case: Case) -> list[Exchange]:
        message = Message(formulas.FLOAT * sum(case.leaves), outputs, 0)
        return [Exchange(formulas.star(case.devices), message)]

    return Way(name=PORT, design=None, device="(N-1)Φ", link="Φ", exchanges=exchanges)


def count(gradient: str, devices: int) -> Counted:
    """Traces a step on the first devices at hand."""
    rows, columns = GRADIENTS[gradient]
    params = {"w": jnp.ones((rows, columns)), "b": jnp.zeros((columns,))}
    model = jaxdp.DataParallel(
        lambda params, x: x @ params["w"] + params["b"][None],
        params,
        device_ids=jax.devices()[:devices],
    )
    step = model.train_step(_loss, optax.sgd(0.1))
    batch = np.ones((ROWS * devices, rows), np.float32)
    targets = np.zeros((ROWS * devices, columns), np.float32)
    with model.trace() as trace:
        jax.block_until_ready(step(step.init(), batch, targets))
    return read(trace, [name(device) for device in model.devices])


def _loss(outputs: jax.Array, targets: jax.Array) -> jax.Array:
    return jnp.mean((outputs - targets) ** 2)


def read(trace: Trace, names: list[str]) -> Counted:
    """Adds up transfers between devices; what comes from the host is no exchange.

    Args:
        trace: Of one step.
        names: Of the devices, in order.
    """
    numbers = {device: i for i, device in enumerate(names)}
    links: Counter[tuple[int, int]] = Counter()
    for record in trace.records:
        if record.nbytes and record.source in numbers:
            links[numbers[record.source], numbers[record.target]] += record.nbytes
    everywhere: Any = range(len(names))
    sent = tuple(sum(links[d, other] for other in everywhere) for d in everywhere)
    received = tuple(sum(links[other, d] for other in everywhere) for d in everywhere)
    return Counted(sent, received, {k: v for k, v in links.items() if v}, None)
