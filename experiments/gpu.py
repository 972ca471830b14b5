"""What would every design cost on eight H100, and would XLA keep it?

Command:   make experiment EXP=gpu             ARGS="--target h200 --models resnet"
Hardware:  none of it: programs are compiled for 8 x H100 with the extra [compile].
Runtime:   about 15 min on two cores, nearly all of it compilation.

ResNet-50 (25,557,032 parameters, 64 images of 224 x 224 a device, SGD with momentum)
and a GPT-2 of the small size (124,439,808 parameters, 8 sequences of 1,024 tokens a
device, Adam), both in Flax NNX, computed in bfloat16, with float32 parameters and
gradients. Every design's step is compiled for the target. What it sends, what it keeps
in memory and in which order it runs are read from the program: exact. How long is
predicted, by a roofline at half of the peak of matrix products and 0.9 of that of
memory, and by alpha-beta of NVLink: 10 us and 450 GB/s. Nothing ran on an H100.

Expected numbers, for N = 8 devices and Φ bytes of gradients, ResNet-50 and GPT-2:
  ring, native     2 (N - 1) / N Φ sent per device: 179 and 871 MB
  gather to root   (N - 1) Φ sent by the root: 717 and 3,484 MB
  doubling         2.5 Φ and not 3: XLA sends the first round as the bfloat16 that it
                   was computed in, which loses nothing
  exposed          of a ring 20 and 24 % of its communication, since its buckets take
                   turns (see the experiment overlap); of XLA's own, in buckets of 25
                   MB, 69 and 10 %; of the way by the root all
  step, in ms      ring 12.7 and 36.3, by the root 16.2 and 53.8, native 13.1 and 35.1
  without a cap    XLA leaves 33 all-reduces of ResNet-50, most for a small BatchNorm
                   statistic each: 17.0 ms
  memory           3.2 and 14.8 GB for all designs, nine tenths of it activations
"""

import dataclasses
from typing import TYPE_CHECKING, Literal

from experiments.harness import config as harness
from experiments.harness import devices, show
from experiments.harness.result import Result, Rows
from experiments.parts import gpu_claims as claims
from experiments.parts import gpu_figures as figures
from experiments.parts import gpu_models as models
from experiments.parts import gpu_steps as steps
from experiments.parts.gpu_steps import Step
from jaxdp import targets
from jaxdp.draw.timeline import draw_timeline
from jaxdp.prediction import Model
from jaxdp.program.timeline.perfetto import trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAWN = (steps.ROOT, steps.RING, steps.NATIVE)  # as timelines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    target: Literal["h100", "h200", "a100", "b200"] = "h100"  # what to compile for
    hosts: int = 1  # in which the devices are
    models: Literal["both", "resnet", "transformer"] = "both"
    rows: int | None = None  # on one device; None: 64 images, 8 sequences

    def check(self) -> None:
        """Checks the options, and that there is a compiler."""
        super().check()
        if self.devices < 2 or self.devices % self.hosts:
            raise ValueError(
                f"--devices got {self.devices} and --hosts {self.hosts}. Gradients "
                "travel between at least 2 devices, equally many in each host. Use "
                "--devices 8 --hosts 1, for example."
            )
        if self.rows is not None and self.rows < 1:
            raise ValueError(
                f"--rows got {self.rows}. A device takes at least 1 row. Leave it out "
                "for 64 images or 8 sequences."
            )
        if absent := targets.missing(self.target):
            raise ValueError(f"--target got {self.target}. {absent}")

    def where(self) -> str:
        """Says what programs are for."""
        return devices.elsewhere(f"{self.devices} x {self.target.upper()}")

    def chosen(self) -> list[Model]:
        """The models."""
        size = {} if self.rows is None else {"rows": self.rows}
        made = {"resnet": models.resnet50, "transformer": models.transformer}
        names = made if self.models == "both" else (self.models,)
        return [made[name](self.tiny, **size) for name in names]


def run(config: Config) -> Result:
    """Answers the question."""
    found: list[Step] = []
    designs = steps.designs(config.devices, config.tiny)
    chosen = config.chosen()
    label = f"compiling for {config.devices} x {config.target.upper()}"
    with show.progress(label, len(chosen) * len(designs)) as advance:
        for model in chosen:
            for name, design in designs.items():
                where = config.target, config.devices, config.hosts
                found.append(steps.step(model, name, design, *where))
                advance()
    return Result(
        claims=claims.claims(found),
        tables={
            "designs": [steps.row(step) for step in found],
            **by_model(found),
        },
        figures=draw(config, found),
        programs={step.name: step.program for step in found},
        files={
            f"{step.slug}.trace.json": trace(step.timeline)
            for step in found
            if step.design_name in DRAWN
        },
    )


def by_model(found: list[Step]) -> dict[str, Rows]:
    """Times, verdicts and memory, a table for each model."""
    tables = {}
    for model in dict.fromkeys(step.model.name for step in found):
        own = [step for step in found if step.model.name == model]
        tables |= {
            f"{model}: one step": [steps.times(step) for step in own],
            f"{model}: kept by the compiler": [steps.kept(step) for step in own],
            f"{model}: memory of a device": [steps.memory(step) for step in own],
        }
    return tables


def draw(config: Config, found: list[Step]) -> "dict[str, Figure]":
    """For each model: time, bytes and memory by design, and timelines of two."""
    note = f"{config.devices} x {config.target.upper()}"
    drawn = {}
    for model in dict.fromkeys(step.model.name for step in found):
        own = [step for step in found if step.model.name == model]
        drawings = {
            "Step time": (figures.step_times, f"{note}, predicted"),
            "Bytes sent": (figures.traffic, f"{note}, counted in the program"),
            "Memory": (figures.memory, f"{note}, when a device holds most"),
        }
        for what, (figure, about) in drawings.items():
            title = f"{what} of {model}"
            drawn[title] = figure(title, own, about)
        for step in own:
            if step.design_name in DRAWN:
                title = f"Timeline of {step.name}"
                drawn[title] = draw_timeline(step.timeline, title=title)
    return drawn
