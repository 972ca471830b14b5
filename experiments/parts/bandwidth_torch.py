"""One host's PyTorch process: sums buffers by gloo, as often as it is asked.

`python -m experiments.parts.bandwidth_torch RANK COUNT FOLDER`, started by
`experiments.parts.bandwidth_turns`; the processes find each other by a file in that
folder. Programs run over the first `devices` of them.
"""

import datetime
import functools
import os
import pathlib
import sys
import time
from typing import Any

os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

import torch
import torch.distributed as dist

from experiments.harness import processes

PATIENCE = datetime.timedelta(seconds=60)
GROUPS: dict[int, Any] = {}  # of the first processes, by how many


@functools.cache
def buffer(size_mb: float) -> torch.Tensor:
    """What this host puts in."""
    return torch.ones(round(size_mb * 2**20 / 4))


def seconds(devices: int, size_mb: float, calls: int) -> float:
    """Seconds of one call, of some that follow each other."""
    x, members = buffer(size_mb).fill_(1), GROUPS[devices]
    start = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x, group=members)
    each = (time.perf_counter() - start) / calls
    if x[-1] != devices**calls:
        raise ArithmeticError(f"{calls} sums of {devices} ones gave {x[-1]}")
    return each


def join(rank: int, count: int, folder: str) -> None:
    """Joins the other processes."""
    place = pathlib.Path(folder) / "rendezvous"
    dist.init_process_group(
        "gloo",
        init_method=place.as_uri(),
        rank=rank,
        world_size=count,
        timeout=PATIENCE,
    )


def join_groups(rank: int, count: int, folder: str) -> None:
    """Joins, and makes the groups of the first processes, which takes all of them."""
    join(rank, count, folder)
    for devices in range(2, count + 1):
        GROUPS[devices] = dist.new_group([*range(devices)], PATIENCE)


def main(rank: int, count: int, folder: str) -> None:
    """Serves the commands of `experiments.parts.bandwidth_turns`."""
    torch.set_num_threads(1)
    commands = {
        "start": functools.partial(join_groups, rank, count, folder),
        "seconds": seconds,
    }
    processes.serve(lambda do, **options: commands[do](**options))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
