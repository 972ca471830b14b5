"""How much communication hides behind the backward pass, before and after?

Command:   make experiment EXP=overlap         ARGS="--hosts 1 --models transformer"
Hardware:  none of it: programs are compiled for H100 GPUs with the extra [compile].
Runtime:   about 20 min on two cores, for 26 programs; 6 of them, for one model on one
           host, take 3 min.

ResNet-50 (25,557,032 parameters, 64 images of 224 x 224 a device, SGD with momentum)
and a GPT-2 of the small size (124,439,808 parameters, 8 sequences of 1,024 tokens a
device, Adam), in bfloat16 with float32 gradients, are compiled for 8 H100 in a host and
for 8 hosts of 8. Before, all buckets that were ready could travel at a time, and XLA
took all transfers for equally long. After, one travels at a time, in order, and XLA is
told to estimate them: the default of `jaxdp.RingAllReduce`. ZeRO has an order of its
own, which is as it was. Times are predicted by replaying the schedule that XLA made:
alpha-beta of NVLink (10 us, 450 GB/s; then 50 GB/s) and of InfiniBand between hosts
(15 us, 50 GB/s), and a roofline. Nothing ran on an H100.

Expected numbers, with jax 0.10, for steps in ms and the exposed share of communication:
                     ResNet-50, 8   GPT-2, 8      ResNet-50, 64  GPT-2, 64
  ring, before       13.5  83 %     38.4  76 %    28.0  96 %     85.7  95 %
  ring, after        12.7  20 %     36.3  24 %    26.9  89 %     81.2  86 %
  native, merged     17.0  74 %     36.9  27 %    75.7  97 %     72.9  81 %
  native, 25 MB      13.1  69 %     35.1  10 %    22.6  88 %     62.4  80 %
  Zero(2), as it is  13.3  53 %     36.5  68 %    24.9  90 %     74.2  93 %
  Zero(3), as it is  13.6  50 %     35.8  27 %    27.3  85 %     83.9  90 %
  hierarchical                                    14.1  51 %     38.8  33 %
  50 GB/s: ring      15.4  66 %     48.5  67 %    (the same)     (the same)
  50 GB/s: native    19.8  79 %     51.6  78 %    79.2  97 %     90.0  86 %
  synchronous permutes: 99 of 238 of GPT-2 on 8 devices before, 6 after

On 64 devices a ring has 126 rounds a bucket, and each waits for 15 us between hosts:
52 ms for GPT-2, more than its backward pass takes. No schedule hides that. Rings inside
hosts and between them, in 28 rounds, take 10 ms, of which two thirds hide.
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
    rows = tables.times(found, [step.fast for step in found])
    slow_rows = tables.times(found, [step.slow for step in found])
    # A tiny model has nothing to hide behind.
    reached = [] if config.tiny else tables.reach(rows, slow_rows)
    at = f"links of {steps.SLOW_GB_S:g} GB/s"
    return Result(
        claims=[],
        tables={
            "steps": rows,
            f"steps with {at}": slow_rows,
            **tables.scheduled(found),
        }
        | ({"reach": reached} if reached else {}),
        figures={
            **figures.timelines(found),
            "Steps by design": figures.shares("Steps by design", rows),
            f"Steps with {at}": figures.shares(f"Steps by design, {at}", slow_rows),
        },
        programs={step.name: step.program for step in found if step.program},
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
