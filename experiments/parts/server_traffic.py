"""Bytes that parameter servers carry, counted in compiled programs.

`N` devices, `S` servers, `Φ` bytes of gradients.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

import jaxdp
from experiments.harness import plots
from experiments.harness.result import Rows
from jaxdp import serving
from jaxdp.program import ProgramReport, analyze

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHAPE = (840, 312)  # float32, 1 MiB: 1, 2, 4 and 8 servers divide it
PHI = 4 * 840 * 312
SERVERS = (1, 2, 4)
COLOURS = {1: "#D55E00", 2: "#E69F00", 4: "#009E73"}  # by number of servers


@functools.cache
def moved(devices: int, servers: int, dedicated: bool) -> tuple[int, int]:
    """Bytes pushed to server 0 and bytes pulled from it, each counted alone."""
    given = "data", devices, servers

    def push(gradients):
        return serving.push(serving.split(gradients[0], servers), *given, dedicated)

    def pull(part):
        return serving.pull(part, *given)

    pushed = _alone(push, devices, (devices, *SHAPE))
    pulled = _alone(pull, devices, (devices, PHI // 4 // servers))
    return pushed.received_bytes[0], pulled.sent_bytes[0]


def _alone(move: Callable, devices: int, shape: tuple[int, ...]) -> ProgramReport:
    """A move in a program of its own; `[N, ...]`, entry r on rank r."""
    program = jax.shard_map(
        move,
        mesh=jaxdp.data_mesh(devices),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,  # what is pulled is alike, and laid side by side here
    )
    x = jax.ShapeDtypeStruct(shape, np.float32)
    return analyze(jax.jit(program).lower(x).compile())


@functools.cache
def step(design: jaxdp.Design, devices: int) -> jax.stages.Compiled:
    """A training step of one matrix of Φ bytes, compiled."""

    def loss_fn(weights, batch):
        return jnp.mean((batch @ weights) ** 2)

    mesh = jaxdp.data_mesh(devices)
    train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), mesh, design)
    rows = devices - design.serving_ranks
    state = train.init(jnp.zeros(SHAPE))
    return train.lower(state, np.zeros((rows, SHAPE[0]), np.float32)).compile()


def arrangements(devices: int) -> list[tuple[int, bool]]:
    """Servers, and whether they are dedicated, that this many devices allow."""
    return [
        (servers, dedicated)
        for dedicated in (False, True)
        for servers in SERVERS
        if servers <= devices - dedicated
    ]


def served(devices: int, servers: int, dedicated: bool) -> dict[str, Any]:
    """What one server carries: its part, to and from everybody."""
    pushed, pulled = moved(devices, servers, dedicated)
    workers = devices - servers if dedicated else devices - 1  # that push to it
    return {
        "devices": devices,
        "servers": servers,
        "dedicated": dedicated,
        "in/Φ": pushed / PHI,
        "out/Φ": pulled / PHI,
        "as expected to the byte": (pushed, pulled)
        == (workers * PHI // servers, (devices - 1) * PHI // servers),
        "of one server's": pulled / moved(devices, 1, dedicated)[1],
    }


def whole_step(name: str, design: jaxdp.Design, devices: int) -> dict[str, Any]:
    """What the devices send and receive in a whole step, in units of Φ."""
    counted = analyze(step(design, devices))
    busiest = max(range(devices), key=lambda d: counted.sent_bytes[d])
    return {
        "design": name,
        "busiest sends/Φ": counted.sent_bytes[busiest] / PHI,
        "busiest receives/Φ": counted.received_bytes[busiest] / PHI,
        "last sends/Φ": counted.sent_bytes[-1] / PHI,
        "last receives/Φ": counted.received_bytes[-1] / PHI,
        "all links/Φ": sum(counted.sent_bytes) / PHI,
    }


def designs(devices: int) -> dict[str, jaxdp.Design]:
    """Every arrangement of servers, and the ring beside them."""
    named: dict[str, jaxdp.Design] = {"ring": jaxdp.RingAllReduce()}
    for servers, dedicated in arrangements(devices):
        name = f"{servers} {'dedicated ' * dedicated}server{'s' * (servers > 1)}"
        named[name] = jaxdp.ParameterServer(servers, dedicated)
    return named


def plot_served(rows: Rows) -> "Figure":
    """Bytes pulled from one server against N, beside (N - 1) / S."""
    note = "points: counted in compiled programs; lines: (N - 1) / S. A server that "
    note += "works pushes (S - 1) / S as well"
    figure, axes = plots.plot("What one server sends", "devices N", "sent / Φ", note)
    rows = [row for row in rows if not row["dedicated"]]
    last = max(row["devices"] for row in rows)
    n = np.linspace(2, last)
    for servers, color in COLOURS.items():
        chosen = [row for row in rows if row["servers"] == servers]
        label = f"{servers} server{'s' * (servers > 1)}"
        x = n[n >= servers]
        axes.plot(x, (x - 1) / servers, color=color, linewidth=1.2)
        x = [row["devices"] for row in chosen]
        y = [row["out/Φ"] for row in chosen]
        axes.plot(x, y, color=color, marker="o", linestyle="", label=label)
    ring = plots.STYLES["ring"] | {"marker": None, "label": "ring, each device"}
    axes.plot(n, 2 * (n - 1) / n, **ring)
    axes.set_ylim(0)
    axes.legend(frameon=False)
    return figure
