"""How long the verifier and the simulator take, for every algorithm."""

import dataclasses
import functools
import time
from collections.abc import Iterator

import numpy as np

from benchmarks.case import Case
from benchmarks.rows import Row
from jaxdp import algorithms
from jaxdp.schedule import Schedule, simulate, verify

DEVICES = 64
REPEATS = 15
LIMIT_S = 1.0


def cases() -> Iterator[Case]:
    """Every all-reduce, for 64 devices: other collectives are parts of them."""
    builders = {
        **algorithms.SCHEDULES["all_reduce"],
        "hierarchical": functools.partial(algorithms.hierarchical, hosts=8),
        "sharded_servers": functools.partial(algorithms.sharded_servers, servers=8),
    }
    for algorithm, build in builders.items():
        yield Case(
            name=f"verify and simulate {algorithm}, N = {DEVICES}",
            group="schedules",
            run=functools.partial(checked, build),
        )


def checked(build, name: str, seconds: float) -> Iterator[Row]:
    """Proves a schedule and runs it in NumPy, a number per chunk: seconds of the CPU.

    Args:
        build: `devices -> Schedule`.
        name: Of the row.
        seconds: Not used: all are short.
    """
    del seconds
    schedule = build(DEVICES)
    times = [_once(schedule, repeat) for repeat in range(REPEATS)]
    yield Row.of(name, "s", times, limit=LIMIT_S)


def _once(schedule: Schedule, repeat: int) -> float:
    """Seconds for one schedule that was not seen before: `verify` keeps what it saw."""
    schedule = dataclasses.replace(schedule, name=f"{schedule.name}, again {repeat}")
    shape = (schedule.devices, schedule.chunks)
    given = np.arange(np.prod(shape), dtype=np.int64).reshape(shape)
    start = time.process_time()
    verify(schedule)
    *_, ended = simulate(schedule, given)
    taken = time.process_time() - start
    np.testing.assert_array_equal(ended, np.broadcast_to(given.sum(axis=0), shape))
    return taken
