"""Who holds what while a ring runs: by the schedule, and as a program left it."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from experiments.harness.result import Rows
from jaxdp import executor
from jaxdp.schedule import Holdings, Schedule, holdings


def walk(schedule: Schedule) -> Rows:
    """Every round of a ring: what each device sends, receives and then holds."""
    rows = []
    moments = list(holdings(schedule))[1:]
    for index, (round_, held) in enumerate(zip(schedule.rounds, moments, strict=True)):
        (transfer,) = round_.transfers
        sends = {source: f"{chunk} to {target}" for source, target, chunk in transfer}
        gets = {target: f"{chunk} from {source}" for source, target, chunk in transfer}
        for device in range(schedule.devices):
            step = {"round": index, "device": device, "sends": sends[device]}
            step |= {"receives": gets[device], "to": transfer.op}
            parts = {
                f"chunk {chunk}": _named(part, schedule.devices)
                for chunk, part in enumerate(held[device])
            }
            rows.append(step | parts)
    return rows


def executed(schedule: Schedule, mesh: Mesh) -> Holdings:
    """What every device holds after the rounds, read from the values they left.

    Device d contributes 2^d to every chunk, so a sum tells whose contributions are in
    it, and how often.
    """
    whole = dataclasses.replace(schedule, ends=schedule.starts)  # hand out every chunk

    def rounds(x):
        return executor.execute(whole, x[0], "data")[None]

    powers = 2.0 ** np.arange(mesh.size, dtype=np.float32)
    given = np.tile(powers[:, None, None], (1, schedule.chunks, 1))
    spec = P("data")
    program = jax.shard_map(rounds, mesh=mesh, in_specs=spec, out_specs=spec)
    sums = np.asarray(jax.jit(program)(given))[..., 0].astype(int)
    return tuple(
        tuple(frozenset(d for d in range(mesh.size) if total >> d & 1) for total in row)
        for row in sums
    )


def rows(schedule: Schedule, left: Holdings) -> Rows:
    """Which chunks each device holds complete: by schedule, and executed."""
    *_, foretold = holdings(schedule)
    by_schedule, by_values = complete_chunks(foretold), complete_chunks(left)
    return [
        {
            "device": device,
            "complete by schedule": _listed(by_schedule[device]),
            "complete when executed": _listed(by_values[device]),
            "all chunks as foretold": foretold[device] == left[device],
        }
        for device in range(schedule.devices)
    ]


def complete_chunks(left: Holdings) -> list[list[int]]:
    """The complete chunks of each device."""
    return [
        [chunk for chunk, held in enumerate(row) if len(held) == len(left)]
        for row in left
    ]


def _listed(chunks: list[int]) -> str:
    """Chunks in words."""
    return ", ".join(f"chunk {chunk}" for chunk in chunks)


def _named(contributions: frozenset[int], devices: int) -> str:
    """Whose contributions a chunk sums up."""
    if len(contributions) == devices:
        return "all"
    return "+".join(map(str, sorted(contributions)))
