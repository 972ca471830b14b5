"""Training steps compiled for GPUs that are not here, and what is read from them."""

import collections
from typing import Any, NamedTuple

import jax

import jaxdp
from experiments.harness import wording
from experiments.parts.amp_models import size_bytes
from jaxdp import targets
from jaxdp.prediction import Model, compiled_step
from jaxdp.program import ProgramReport
from jaxdp.program.memory.held import Holdings
from jaxdp.program.timeline import Timeline
from jaxdp.program.verdict import Verdict

MIB = 2**20
ROOT, RING, NATIVE = "GatherToRoot", "RingAllReduce", "NativeAllReduce 25 MB"
TINY = (ROOT, RING, NATIVE)
SHOWN = ("parameters", "optimizer state", "gradients", "activations", "buckets")
BUSIEST = (
    "of the busiest device; link: the busiest, in one direction; rows: over all devices"
)
PREDICTED = (
    "bytes and memory: read from the compiled program; times: predicted, see the "
    "experiment's description"
)


class Step(NamedTuple):
    """A design's step of a model, compiled."""

    model: Model
    design_name: str
    devices: int
    program: jax.stages.Compiled
    report: ProgramReport
    timeline: Timeline
    verdict: Verdict
    held: Holdings

    @property
    def name(self) -> str:
        """How tables and figures call it."""
        return f"{self.model.name}, {self.design_name}"

    @property
    def held_bytes(self) -> dict[str, int]:
        """What a device holds when it holds most, by kind."""
        return {kind: part.nbytes for kind, part in self.held.parts.items()}

    @property
    def slug(self) -> str:
        """How files are called."""
        return wording.slug(self.name)


def designs(devices: int, tiny: bool = False) -> dict[str, jaxdp.Design]:
    """Every design, by the name of its row; a few in tiny form."""
    every = {
        ROOT: jaxdp.GatherToRoot(),
        f"ParameterServer, {devices} servers": jaxdp.ParameterServer(servers=devices),
        RING: jaxdp.RingAllReduce(),
        "recursive doubling": jaxdp.AllReduce("recursive_doubling"),
        "NativeAllReduce": jaxdp.NativeAllReduce(),
        NATIVE: jaxdp.NativeAllReduce(bucket_cap_mb=25.0),
        "LocalSGD, every 8": jaxdp.LocalSGD(sync_every=8),
    }
    return {name: every[name] for name in (TINY if tiny else every)}


def step(
    model: Model,
    name: str,
    design: jaxdp.Design,
    target: str,
    devices: int,
    hosts: int,
) -> Step:
    """Compiles one step for devices that are not here, and reads it."""
    made = compiled_step(design, model, devices, target, hosts)
    report = made.report
    hardware = targets.hardware(target, devices_per_host=devices // hosts)
    return Step(
        *(model, name, devices, made.program, report),
        timeline=report.timeline(hardware),
        verdict=report.verify(made.train),
        held=report.held(made.train),
    )


def row(step: Step) -> dict[str, Any]:
    """One step, in the numbers that compare designs."""
    assert step.report.memory is not None  # GPUs say it
    return {
        "model": step.model.name,
        "design": step.design_name,
        "devices": step.devices,
        "sent_bytes_per_device": max(step.report.sent_bytes),
        "peak_bytes_per_device": step.report.memory.peak_bytes,
        "step_ms": 1e3 * step.timeline.step_s,
        "exposed_fraction": step.timeline.exposed_fraction,
        "label": PREDICTED,
    }


def times(step: Step) -> dict[str, Any]:
    """What the busiest device of one step does, and for how long."""
    timeline = step.timeline
    took_s: dict[str, float] = collections.defaultdict(float)
    for bar in timeline.bars:
        if bar.stream == "compute":
            took_s[bar.kind] += bar.end_s - bar.start_s
    products_s = took_s["matrix product"] + took_s["convolution"]
    return {
        "design": step.design_name,
        "rounds": step.report.rounds,
        "link_mb": max(step.report.link_bytes.values(), default=0) / MIB,
        "products_ms": 1e3 * products_s,
        "other kernels_ms": 1e3 * took_s["other kernel"],
        "communication_ms": 1e3 * timeline.communication_s,
        "rows per s": round(step.devices * step.model.rows / timeline.step_s),
        "label": BUSIEST,
    }


def phi_bytes(step: Step) -> int:
    """Bytes of the gradients."""
    return size_bytes(step.model.params)


def kept(step: Step) -> dict[str, Any]:
    """What XLA made of the design's collectives."""
    verdict = step.verdict
    found = collections.Counter(finding.kind for finding in verdict.findings)
    apart = [d for d in verdict.distances if not d.blocking]
    return {
        "design": step.design_name,
        "kept": verdict.kept,
        "buckets asked": verdict.buckets_asked,
        "buckets found": verdict.buckets_found,
        "collectives": len(verdict.distances),
        "asynchronous": len(apart),
        "findings": ", ".join(f"{n} {kind}" for kind, n in found.items()) or "none",
    }


def memory(step: Step) -> dict[str, Any]:
    """What a device holds when it holds most, by kind."""
    held = {f"{kind}_mb": round(step.held_bytes[kind] / MIB) for kind in SHOWN}
    rest = sum(size for kind, size in step.held_bytes.items() if kind not in SHOWN)
    total = {"all_mb": round(sum(step.held_bytes.values()) / MIB)}
    return {"design": step.design_name} | total | held | {"rest_mb": round(rest / MIB)}
