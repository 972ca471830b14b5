"""How much communication hides behind the backward pass, before and after?

Command:   make experiment EXP=overlap         ARGS="--hosts 1 --models transformer"
Hardware:  none of it: programs are compiled for H100 GPUs with the extra [compile].
Runtime:   TODO

"""

import dataclasses
from typing import Literal

from experiments.harness import config as harness
from experiments.harness import devices, show
from experiments.harness.result import Result
from experiments.parts import gpu_models as models
from experiments.parts import hidden_figures as figures
from experiments.parts import hidden_steps as steps
from experiments.parts import hidden_tables as tables
from jaxdp import targets
from jaxdp.prediction import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 8  # of a host
    hosts: int = 8  # of the larger number of devices; 1: one host alone
    models: Literal["both", "resnet", "transformer"] = "both"

    def check(self) -> None:
        """Checks the options, and that there is a compiler."""
        super().check()
        if self.devices < 2 or self.hosts < 1:
            raise ValueError(
                f"--devices got {self.devices} and --hosts {self.hosts}. Gradients "
                "travel between at least 2 devices of a host, and there is at least 1 "
                "host. Use --devices 8 --hosts 8, for example."
            )
        if absent := targets.missing(steps.TARGET):
            raise ValueError(f"overlap compiles for {steps.TARGET}. {absent}")

    def where(self) -> str:
        """Says what programs are for."""
        sizes = " and ".join(str(n) for n, _ in self.sizes())
        return devices.elsewhere(f"{sizes} x {steps.TARGET.upper()}")

    def sizes(self) -> list[tuple[int, int]]:
        """Numbers of devices, with those of hosts."""
        hosts = 1 if self.tiny else self.hosts
        return [(self.devices * n, n) for n in sorted({1, hosts})]

    def chosen(self) -> list[Model]:
        """The models; in tiny form the transformer, unless one asks."""
        made = {"resnet": models.resnet50, "transformer": models.transformer}
        names = [*made] if self.models == "both" else [self.models]
        return [made[name](self.tiny) for name in names[-1 if self.tiny else 0 :]]


def run(config: Config) -> Result:
    """Answers the question."""
    found = compiled(config)
    fast, slow = steps.machines()
    rows, slow_rows = tables.times(found, fast), tables.times(found, slow)
    reached = tables.reach(rows, slow_rows)
    at = f"links of {steps.SLOW_GB_S:g} GB/s"
    return Result(
        claims=[],
        tables={
            "steps": rows,
            f"steps with {at}": slow_rows,
            **tables.scheduled(found, fast),
        }
        | ({"reach": reached} if reached else {}),
        figures={
            **figures.timelines(found, fast),
            "Steps by design": figures.shares("Steps by design", rows),
            f"Steps with {at}": figures.shares(f"Steps by design, {at}", slow_rows),
        },
        programs={
            step.name: step.program
            for step in found
            if step.way.name == steps.RING and step.hosts == 1
        },
    )


def compiled(config: Config) -> list[steps.Step]:
    """Every step, of every model and for every number of devices."""
    wanted = [
        (model, way, *size)
        for model in config.chosen()
        for size in config.sizes()
        for way in steps.ways(size[1], config.tiny)
    ]
    found = []
    with show.progress("compiling for GPUs", len(wanted)) as advance:
        for model, way, *size in wanted:
            found.append(steps.compiled(model, way, *size))
            advance()
    return found
