"""Every design: as the library has it, in closed form, and as schedules."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jaxdp
from experiments.parts import traffic_formulas as formulas
from experiments.parts.traffic_formulas import Exchange
from jaxdp import algorithms
from jaxdp.compression import Bf16, Int8
from jaxdp.schedule import Schedule

SERVERS, DEDICATED = 4, 2  # of the designs with several servers


class Case(NamedTuple):
    """What the closed forms need to know.

    Attributes:
        devices: N.
        leaves: Elements of each leaf of the gradient.
        arrays: Elements of the arrays in which XLA's own all-reduces carry them.
    """

    devices: int
    leaves: Sequence[int]
    arrays: Sequence[int] = ()


class Planned(NamedTuple):
    """A schedule of the library, and how many messages its whole buffer is."""

    schedule: Schedule
    messages: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """One way to exchange gradients.

    Attributes:
        name: For tables and figures.
        design: Of the library; None for `DataParallel`, which is not one program.
        least: The fewest devices it makes sense for.
        slow: Whether compiling it for many devices takes long.
        device: What the busiest device sends, in words.
        link: What the busiest link carries, in words.
        exchanges: All messages of a step.
        schedules: The library's, for each of these; empty where XLA chooses.
    """

    name: str
    design: jaxdp.Design | None
    least: int = 1
    slow: bool = False
    device: str
    link: str
    exchanges: Callable[[Case], list[Exchange]]
    schedules: Callable[[int], list[list[Planned]]] = lambda n: []


def _ring_of(case: Case, beside: int) -> Exchange:
    n = case.devices
    return Exchange(formulas.ring(n), formulas.chunked(case.leaves, n, beside))


def _alone(case: Case) -> Exchange:
    """The loss, around a ring of its own."""
    return _ring_of(case._replace(leaves=()), formulas.LOSS)


def _served(case: Case, count: int, dedicated: bool) -> list[Exchange]:
    n = case.devices
    share = formulas.dedicated if dedicated else formulas.servers
    workers = n - count if dedicated else n
    return [Exchange(share(n, count), formulas.served(case.leaves, count, workers))]


def _parts(case: Case, message: Callable) -> list[Exchange]:
    n = case.devices
    return [Exchange(formulas.parts(n), message(case.leaves, n)), _alone(case)]


def _through_parts(n: int) -> list[list[Planned]]:
    collect = algorithms.sharded_servers_collect(n, n)
    gather = algorithms.ring_all_gather(n)
    return [[Planned(collect, n), Planned(gather)], [Planned(algorithms.ring(n))]]


def _server(name: str, count: int, dedicated: bool = False) -> Way:
    if dedicated:
        device, link = f"(N-1)Φ/{count}", f"Φ/{count}"
    elif count > 1:
        device, link = f"(N+{count - 2})Φ/{count}", f"2Φ/{count}"
    else:
        device, link = "(N-1)Φ", "Φ"
    return Way(
        name=name,
        design=jaxdp.ParameterServer(count, dedicated),
        least=count + dedicated,
        device=device,
        link=link,
        exchanges=lambda case: _served(case, count, dedicated),
        schedules=lambda n: [
            [Planned(algorithms.sharded_servers(n, count, dedicated))]
        ],
    )


def _compressed(name: str, compression: Any, part: str, message: Callable) -> Way:
    return Way(
        name=name,
        design=jaxdp.RingAllReduce(compression=compression),
        slow=True,
        device=f"2(N-1)Φ/{part}N",
        link=f"Φ/{part}",
        exchanges=lambda case: _parts(case, message),
        schedules=_through_parts,
    )


def _star(case: Case) -> list[Exchange]:
    return [Exchange(formulas.star(case.devices), formulas.whole(case.leaves))]


RING, STAR, NATIVE, ONE_SERVER = "ring", "gather to root", "native", "1 server"
DOUBLING, PORT, LOCAL = "doubling", "DataParallel", "local SGD"
SHARED = f"{SERVERS} servers"
APART = f"{DEDICATED} dedicated"
_WAYS = [
    Way(
        name=STAR,
        design=jaxdp.GatherToRoot(),
        device="(N-1)Φ",
        link="Φ",
        exchanges=_star,
        schedules=lambda n: [[Planned(algorithms.star(n))]],
    ),
    Way(
        name=RING,
        design=jaxdp.RingAllReduce(),
        device="2(N-1)Φ/N",
        link="2(N-1)Φ/N",
        exchanges=lambda case: [_ring_of(case, formulas.LOSS)],
        schedules=lambda n: [[Planned(algorithms.ring(n))]],
    ),
    Way(
        name=DOUBLING,
        design=jaxdp.AllReduce("recursive_doubling"),
        device="log₂(N)Φ",
        link="Φ",
        exchanges=lambda case: [
            Exchange(formulas.doubling(case.devices), formulas.whole(case.leaves))
        ],
        schedules=lambda n: [[Planned(algorithms.recursive_doubling(n))]],
    ),
    Way(
        name=NATIVE,
        design=jaxdp.NativeAllReduce(),
        device="2(N-1)Φ/N",
        link="2(N-1)Φ/N",
        exchanges=lambda case: [
            Exchange(
                formulas.ring(case.devices),
                formulas.merged(case.leaves, case.devices, case.arrays),
            )
        ],
    ),
    _server(ONE_SERVER, 1),
    _server(SHARED, SERVERS),
    _server(APART, DEDICATED, dedicated=True),
    Way(
        name=LOCAL,
        design=jaxdp.LocalSGD(sync_every=2),
        device="2(N-1)Φ/N",
        link="2(N-1)Φ/N",
        exchanges=lambda case: [_ring_of(case, 0), _alone(case)],
        schedules=lambda n: [[Planned(algorithms.ring(n))]] * 2,
    ),
    _compressed("ring, bf16", Bf16(), "2", formulas.halved),
    _compressed("ring, int8", Int8(), "4", formulas.quartered),
]
WAYS = {way.name: way for way in _WAYS}
