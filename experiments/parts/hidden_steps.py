"""Steps of every design before and after buckets took turns, compiled for GPUs."""

import dataclasses
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

import jaxdp
from jaxdp import targets
from jaxdp.prediction import Model
from jaxdp.prediction.step import compiled_on
from jaxdp.program import analyze
from jaxdp.program.timeline import Timeline
from jaxdp.program.verdict import Verdict
from jaxdp.targets import Hardware

TARGET = "h100"
BEFORE, AFTER, AS_IT_IS = "before", "after", "as it is"
MERGED, BUCKETS = "merged by XLA", "25 MB buckets"
RING, NATIVE, HIERARCHICAL = "RingAllReduce", "NativeAllReduce", "hierarchical"
AXES = "hosts", "devices"
SLOW_GB_S = 50.0


class Way(NamedTuple):
    """A design, and how its collectives are scheduled.

    Attributes:
        name: Of the design.
        variant: What tells it from another of the name; `AS_IT_IS` if there is none.
        design: It.
        two_axes: Whether it needs a mesh of hosts and of devices in a host.
    """

    name: str
    variant: str
    design: jaxdp.Design
    two_axes: bool = False


class Step(NamedTuple):
    """What was read from a compiled step.

    Attributes:
        model: The name of the model.
        way: How gradients travel.
        devices: How many there are.
        fast: With the links of the target.
        slow: With slower links inside a host.
        verdict: Whether the compiler kept the design.
        compile_s: What tracing and compiling took.
        program: The step; None of those that are not shown.
    """

    model: str
    way: Way
    devices: int
    fast: Timeline
    slow: Timeline
    verdict: Verdict
    compile_s: float
    program: jax.stages.Compiled | None

    @property
    def name(self) -> str:
        """How files are called."""
        return f"{self.model}, {self.way.name}, {self.way.variant}"


def ways(hosts: int, tiny: bool = False) -> list[Way]:
    """What is compared; the ring and XLA's own collectives alone in tiny form.

    ZeRO has no before: its buckets are tied to the program, in an order of their own.
    Two rings in one, inside hosts and between them, need several hosts.
    """
    every = [
        Way(RING, BEFORE, jaxdp.RingAllReduce(in_flight=None)),
        Way(RING, AFTER, jaxdp.RingAllReduce()),
        Way(NATIVE, MERGED, jaxdp.NativeAllReduce()),
        Way(NATIVE, BUCKETS, jaxdp.NativeAllReduce(bucket_cap_mb=25.0)),
    ]
    if tiny:
        return every
    every += [Way(f"Zero({stage})", AS_IT_IS, jaxdp.Zero(stage)) for stage in (2, 3)]
    if hosts > 1:
        every.append(Way(HIERARCHICAL, AFTER, jaxdp.AllReduce(HIERARCHICAL), True))
    return every


def machines(per_host: int) -> tuple[Hardware, Hardware]:
    """The target with its links, and with slower ones inside a host."""
    fast = targets.hardware(TARGET, devices_per_host=per_host)
    name, rate = f"{SLOW_GB_S:g} GB/s", 1e9 * SLOW_GB_S
    slow = dataclasses.replace(fast.link, name=name, bytes_per_s=rate)
    return fast, dataclasses.replace(fast, link=slow)


def compiled(model: Model, way: Way, devices: int, hosts: int) -> Step:
    """Compiles one step, and reads it; a program of several hosts is not kept."""
    started = time.perf_counter()
    mesh = targets.mesh(TARGET, devices, hosts)
    if way.two_axes:
        grid = mesh.devices.reshape(hosts, devices // hosts)
        mesh = Mesh(grid, AXES, axis_types=mesh.axis_types * 2)
    train, _, program = compiled_on(mesh, way.design, model, TARGET, hosts)
    took_s = time.perf_counter() - started
    report = analyze(program)
    fast, slow = (report.timeline(each) for each in machines(devices // hosts))
    shown = program if way.name == RING and hosts == 1 else None
    verdict = report.verify(train)
    return Step(model.name, way, devices, fast, slow, verdict, took_s, shown)
