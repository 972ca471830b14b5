"""Training steps compiled for GPUs that are not here, and what is read from them."""

import collections
import math
from typing import Any, NamedTuple

import jax

import jaxdp
from experiments.harness import wording
from jaxdp import targets
from jaxdp.prediction import GPU_OPTIONS, Model
from jaxdp.program import ProgramReport
from jaxdp.program.timeline import Timeline
from jaxdp.program.verdict import Verdict

MIB = 2**20
ROOT, RING = "GatherToRoot", "RingAllReduce"
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
    held: Any

    @property
    def name(self) -> str:
        """How tables and figures call it."""
        return f"{self.model.name}, {self.design_name}"

    @property
    def held_bytes(self) -> dict[str, int]:
        """What a device holds when it holds most, by kind."""
        return self.held.kinds

    @property
    def slug(self) -> str:
        """How files are called."""
        return wording.slug(self.name)


def designs(devices: int) -> dict[str, jaxdp.Design]:
    """Every design, by the name of its row."""
    return {
        ROOT: jaxdp.GatherToRoot(),
        f"ParameterServer, {devices} servers": jaxdp.ParameterServer(servers=devices),
        RING: jaxdp.RingAllReduce(),
        "recursive doubling": jaxdp.AllReduce("recursive_doubling"),
        "NativeAllReduce": jaxdp.NativeAllReduce(),
        "NativeAllReduce 25 MB": jaxdp.NativeAllReduce(bucket_cap_mb=25.0),
        "LocalSGD, every 8": jaxdp.LocalSGD(sync_every=8),
    }


def step(
    model: Model,
    name: str,
    design: jaxdp.Design,
    target: str,
    devices: int,
    hosts: int,
) -> Step:
    """Compiles one step for devices that are not here, and reads it."""
    train = model.training(design, targets.mesh(target, devices, hosts))
    program = jaxdp.compile_for(
        train.step,
        *(model.state(train), model.global_batch(devices)),
        target=target,
        devices=devices,
        hosts=hosts,
        compiler_options=GPU_OPTIONS,
    )
    report = jaxdp.analyze(program)
    hardware = targets.hardware(target, devices_per_host=devices // hosts)
    return Step(
        *(model, name, devices, program, report),
        timeline=report.timeline(hardware),
        verdict=report.verify(train),
        held=report.held(train),
    )


def row(step: Step) -> dict[str, Any]:
    """One step, in numbers."""
    report, timeline = step.report, step.timeline
    assert report.memory is not None  # GPUs say it
    return {
        "model": step.model.name,
        "design": step.design_name,
        "devices": step.devices,
        "sent_bytes_per_device": max(report.sent_bytes),
        "busiest_link_bytes": max(report.link_bytes.values(), default=0),
        "rounds": report.rounds,
        "peak_bytes_per_device": report.memory.peak_bytes,
        "compute_ms": 1e3 * timeline.compute_s,
        "communication_ms": 1e3 * timeline.communication_s,
        "step_ms": 1e3 * timeline.step_s,
        "exposed_fraction": timeline.exposed_fraction,
        "rows per s": step.devices * step.model.rows / timeline.step_s,
        "label": PREDICTED,
    }


def phi_bytes(step: Step) -> int:
    """Bytes of the gradients."""
    leaves = jax.tree.leaves(step.model.params)
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def kept(step: Step) -> dict[str, Any]:
    """What XLA made of the design's collectives."""
    verdict = step.verdict
    apart = [d for d in verdict.distances if not d.blocking]
    return {
        "model": step.model.name,
        "design": step.design_name,
        "kept": verdict.kept,
        "buckets asked": verdict.buckets_asked,
        "buckets found": verdict.buckets_found,
        "collectives": len(verdict.distances),
        "asynchronous": len(apart),
        "findings": "; ".join(f.text for f in verdict.findings) or "none",
    }


def compute(step: Step) -> dict[str, Any]:
    """What the kernels of the busiest device take, by kind."""
    took_s: collections.Counter[str] = collections.Counter()
    for bar in step.timeline.bars:
        if bar.stream == "compute":
            took_s[bar.kind] += bar.end_s - bar.start_s
    kinds = ("matrix product", "convolution", "other kernel")
    kernels = sum(bar.stream == "compute" for bar in step.timeline.bars)
    return {
        "model": step.model.name,
        "design": step.design_name,
        "kernels": kernels,
        **{f"{kind}_ms": 1e3 * took_s[kind] for kind in kinds},
        "utilisation": step.timeline.utilisation,
    }


def memory(step: Step) -> dict[str, Any]:
    """What a device holds when it holds most, by kind."""
    held = {f"{kind}_mb": size / MIB for kind, size in step.held_bytes.items()}
    total = {"all_mb": sum(step.held_bytes.values()) / MIB}
    return {"model": step.model.name, "design": step.design_name} | total | held
