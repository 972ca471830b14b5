"""Sharded servers: S stars side by side.

Ranks 0 to S - 1 serve, and server s carries chunk s, so (N - 1) K / S in and out (Li et
al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
section 2). They work too, unless they are `dedicated`: then the ranks from S on are the
workers. N = 4, S = 2, push, who sends to servers 0 and 1:

    transfer    both work      dedicated
       1        1 and 2        2 and 3
       2        2 and 3        3 and 2
       3        3 and 0
"""

from jaxdp.algorithms.building import everywhere, for_any_devices, one_each, one_round
from jaxdp.schedule import Schedule, Transfer


@for_any_devices
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
    starts, ends = (tuple(workers),) * servers, one_each(servers)
    return Schedule(name, devices, servers, starts, ends, one_round(sends))


@for_any_devices
def sharded_servers_pull(devices: int, servers: int) -> Schedule:
    """Server `s` sends chunk `s` to every other device, servers too.

    Cost: 1 round; each server sends (N - 1) K / S bytes.
    """
    sends = []
    for turn in range(1, devices):
        pairs = tuple((s, (s + turn) % devices) for s in range(servers))
        sends.append(Transfer(pairs, tuple(range(servers)), "replace"))
    name = f"sharded_servers_pull({devices}, {servers})"
    starts, ends = one_each(servers), everywhere(devices, servers)
    return Schedule(name, devices, servers, starts, ends, one_round(sends))


@for_any_devices
def sharded_servers(devices: int, servers: int, dedicated: bool = False) -> Schedule:
    """All-reduce of the workers through servers: push, then pull.

    Cost: 2 rounds; each server receives (N - 1) K / S bytes for what it serves and
    sends as many. One server, not dedicated, is the star.
    """
    pushed = sharded_servers_push(devices, servers, dedicated)
    name = f"sharded_servers({devices}, {servers}, dedicated={dedicated})"
    return pushed.then(sharded_servers_pull(devices, servers), name)


@for_any_devices
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
    return Schedule(name, devices, count * servers, starts, ends, one_round(sends))


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
