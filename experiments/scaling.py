"""Where does DataParallel stop gaining, and DistributedDataParallel with it?

Command:   make experiment EXP=scaling         ARGS="--images 64 --sequences 8"
Hardware:  any. Steps are compiled for H100 GPUs, which need not be there; without XLA's
           compiler for them, for the devices at hand.
Runtime:   about 4 min on two cores, nearly all of it four compilations.

The step of ResNet-50 (25.6 M parameters) and of a GPT-2 of the small size (124 M), in
16 bits, is compiled for 8 H100 GPUs with a ring in buckets (DDP) and with XLA's own
all-reduce. Each is replayed on six kinds of hardware and priced for 1 to 1,024 devices
with as many rows on each (weak scaling). DP is `nn.DataParallel`'s traffic: gradients
into the main device and parameters out of it, one transfer after the other.

Expected numbers, with C the step of one device and t its gradients over one link:
  DP            N C / (C + 2(N-1) t) times one device inside a host: rises towards
                C / 2t, or falls from the start if that is below 1
  V100, PCIe    3.0 times one device at N = 8 of at most 4.3 (ResNet-50), 2.4 of 3.0
                (GPT-2): it still gains, but little
  H100, NVLink  6.3 of at most 26, and 5.5 of 15.5
  beyond        fastest with the 8 devices of a host, if it could leave it; between
                hosts of one GPU one device alone is faster, at 10 and at 100 Gbit/s
  DDP           faster than DP by 13, 35, 57 % at N = 2, 4, 8 on PCIe (ResNet-50), by
                1.5, 8, 18 % on NVLink; 79 % efficient on 64 H100, 7 % on 1,024

What is modelled: kernels by a roofline with half the published FLOP/s and 90 % of the
bandwidth; links by a latency and a rate; two streams, as XLA scheduled them; adapters
that the devices of a host share. What is not: contention in switches and PCIe trees,
stragglers, input pipelines, Python (DataParallel runs a thread for each replica), the
workspaces of library calls, NCCL's trees, DataParallel's gathered outputs. The V100
runs the program that was compiled for an H100, with its own figures. Beyond 8 devices
the share of communication that is hidden is that of 8. `nn.DataParallel` drives the
devices of one process, so of one host: its curve beyond shows what would happen if it
did not.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jaxdp
from experiments.harness import config as harness
from experiments.harness import devices, show
from experiments.harness.result import Result
from experiments.parts import gpu_models
from experiments.parts import scaling_claims as claims
from experiments.parts import scaling_figures as figures
from experiments.parts import scaling_hardware as hardware
from experiments.parts import scaling_steps as steps
from experiments.parts import scaling_tables as tables
from experiments.parts.scaling_tables import DDP, DP, NATIVE, Curve
from jaxdp import targets
from jaxdp.prediction import CompiledStep, Model, compiled_step

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COMPILED = 8  # devices of the programs: a host
COUNTS = tuple(2**power for power in range(11))
FEWER = 6  # of them, in tiny form
DESIGNS = {
    DDP: jaxdp.RingAllReduce(),
    NATIVE: jaxdp.NativeAllReduce(bucket_cap_mb=25.0),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    images: int = 64  # rows of ResNet-50 on one device
    sequences: int = 8  # rows of GPT-2 on one device, of 1,024 tokens

    def where(self) -> str:
        """Says what programs are for."""
        if targets.missing(steps.TARGET):
            return super().where()
        return devices.elsewhere("H100 GPUs")

    def check(self) -> None:
        """Checks the options."""
        super().check()
        if self.devices != COMPILED or min(self.images, self.sequences) < 1:
            raise ValueError(
                f"--devices got {self.devices}, --images {self.images} and --sequences "
                f"{self.sequences}. Programs are compiled for a host of {COMPILED}, "
                f"and every device has a row. Use --devices {COMPILED} --images 64 "
                "--sequences 8, for example."
            )


def run(config: Config) -> Result:
    """Answers the question."""
    models = [
        gpu_models.resnet50(config.tiny, rows=config.images),
        gpu_models.transformer(config.tiny, rows=config.sequences),
    ]
    counts = COUNTS[:FEWER] if config.tiny else COUNTS
    curves = price(models, devices.compiler(steps.TARGET), counts)
    parameters = {model.name: steps.parameters(model) for model in models}
    return Result(
        claims=[claims.faster(curves), claims.saturates(curves, parameters)],
        tables={
            "where_DP_stops_gaining": tables.stops(curves),
            "DDP_is_faster_by": tables.faster(curves),
            "throughput": tables.throughput(curves),
            "hardware": tables.hardware([*hardware.machines()]),
        },
        figures=draw(curves, [model.name for model in models]),
    )


def price(
    models: Sequence[Model], target: str | None, counts: Sequence[int]
) -> list[Curve]:
    """Compiles every step, then prices it on all hardware."""
    curves = []
    with show.progress("compiling steps", len(models) * len(DESIGNS)) as advance:
        for model in models:
            made = {}
            for name, design in DESIGNS.items():
                made[name] = compiled_step(design, model, COMPILED, target)
                advance()
            curves += [
                curve(model, made, name, machine, counts)
                for name, machine in hardware.machines().items()
            ]
    return curves


def curve(
    model: Model,
    made: dict[str, CompiledStep],
    name: str,
    machine: targets.Hardware,
    counts: Sequence[int],
) -> Curve:
    """One model on one kind of hardware."""
    priced = {
        design: steps.designed(step, machine, counts) for design, step in made.items()
    }
    alone_ms = priced[NATIVE][0].compute_ms
    elements = steps.parameters(model)
    priced[DP] = steps.data_parallel(elements, alone_ms / 1e3, machine, counts)
    return Curve(name, model.name, model.rows, alone_ms, priced)


def draw(curves: Sequence[Curve], models: Sequence[str]) -> dict[str, "Figure"]:
    """A figure for each model."""
    titles = {f"Throughput of {model}": model for model in models}
    return {
        title: figures.speedups(title, [c for c in curves if c.model == model])
        for title, model in titles.items()
    }
