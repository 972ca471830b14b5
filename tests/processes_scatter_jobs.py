"""Reduce-scatters between processes; `processes_cases_jobs` runs them."""

import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp

CHUNKS = (2**10, 2**14, 2**18, 2**20)  # 4 KiB to 4 MiB, in float32
ROUNDS = 8
LATE_S = 31.0


def scattering(_: pathlib.Path) -> dict[str, Any]:
    """Sums of chunks of every size, again and again, compared exactly."""
    firsts = [jax.local_devices(rank)[0] for rank in range(jax.process_count())]
    mesh = jaxdp.data_mesh(firsts)
    wrong = {}
    for name, scatter in scatters(mesh).items():
        for length in CHUNKS:
            found = [scattered(scatter, mesh, length, i) for i in range(ROUNDS)]
            wrong[f"{name} {length}"] = int(sum(found))
    return wrong


def late(_: pathlib.Path) -> dict[str, Any]:
    """One process comes late, as if it had compiled or saved for longer."""
    mesh = jaxdp.data_mesh()
    scatter = scatters(mesh)["ring"]
    early = scattered(scatter, mesh, CHUNKS[0], 0)
    time.sleep(LATE_S * jax.process_index())
    start = time.monotonic()
    wrong = scattered(scatter, mesh, CHUNKS[0], 1)
    return {"wrong": [early, wrong], "waited": time.monotonic() - start}


def scatters(mesh: jax.sharding.Mesh) -> dict[str, Callable]:
    """JAX's own, and that of a ring, of `[N * length]` on every device."""

    def on_all(body):
        split = jax.shard_map(
            lambda x: body(x[0])[None],
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
        )
        return jax.jit(split)

    return {
        "native": on_all(lambda x: jax.lax.psum_scatter(x, "data", tiled=True)),
        "ring": on_all(lambda x: jaxdp.reduce_scatter(x, "data").reshape(-1)),
    }


def scattered(scatter: Callable, mesh: Any, length: int, seed: int) -> int:
    """How many of this process's sums of whole numbers are wrong."""
    count = mesh.size
    base = np.arange(count * length) % 99991

    def of_rank(rank):
        return (base * (rank + 2) + 1013 * seed).astype("f")

    stacked = jax.make_array_from_callback(
        (count, count * length),
        NamedSharding(mesh, P("data")),
        lambda index: of_rank(index[0].start)[None],  # type: ignore[index]
    )
    of_all = np.stack([of_rank(rank) for rank in range(count)])
    expected = of_all.astype(np.int64).sum(axis=0)
    wrong = 0
    for shard in scatter(stacked).addressable_shards:
        start = length * shard.index[0].start
        here = np.asarray(shard.data)[0].astype(np.int64)
        wrong += int((here != expected[start : start + length]).sum())
    return wrong
