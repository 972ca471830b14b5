"""Does a delay of one step hide the communication of a parameter server?

Command:   make experiment EXP=overlap_delay   ARGS="--link-gb-s 50"
Hardware:  any; nothing of it is needed for the predictions. Compiling for 8 H100 needs
           two packages more, and says which; without them that part is left out.
Runtime:   about 45 s on two cores.

Under `max_staleness=0` a step computes gradients, pushes them to the server and pulls
the new parameters, one after the other. Under `max_staleness=1` it computes its own
gradients and pushes those of the step before. First, by dependence: what waits for what
in the compiled program. Second, by the schedule: what XLA starts when, compiled for 8
H100 (4 layers of 4,096 x 4,096 in bfloat16, Φ = 134 MB, 8,192 rows a device), and how
long that takes on two streams, at half of 989 TFLOP/s, 0.9 of 3.35 TB/s of memory, 2 µs
or more a kernel and NVLink of 450 GB/s: one step from idle devices. Nothing ran on an
H100: these times are predictions.

Expected numbers, for N = 8 devices:
  τ = 0            all 14 transfers wait for matrix multiplications: nothing overlaps
  τ = 1            none waits for any, and none is waited for
  communication    2 (N - 1) Φ = 1.88 GB through the server's link: 4.3 ms, at 50 GB/s
                   37.7
  computation      11 matrix multiplications of 0.56 ms, 6.1; with other kernels 7.4
  XLA's default    hides less than half: half of the transfers or more are synchronous
  all in flight    hides 0.8: every transfer runs beside matrix multiplications
  forced devices   τ = 1 gains nothing: inside one CPU program nothing overlaps
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax

import jaxdp
from experiments.harness import config as harness
from experiments.harness import show, timing
from experiments.harness.result import Result, Rows
from experiments.parts import overlap_figures as figures
from experiments.parts import overlap_findings as findings
from experiments.parts import overlap_problem as problem
from experiments.parts import overlap_ways as ways
from experiments.parts.overlap_findings import Predicted
from jaxdp import targets
from jaxdp.program.timeline import play
from jaxdp.targets import Hardware, Link

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = problem.Sizes(layers=4, width=256, rows=128)  # what can be run anywhere
TINY = problem.Sizes(layers=2, width=64, rows=16)
BY_LINK, STREAMS = "Predicted step time by bandwidth", "Both streams of the server"
MARKED = {"network": 50.0, "NVLink": 450.0}  # GB/s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    layers: int = 4  # of the network compiled for H100
    width: int = 4096  # of its layers
    rows: int = 8192  # on one device
    link_gb_s: float = 450.0  # of a device, each way: NVLink; 50 is a network
    repeats: int = timing.REPEATS  # timed steps on this machine's devices

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        if self.devices < 2:
            raise ValueError(
                f"--devices got {self.devices}. A server and another worker make at "
                "least 2. Use --devices 8."
            )
        if min(self.layers, self.width, self.rows) < 1:
            raise ValueError(
                f"--layers got {self.layers}, --width {self.width} and --rows "
                f"{self.rows}. A network with a batch needs at least 1 of each. Use "
                "--layers 4 --width 4096 --rows 8192, for example."
            )
        if not 0 < self.link_gb_s < math.inf:
            raise ValueError(
                f"--link-gb-s got {self.link_gb_s}. A link carries more than 0 GB/s "
                "and not infinitely many. Use 450 for NVLink or 50 for a network."
            )

    @property
    def sizes(self) -> problem.Sizes:
        """Of the network that is compiled for H100."""
        if self.tiny:
            return TINY
        return problem.Sizes(layers=self.layers, width=self.width, rows=self.rows)

    @property
    def sizes_here(self) -> problem.Sizes:
        """Of the network that the devices of this machine run."""
        return TINY if self.tiny else HERE

    @property
    def hardware(self) -> Hardware:
        """What its times are predicted for."""
        h100 = targets.hardware("h100", devices_per_host=self.devices)
        return _linked(h100, 1e9 * self.link_gb_s)


def _linked(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """Hardware whose devices are joined by another link."""
    link = Link(name="given", bytes_per_s=bytes_per_s, alpha_s=hardware.link.alpha_s)
    return dataclasses.replace(hardware, link=link)


def run(config: Config) -> Result:
    """Answers the question."""
    mesh = jaxdp.data_mesh(config.devices)
    programs = {
        f"devices here, τ = {tau}": problem.lowered(
            mesh, tau, config.sizes_here
        ).compile()
        for tau in problem.STALENESS
    }
    times = time_steps(config, [*programs.values()], mesh)
    absent = targets.missing("h100")
    every: list[Predicted] = []
    if absent:
        show.console.print(absent)
    else:
        every = compile_for_h100(config)
    chosen = findings.chosen(every)
    programs |= {f"H100, {step.name}": step.program for step in chosen}
    dependences = [findings.dependence(*item) for item in programs.items()]
    tables = {"dependence": dependences, "step_times": times}
    if every:
        tables |= {
            "predicted_steps_on_h100": [findings.row(step) for step in every],
            "beside_each_transfer": findings.beside(chosen),
        }
    return Result(
        claims=[findings.claim(dependences, chosen, absent)],
        tables=tables,
        figures=draw(config, chosen),
        programs=programs,
    )


def compile_for_h100(config: Config) -> list[Predicted]:
    """Both steps, the late one in every way."""
    mesh = targets.mesh("h100", config.devices)
    tried = [ways.EXTREMES, ways.EXTREMES if config.tiny else ways.WAYS]
    found = []
    with show.progress("compiling for H100", sum(map(len, tried))) as advance:
        for tau in problem.STALENESS:
            lowered = problem.lowered(mesh, tau, config.sizes)
            for way in tried[tau]:
                each = ways.scheduled(lowered, way, config.hardware)
                step = play(each.items, config.devices, config.hardware)
                found.append(Predicted(tau, *each, step))
                advance()
    return found


def time_steps(
    config: Config, programs: Sequence[jax.stages.Compiled], mesh: jax.sharding.Mesh
) -> Rows:
    """Times both steps on the devices that are here, in turns."""
    calls = {
        f"τ = {tau}": problem.call(programs[tau], mesh, tau, config.sizes_here)
        for tau in problem.STALENESS
    }
    repeats = 2 if config.tiny else config.repeats
    with show.progress("timing steps", repeats) as advance:
        times = timing.interleaved(calls, repeats, advance)
    first, *_ = times.values()
    return [
        {"step": name, "of the first": time.median_ms / first.median_ms}
        | time._asdict()
        for name, time in times.items()
    ]


def draw(config: Config, chosen: Sequence[Predicted]) -> "dict[str, Figure]":
    """Step times by bandwidth; with a compiler, both streams too."""
    n, sizes, hardware = config.devices, config.sizes, config.hardware
    compute_s = sizes.step_flops / hardware.flops_of("bf16")
    kernels = "matrix multiplications alone"
    if chosen:
        compute_s, kernels = chosen[0].step.compute_s, "all kernels"

    def bound(which: int, link: float) -> float:
        at = _linked(hardware, link)
        return problem.bounds(compute_s, sizes.gradient_bytes, n, at)[which]

    def predicted(step: Predicted, link: float) -> float:
        return play(step.items, n, _linked(hardware, link)).step_s

    names = ("computation + communication", "the longer of both")
    drawn = {
        BY_LINK: figures.by_bandwidth(
            BY_LINK,
            f"{n} H100, Φ = {sizes.gradient_bytes / 1e6:,.3g} MB; computation: "
            f"{kernels}; schedules are those made for {config.link_gb_s:g} GB/s",
            {name: functools.partial(bound, i) for i, name in enumerate(names)},
            {step.name: functools.partial(predicted, step) for step in chosen},
            MARKED,
        )
    }
    if chosen:
        drawn[STREAMS] = figures.both_streams(
            STREAMS,
            f"predicted for {n} H100 at {config.link_gb_s:g} GB/s; a line: its end",
            chosen,
        )
    return drawn
