"""Steps of every design before and after buckets took turns, compiled for GPUs."""

import dataclasses
import time
from typing import NamedTuple

import jax
from jax.sharding import Mesh

import jaxdp
from jaxdp import targets
from jaxdp.prediction import Model
from jaxdp.program import ProgramReport, analyze
from jaxdp.program.timeline import Timeline
from jaxdp.program.verdict import Verdict
from jaxdp.targets import Hardware

TARGET = "h100"
BEFORE, AFTER = "before", "after"
MERGED, BUCKETS = "merged by XLA", "25 MB buckets"
RING, NATIVE, HIERARCHICAL = "RingAllReduce", "NativeAllReduce", "hierarchical"
AXES = "hosts", "devices"
SLOW_GB_S = 50.0


class Together(jaxdp.Zero):
    """ZeRO whose buckets may all travel at a time."""

    in_flight = None


class Way(NamedTuple):
    """A design, and how its collectives are scheduled.

    Attributes:
        name: Of the design.
        variant: `BEFORE`, `AFTER`, or what tells it from another of the name.
        design: It.
        two_axes: Whether it needs a mesh of hosts and of devices in a host.
    """

    name: str
    variant: str
    design: jaxdp.Design
    two_axes: bool = False


class Step(NamedTuple):
    """A compiled step.

    Attributes:
        model: The name of the model.
        way: How gradients travel.
        devices: How many there are.
        hosts: How many hosts they are in.
        report: What was read from the program.
        verdict: Whether the compiler kept the design.
        program: The step.
        compile_s: What tracing and compiling it took.
    """

    model: str
    way: Way
    devices: int
    hosts: int
    report: ProgramReport
    verdict: Verdict
    program: jax.stages.Compiled
    compile_s: float

    @property
    def name(self) -> str:
        """How files are called."""
        return f"{self.model}, {self.way.name}, {self.way.variant}"

    def timeline(self, machine: Hardware) -> Timeline:
        """The step on some hardware, with its own number of devices in a host."""
        per_host = self.devices // self.hosts
        return self.report.timeline(
            dataclasses.replace(machine, devices_per_host=per_host)
        )


def ways(hosts: int, tiny: bool = False) -> list[Way]:
    """What is compared; the ring and XLA's own collectives alone in tiny form.

    Two rings in one, inside hosts and between them, need several hosts. Programs of
    several hosts compile slowly: of ZeRO there is only what is.
    """
    every = [
        Way(RING, BEFORE, jaxdp.RingAllReduce(in_flight=None)),
        Way(RING, AFTER, jaxdp.RingAllReduce()),
        Way(NATIVE, MERGED, jaxdp.NativeAllReduce()),
        Way(NATIVE, BUCKETS, jaxdp.NativeAllReduce(bucket_cap_mb=25.0)),
    ]
    if tiny:
        return every
    for stage in (2, 3):
        name = f"Zero({stage})"
        if hosts == 1:
            every.append(Way(name, BEFORE, Together(stage)))
        every.append(Way(name, AFTER, jaxdp.Zero(stage)))
    if hosts > 1:
        every.append(Way(HIERARCHICAL, AFTER, jaxdp.AllReduce(HIERARCHICAL), True))
    return every


def machines() -> list[Hardware]:
    """With the links of the target, and with slower ones."""
    fast = targets.hardware(TARGET)
    slow = dataclasses.replace(
        fast.link, name=f"{SLOW_GB_S:g} GB/s", bytes_per_s=1e9 * SLOW_GB_S
    )
    return [fast, dataclasses.replace(fast, link=slow)]


def compiled(model: Model, way: Way, devices: int, hosts: int) -> Step:
    """Compiles one step, and reads it."""
    started = time.perf_counter()
    mesh = targets.mesh(TARGET, devices, hosts)
    if way.two_axes:
        grid = mesh.devices.reshape(hosts, devices // hosts)
        mesh = Mesh(grid, AXES, axis_types=mesh.axis_types * 2)
    train = model.training(way.design, mesh)
    arguments = model.state(train), model.global_batch(devices)
    where = {"target": TARGET, "devices": devices, "hosts": hosts}
    program = targets.compile_for(train.step, *arguments, **where)
    took_s = time.perf_counter() - started
    report = analyze(program)
    return Step(
        *(model.name, way, devices, hosts, report),
        verdict=report.verify(train),
        program=program,
        compile_s=took_s,
    )
