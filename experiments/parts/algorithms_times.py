"""All algorithms in one process, timed in turns, beside what is predicted."""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from experiments.harness import show, timing
from experiments.harness.result import Rows
from experiments.parts.algorithms_prices import KIND, written
from jaxdp import algorithms

NATIVE = "native"
NAMES = (*algorithms.SCHEDULES[KIND], NATIVE)
SLOW = 8  # times the quickest: not timed with buffers above `SMALL`
SMALL = 2**20  # bytes


def measured(counts: Sequence[int], sizes: Sequence[int], repeats: int) -> Rows:
    """Times every algorithm for each N and size; times of one pair are in turns.

    Algorithms that are much slower than the quickest are not timed with large buffers:
    they would take minutes.
    """
    rows = []
    total = len(counts) * len(sizes) * repeats
    with show.progress("timing all-reduces", total) as advance:
        for devices in counts:
            mesh, names = jaxdp.data_mesh(devices), NAMES
            for size_bytes in sizes:
                found = _rows(mesh, names, size_bytes, repeats, advance)
                names = _quick(found) if size_bytes >= SMALL else names
                rows += found
    return rows


def agreement(times: Rows) -> Rows:
    """How good the choice was: its time in that of the quickest that was measured."""
    rows = []
    for devices, size_bytes in dict.fromkeys((r["N"], r["size_bytes"]) for r in times):
        found = {
            row["algorithm"]: row["median_ms"]
            for row in times
            if (row["N"], row["size_bytes"]) == (devices, size_bytes)
        }
        native = found.pop(NATIVE)
        best = min(found, key=lambda name: found[name])
        chosen = jaxdp.choose_algorithm(size_bytes, devices).algorithm
        rows.append(
            {
                "buffer": written(size_bytes),
                "N": devices,
                "chosen": chosen,
                "quickest": best,
                "chosen / quickest": found[chosen] / found[best],
                "ring / quickest": found["ring"] / found[best],
                "quickest / native": found[best] / native,
                "label": times[0]["label"],
            }
        )
    return rows


def _quick(rows: Rows) -> tuple[str, ...]:
    """The algorithms that are not much slower than the quickest."""
    took = {row["algorithm"]: row["median_ms"] for row in rows}
    best = min(took[name] for name in took if name != NATIVE)
    return tuple(name for name in took if took[name] <= SLOW * best)


def _rows(
    mesh: Mesh,
    names: Sequence[str],
    size_bytes: int,
    repeats: int,
    advance: Callable[[], None],
) -> Rows:
    """One N and size."""
    given = np.ones((mesh.size, size_bytes // 4), np.float32)
    x = jax.device_put(given, NamedSharding(mesh, P("data")))
    variants = {name: functools.partial(_reduced(name, mesh), x) for name in names}
    times = timing.interleaved(variants, repeats, advance)
    choice = jaxdp.choose_algorithm(size_bytes, mesh.size)
    foretold = {c.algorithm: 1e3 * c.seconds for c in choice.candidates}
    return [
        {
            "N": mesh.size,
            "size_bytes": size_bytes,
            "algorithm": name,
            "predicted_ms": foretold.get(name),
        }
        | time._asdict()
        for name, time in times.items()
    ]


def _reduced(name: str, mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """`[N, L]`, a row per device, to `[L]` on every device."""
    return jax.jit(
        jax.shard_map(
            lambda x: jaxdp.all_reduce(x[0], "data", name),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
    )
