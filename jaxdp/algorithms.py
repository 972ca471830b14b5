"""Collective algorithms: short functions that return schedules.

Legend: `N` devices in a circle or around a root, `K` bytes in the whole buffer. All
arithmetic on devices and chunks is modulo `N`.

The ring (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
workstations", JPDC 2009, section 3) cuts the buffer into N chunks; every device sends
to its right-hand neighbour only. N = 4, reduce-scatter, chunk sent by each device:

    round   device 0   device 1   device 2   device 3
      0        3          0          1          2
      1        2          3          0          1
      2        1          2          3          0
    owns       0          1          2          3      (complete after the last round)

The star is `nn.DataParallel`'s pattern and the simplest parameter server: everything
goes through one root, whose link carries (N - 1) K in and (N - 1) K out.

Sharded servers are S stars side by side (Li et al., "Scaling Distributed Machine
Learning with the Parameter Server", OSDI 2014, section 2): ranks 0 to S - 1 serve, and
server s carries chunk s, so (N - 1) K / S in and out. They work too, unless they are
`dedicated`: then the ranks from S on are the workers. N = 4, S = 2, push, who sends to
servers 0 and 1:

    transfer    both work      dedicated
       1        1 and 2        2 and 3
       2        2 and 3        3 and 2
       3        3 and 0
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from jaxdp.schedule import Placement, Round, Schedule, Transfer

Options = ParamSpec("Options")
Builder = Callable[Concatenate[int, Options], Schedule]


def _for_any_devices(build: Builder[Options]) -> Builder[Options]:
    """Lets the schedules of a function tell how to be built for other devices.

    The last ones are kept: a ring of 1,024 devices takes a second to build.
    """
    kept = functools.lru_cache(maxsize=64)(build)

    @functools.wraps(build)
    def built(devices: int, /, *args: Options.args, **options: Options.kwargs):
        def family(other: int) -> Schedule:
            return built(other, *args, **options)

        return dataclasses.replace(kept(devices, *args, **options), family=family)

    return built


@_for_any_devices
def ring_reduce_scatter(devices: int) -> Schedule:
    """Ring reduce-scatter: device `r` ends with the complete chunk `r`.

    In round `s` device `r` sends chunk `r - 1 - s`; its neighbour `r + 1` adds it.

    Cost: N - 1 rounds; (N - 1) K / N bytes sent and received per device.
    """
    rounds = tuple(
        _shift(devices, lambda r, s=s: r - 1 - s, "add") for s in range(devices - 1)
    )
    name = f"ring_reduce_scatter({devices})"
    starts, ends = _everywhere(devices, devices), _one_each(devices)
    return Schedule(name, devices, devices, starts, ends, rounds)


@_for_any_devices
def ring_all_gather(devices: int) -> Schedule:
    """Ring all-gather: device `r` starts with chunk `r`, every device ends with all.

    In round `s` device `r` sends chunk `r - s`; its neighbour `r + 1` stores it.

    Cost: N - 1 rounds; (N - 1) K / N bytes sent and received per device.
    """
    rounds = tuple(
        _shift(devices, lambda r, s=s: r - s, "replace") for s in range(devices - 1)
    )
    name = f"ring_all_gather({devices})"
    starts, ends = _one_each(devices), _everywhere(devices, devices)
    return Schedule(name, devices, devices, starts, ends, rounds)


@_for_any_devices
def ring(devices: int) -> Schedule:
    """Ring all-reduce: `ring_reduce_scatter`, then `ring_all_gather`.

    Cost: 2 (N - 1) rounds; 2 (N - 1) K / N bytes sent and received per device.
    """
    scattered = ring_reduce_scatter(devices)
    return scattered.then(ring_all_gather(devices), f"ring({devices})")


@_for_any_devices
def star_reduce(devices: int, root: int = 0) -> Schedule:
    """Every device sends its whole buffer to the root, which adds them to its own.

    It adds in rank order.

    Cost: 1 round; the root receives (N - 1) K bytes, the others send K each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((source, root),), (0,), "add") for source in others]
    name = f"star_reduce({devices}, root={root})"
    starts, ends = _everywhere(devices, 1), ((root,),)
    return Schedule(name, devices, 1, starts, ends, _one_round(sends))


@_for_any_devices
def star_broadcast(devices: int, root: int = 0) -> Schedule:
    """The root sends its whole buffer to every other device.

    Cost: 1 round; the root sends (N - 1) K bytes, the others receive K each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((root, target),), (0,), "replace") for target in others]
    name = f"star_broadcast({devices}, root={root})"
    starts, ends = ((root,),), _everywhere(devices, 1)
    return Schedule(name, devices, 1, starts, ends, _one_round(sends))


@_for_any_devices
def star(devices: int, root: int = 0) -> Schedule:
    """Star all-reduce: `star_reduce` to the root, then `star_broadcast` from it.

    Cost: 2 rounds; the root receives (N - 1) K bytes and sends as many, the others K.
    """
    reduced = star_reduce(devices, root)
    name = f"star({devices}, root={root})"
    return reduced.then(star_broadcast(devices, root), name)


@_for_any_devices
def recursive_doubling(devices: int) -> Schedule:
    """Recursive doubling: in round s everybody adds what rank r XOR 2^s has.

    Few rounds of whole buffers: for small ones, where latency is what costs. Both of a
    pair add the same two numbers, so all end with the same bits. If N is no power of
    two, the ranks beyond the largest one in it add to the first ranks before, and get
    the sum after.

    Cost: log2 N rounds, K bytes sent and received in each; floor(log2 N) + 2 if N is no
    power of two.

    References:
        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
        Operations in MPICH", IJHPCA 2005, section 4.4.
    """
    power = 1 << (devices.bit_length() - 1)
    beyond = [(r, r - power) for r in range(power, devices)]
    steps = [1 << s for s in range(power.bit_length() - 1)]
    swaps = [[(r, r ^ step) for r in range(power)] for step in steps]
    rounds = [_whole(pairs, "add") for pairs in ([beyond] if beyond else []) + swaps]
    if beyond:
        rounds.append(_whole([(low, high) for high, low in beyond], "replace"))
    name = f"recursive_doubling({devices})"
    everywhere = _everywhere(devices, 1)
    return Schedule(name, devices, 1, everywhere, everywhere, tuple(rounds))


@_for_any_devices
def star_gather(devices: int, root: int = 0) -> Schedule:
    """Device `r` sends chunk `r`, all it has, to the root.

    Cost: 1 round; the root receives (N - 1) K / N bytes, the others send K / N each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((source, root),), (source,), "replace") for source in others]
    name = f"star_gather({devices}, root={root})"
    starts, ends = _one_each(devices), ((root,),) * devices
    return Schedule(name, devices, devices, starts, ends, _one_round(sends))


@_for_any_devices
def star_scatter(devices: int, root: int = 0) -> Schedule:
    """The root sends chunk `r` to device `r`.

    Cost: 1 round; the root sends (N - 1) K / N bytes, the others receive K / N each.
    """
    others = [d for d in range(devices) if d != root]
    sends = [Transfer(((root, target),), (target,), "replace") for target in others]
    name = f"star_scatter({devices}, root={root})"
    starts, ends = ((root,),) * devices, _one_each(devices)
    return Schedule(name, devices, devices, starts, ends, _one_round(sends))


@_for_any_devices
def sharded_servers_push(
    devices: int, servers: int, dedicated: bool = False
) -> Schedule:
    """Every worker sends chunk `s` to server `s`, which adds them up.

    Cost: 1 round; each server receives K / S bytes from every worker but itself.
    """
    workers = serving_workers(devices, servers, dedicated)
    holding = set(workers) & set(range(servers))
    sends = []
    for pairs in _turns(workers, servers):
        for op in ("add", "replace"):  # a server adds to what it has
            chosen = [p for p in pairs if (p[1] in holding) == (op == "add")]
            if chosen:
                sends.append(Transfer(tuple(chosen), tuple(s for _, s in chosen), op))
        holding |= {server for _, server in pairs}
    name = f"sharded_servers_push({devices}, {servers}, dedicated={dedicated})"
    starts, ends = (tuple(workers),) * servers, _one_each(servers)
    return Schedule(name, devices, servers, starts, ends, _one_round(sends))


@_for_any_devices
def sharded_servers_pull(devices: int, servers: int) -> Schedule:
    """Server `s` sends chunk `s` to every other device, servers too.

    Cost: 1 round; each server sends (N - 1) K / S bytes.
    """
    sends = []
    for turn in range(1, devices):
        pairs = tuple((s, (s + turn) % devices) for s in range(servers))
        sends.append(Transfer(pairs, tuple(range(servers)), "replace"))
    name = f"sharded_servers_pull({devices}, {servers})"
    starts, ends = _one_each(servers), _everywhere(devices, servers)
    return Schedule(name, devices, servers, starts, ends, _one_round(sends))


@_for_any_devices
def sharded_servers(devices: int, servers: int, dedicated: bool = False) -> Schedule:
    """All-reduce of the workers through servers: push, then pull.

    Cost: 2 rounds; each server receives (N - 1) K / S bytes for what it serves and
    sends as many. One server, not dedicated, is the star.
    """
    pushed = sharded_servers_push(devices, servers, dedicated)
    name = f"sharded_servers({devices}, {servers}, dedicated={dedicated})"
    return pushed.then(sharded_servers_pull(devices, servers), name)


@_for_any_devices
def sharded_servers_collect(
    devices: int, servers: int, dedicated: bool = False
) -> Schedule:
    """As a push, but servers keep what they receive apart, worker by worker.

    The W workers' chunks for server `s` are chunks `s W` to `s W + W - 1`.

    Cost: 1 round; each server receives K / S bytes from every worker but itself.
    """
    workers = serving_workers(devices, servers, dedicated)
    count = len(workers)
    sends = [
        Transfer(
            tuple(pairs),
            tuple(server * count + workers.index(w) for w, server in pairs),
            "replace",
        )
        for pairs in _turns(workers, servers)
        if pairs
    ]
    name = f"sharded_servers_collect({devices}, {servers}, dedicated={dedicated})"
    starts = tuple((worker,) for _ in range(servers) for worker in workers)
    ends = tuple((server,) for server in range(servers) for _ in workers)
    return Schedule(name, devices, count * servers, starts, ends, _one_round(sends))


def serving_workers(devices: int, servers: int, dedicated: bool) -> range:
    """Ranks of the workers.

    Raises:
        ValueError: More servers than devices, none, or no device left to work.
    """
    most = devices - 1 if dedicated else devices
    if not 1 <= servers <= most:
        left = " that leave at least one worker" if dedicated else ""
        raise ValueError(
            f"sharded_servers got servers={servers} with dedicated={dedicated} on "
            f"{devices} devices. It needs between 1 and {most} servers{left}. Use "
            "fewer servers, or more devices."
        )
    return range(servers if dedicated else 0, devices)


# Collective -> algorithm -> schedule for N devices (and a root, where there is one).
SCHEDULES: dict[str, dict[str, Callable[..., Schedule]]] = {
    "all_reduce": {
        "ring": ring,
        "star": star,
        "recursive_doubling": recursive_doubling,
    },
    "reduce_scatter": {"ring": ring_reduce_scatter},
    "all_gather": {"ring": ring_all_gather},
    "reduce": {"star": star_reduce},
    "broadcast": {"star": star_broadcast},
    "gather": {"star": star_gather},
    "scatter": {"star": star_scatter},
}


@functools.lru_cache(maxsize=1024)
def build(collective: str, algorithm: str, devices: int, root: int = 0) -> Schedule:
    """Looks up an algorithm and builds its schedule.

    Args:
        collective: A key of `SCHEDULES`, such as `"all_reduce"`.
        algorithm: Such as `"ring"` or `"star"`, where `SCHEDULES` has it for the
            collective.
        devices: N >= 1.
        root: Rank of the root, for the collectives that have one.

    Raises:
        ValueError: Unknown algorithm, no devices, or a root that is no device.
    """
    choices = SCHEDULES[collective]
    if algorithm not in choices:
        others = ["auto", "native"] if collective == "all_reduce" else []
        raise ValueError(
            f"{collective} got algorithm={algorithm!r}. It must be one of "
            f"{sorted([*choices, *others])}, or a jaxdp.schedule.Schedule of your own."
        )
    if devices < 1:
        raise ValueError(f"{collective} got {devices} devices. It needs at least 1.")
    if not 0 <= root < devices:
        raise ValueError(
            f"{collective} got root={root} on {devices} devices. The root is a rank "
            f"from 0 to {devices - 1}: choose one of those."
        )
    if collective in ("all_reduce", "reduce_scatter", "all_gather"):
        return choices[algorithm](devices)
    return choices[algorithm](devices, root)


def _shift(devices: int, chunk_of: Callable[[int], int], op) -> Round:
    """One ring round: device `r` sends chunk `chunk_of(r)` to `r + 1`."""
    chunks = tuple(chunk_of(r) % devices for r in range(devices))
    return Round((Transfer(_neighbours(devices), chunks, op),))


@functools.lru_cache(maxsize=64)
def _neighbours(devices: int) -> tuple[tuple[int, int], ...]:
    """Every device with the next one; the same tuple for all rounds of a ring."""
    return tuple((r, (r + 1) % devices) for r in range(devices))


def _whole(pairs: list[tuple[int, int]], op) -> Round:
    """One round in which the only chunk moves along pairs."""
    return Round((Transfer(tuple(pairs), (0,) * len(pairs), op),))


def _turns(workers: range, servers: int) -> list[list[tuple[int, int]]]:
    """Worker-server pairs, each once, so that nobody appears twice in a turn."""
    length = max(len(workers), servers)
    return [
        [
            (workers[(server + turn) % length], server)
            for server in range(servers)
            if (server + turn) % length < len(workers)
            and workers[(server + turn) % length] != server
        ]
        for turn in range(length)
    ]


def _one_round(transfers: list[Transfer]) -> tuple[Round, ...]:
    """One round of these transfers; none at all if there are none (N = 1)."""
    return (Round(tuple(transfers)),) if transfers else ()


def _everywhere(devices: int, chunks: int) -> Placement:
    """Every chunk on every device."""
    return (tuple(range(devices)),) * chunks


def _one_each(devices: int) -> Placement:
    """Chunk `r` on device `r` alone."""
    return tuple((r,) for r in range(devices))
