"""What compiled training steps send, beside the closed forms of `traffic_formulas`.

The model is one linear layer, so its gradient has two leaves, a matrix and a vector. It
comes in two sizes: all numbers of devices divide the leaves of one into even chunks,
and none of them the gradient of the other.
"""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxdp
from experiments.parts import traffic_formulas as formulas
from experiments.parts.traffic_designs import WAYS, Case, Way
from jaxdp import targets
from jaxdp.cost import cost
from jaxdp.program import ProgramReport, analyze

Links = Mapping[tuple[int, int], int]
TARGET = "h100"
# Rows and columns of the matrix; the vector has a number for every column.
GRADIENTS = {"uneven": (250, 107), "even": (140, 192)}


class Counted(NamedTuple):
    """What one step moves.

    Attributes:
        sent: Bytes by device.
        received: Bytes by device.
        links: Bytes by source and target.
        rounds: On the critical path; None where nobody counts them.
        arrays: Elements of the arrays in the all-reduces of XLA.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    links: Links
    rounds: int | None
    arrays: tuple[int, ...] = ()

    def measure(self, name: str) -> set[int]:
        """What devices or links carry, as a field of `Share` has it: in one number."""
        links = [*self.links.values()]
        return {
            "most": {max(self.sent), max(self.received)},
            "least": {min(self.sent), min(self.received)},
            "link": {max(links, default=0)},
            "total": {sum(links), sum(self.sent), sum(self.received)},
        }[name]


def leaves(gradient: str) -> tuple[int, int]:
    """Elements of the leaves."""
    rows, columns = GRADIENTS[gradient]
    return columns, rows * columns


def phi(gradient: str) -> int:
    """Φ in bytes."""
    return formulas.FLOAT * sum(leaves(gradient))


@functools.cache
def compiled(
    way: str, gradient: str, devices: int, target: str | None
) -> jax.stages.Compiled:
    """A training step.

    Args:
        way: A key of `WAYS` with a design.
        gradient: A key of `GRADIENTS`.
        devices: N.
        target: What to compile for; None for the devices at hand.
    """
    design = WAYS[way].design
    assert design is not None
    rows, columns = GRADIENTS[gradient]
    hosts = max(1, devices // 8)
    if target is None:
        mesh = jaxdp.data_mesh(devices)
    else:
        mesh = targets.mesh(target, devices, hosts)
    train = jaxdp.data_parallel(_loss, optax.sgd(0.1), mesh, design)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=np.float32)
    params = {"w": shape((rows, columns)), "b": shape((columns,))}
    batch = shape((devices - design.serving_ranks, rows))
    if target is None:
        state = train.init(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params))
        return train.lower(state, batch).compile()
    given = {"target": target, "devices": devices, "hosts": hosts}
    return targets.compile_for(train.step, params, batch, **given)


def _loss(params: Any, batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"] + params["b"][None]) ** 2)


def count(report: ProgramReport) -> Counted:
    """Reads a program."""
    arrays = tuple(
        array.elements
        for op in report.collectives
        for array in op.arrays
        if op.kind == "all-reduce"
    )
    return Counted(
        report.sent_bytes,
        report.received_bytes,
        report.link_bytes,
        report.rounds,
        arrays,
    )


def in_program(way: str, gradient: str, devices: int, target: str | None) -> Counted:
    """Counts a compiled step."""
    return count(analyze(compiled(way, gradient, devices, target)))


def as_scheduled(way: Way, case: Case) -> Counted:
    """What the library's schedules say, by its cost model."""
    sent, received = np.zeros((2, case.devices), int)
    links: dict[tuple[int, int], int] = {}
    exchanges = zip(way.schedules(case.devices), way.exchanges(case), strict=True)
    rounds = [0]
    for schedules, exchange in exchanges:
        found = [cost(s, sum(exchange.message) * m, 1) for s, m in schedules]
        rounds.append(sum(each.rounds for each in found))
        for each in found:
            sent += each.sent_bytes
            received += each.received_bytes
            for link, amount in each.link_bytes.items():
                links[link] = links.get(link, 0) + amount
    return Counted(tuple(map(int, sent)), tuple(map(int, received)), links, max(rounds))


def row(way: Way, gradient: str, devices: int, counted: Counted) -> dict[str, Any]:
    """All that is known of one step; expected numbers are fractions, so exact."""
    case = Case(devices, leaves(gradient), counted.arrays)
    exchanges = way.exchanges(case)
    found = {name: formulas.expected(exchanges, name) for name in formulas.MEASURES}
    most, has_rounds = found["most"], counted.rounds is not None
    rounds = formulas.rounds(exchanges) if has_rounds else None
    exact = all(counted.measure(name) == {found[name].total} for name in found)
    return {
        "design": way.name,
        "N": devices,
        "chunks": gradient,
        "Φ_bytes": phi(gradient),
        "formula": way.device,
        "gradients_bytes": most.gradient,
        "beside_bytes": most.beside,
        "padding_bytes": most.padding,
        "counted_bytes": max(counted.sent),
        "others, formula_bytes": found["least"].total,
        "others, counted_bytes": min(counted.sent),
        "link, formula_bytes": found["link"].total,
        "link, counted_bytes": max(counted.links.values(), default=0),
        "all links, formula_bytes": found["total"].total,
        "all links, counted_bytes": sum(counted.links.values()),
        "rounds, formula": rounds,
        "rounds, counted": counted.rounds,
        "exact": exact,
        "measures": found,
        "planned": _as_scheduled(way, case, counted),
    }


def _as_scheduled(way: Way, case: Case, counted: Counted) -> bool | None:
    """Whether every device and link agrees; None where XLA chooses."""
    if not way.schedules(case.devices):
        return None
    links = {link: amount for link, amount in counted.links.items() if amount}
    planned = as_scheduled(way, case)
    return counted._replace(links=links, rounds=None) == planned._replace(rounds=None)
