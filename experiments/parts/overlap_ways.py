"""Ways to have XLA start transfers early: its options, and a profile of times.

XLA's latency-hiding scheduler is on by default, and three things stand in its way.
Small permutes between the same devices are combined, so that one waits for the operands
of the other. One collective is kept in flight. And XLA has no times of permutes: it
takes them for short. (Its other model of latency, "sol", changes nothing here.)
"""

import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jaxdp.program import hlo
from jaxdp.program.timeline import transfers
from jaxdp.program.timeline.scheduled import Item, Kernel, Start, schedule
from jaxdp.targets import Hardware
from jaxdp.targets.quiet import quietly

PERMUTES_COMBINED = "xla_gpu_collective_permute_combine_threshold_bytes"
ANALYTICAL_MODEL = "xla_gpu_enable_analytical_latency_estimator"
IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
DEFAULT = "default"


class Way(NamedTuple):
    """Options of XLA, and whether it is given a profile of predicted times."""

    name: str
    options: Mapping[str, Any]
    profiled: bool = False


APART = {PERMUTES_COMBINED: 0}
WAYS = (
    Way(DEFAULT, {}),
    Way("apart", APART),
    Way("XLA's model", APART | {ANALYTICAL_MODEL: True}),
    Way("4 in flight", APART | {IN_FLIGHT: 4}),
    Way("all in flight", APART | {IN_FLIGHT: 1000}),
    Way("profile, 2 in flight", APART | {IN_FLIGHT: 2}, profiled=True),
)
LEGEND = (
    "waiting: for matrix multiplications of the step; beside: with some between start "
    "and done; all but the default keep permutes apart; in flight: so many collectives "
    "at once, 1 by default; profile: compiled again, with the times predicted here"
)
EXTREMES = (WAYS[0], WAYS[4])  # enough for a step in which nothing can overlap


class Scheduled(NamedTuple):
    """A program, compiled in one way."""

    way: Way
    program: jax.stages.Compiled
    items: tuple[Item, ...]


def scheduled(lowered: jax.stages.Lowered, way: Way, hardware: Hardware) -> Scheduled:
    """Compiles a program, twice for a profile: as after a run that was profiled."""
    found = _compiled(lowered, way, way.options)
    if not way.profiled:
        return found
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "profile.pbtxt"
        path.write_text(profile(found.items, hardware), encoding="utf-8")
        return _compiled(lowered, way, {**way.options, PROFILE: str(path)})


def _compiled(
    lowered: jax.stages.Lowered, way: Way, options: Mapping[str, Any]
) -> Scheduled:
    with quietly():
        program = lowered.compile(compiler_options=dict(options))
    return Scheduled(way, program, schedule(hlo.parse(program.as_text() or "")))


def profile(items: Sequence[Item], hardware: Hardware) -> str:
    """What every instruction takes, as XLA reads it."""
    costs = {
        item.name: hardware.kernel_s(item.work.flops, item.work.bytes)
        if isinstance(item, Kernel)
        else transfers.seconds(item.op, hardware)
        for item in items
        if isinstance(item, Kernel | Start)
    }
    return "".join(
        f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n'
        for name, seconds in costs.items()
    )
