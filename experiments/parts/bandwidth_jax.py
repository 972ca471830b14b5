"""One host's JAX process: sums buffers in every way, as often as it is asked.

`python -m experiments.parts.bandwidth_jax RANK COUNT COORDINATOR`, started by
`experiments.parts.bandwidth_turns`. A rank is that of a process, which has one device.
Programs run over the first `devices` of them, and only these are asked then.
"""

import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
}

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from experiments.harness import processes
from experiments.parts import bandwidth_ways as ways
from jaxdp.program import analyze

PERIOD = 1021  # the buffer repeats 0, 1, ... 1020: sums of 8 hosts are exact in float32


@functools.cache
def given(devices: int, size_mb: float) -> jax.Array:
    """What the hosts put in, `[devices, elements]`: a row each."""
    rows = NamedSharding(jaxdp.data_mesh(jax.devices()[:devices]), P("data"))
    own = np.arange(ways.elements_of(size_mb), dtype=np.float32) % PERIOD
    own *= jax.process_index() + 1
    return jax.make_array_from_process_local_data(rows, own[None])


@functools.cache
def compiled(way: str, devices: int, size_mb: float) -> Any:
    """The program of one way, for that input."""
    mapped = jax.shard_map(
        _body(way, devices),
        mesh=jaxdp.data_mesh(jax.devices()[:devices]),
        in_specs=P("data"),
        out_specs=P("data") if way == ways.PERMUTE else P(),
    )
    return jax.jit(mapped).lower(given(devices, size_mb)).compile()


def _body(way: str, devices: int) -> Callable[[jax.Array], Any]:
    """What one device does with its `[1, elements]`."""
    schedule = ways.schedule(way, devices)
    if schedule is not None:
        reduce = functools.partial(
            jaxdp.all_reduce, axis_name="data", algorithm=schedule
        )
        return lambda x: [reduce(bucket) for bucket in ways.buckets(x[0])]
    if way == ways.PERMUTE:
        right = [(r, (r + 1) % devices) for r in range(devices)]
        return lambda x: lax.ppermute(x, "data", right)
    return lambda x: lax.psum(x[0], "data")


def check(way: str, devices: int, size_mb: float) -> list[int]:
    """Runs once and checks the sum; returns what each device sends."""
    program, x = compiled(way, devices, size_mb), given(devices, size_mb)
    local = [np.ravel(y.addressable_data(0)) for y in jax.tree.leaves(program(x))]
    found = np.concatenate(local)
    weight = devices * (devices + 1) // 2
    if way == ways.PERMUTE:
        weight = (jax.process_index() - 1) % devices + 1
    expected = np.arange(found.size, dtype=np.float32) % PERIOD * weight
    np.testing.assert_array_equal(found, expected)
    return [*map(int, analyze(program).sent_bytes)]


def seconds(way: str, devices: int, size_mb: float, calls: int) -> float:
    """Seconds of one call, of some that follow each other."""
    program, x = compiled(way, devices, size_mb), given(devices, size_mb)
    start = time.perf_counter()
    for _ in range(calls):
        jax.block_until_ready(program(x))
    return (time.perf_counter() - start) / calls


def main(rank: int, count: int, coordinator: str) -> None:
    """Serves the commands of `experiments.parts.bandwidth_turns`."""

    def start() -> None:
        jaxdp.initialize(coordinator, count, rank)

    commands = {"start": start, "check": check, "seconds": seconds}
    processes.serve(lambda do, **options: commands[do](**options))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
