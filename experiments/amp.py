"""What does mixed precision save, and what does loss scaling prevent?

Command:   make experiment EXP=amp             ARGS="--devices 4 --steps 700"
Hardware:  any; without GPUs, 4 forced host devices. Compiling for an H100 needs two
           packages more, and says which; without them that part is left out.
Runtime:   about 1 min on two cores; 40 s more with the compiler for an H100.

Memory: ResNet-50 on 16 images of 224 x 224 and a transformer of 12 blocks of width 768
on 16 rows of 256 characters, per device, as shapes. What the forward pass keeps for the
backward pass is counted in the traced program; if there is a compiler for an H100, what
XLA plans there, too. Bytes: counted in compiled programs that train a small CNN on
digits. Time: the same programs in turns; CPUs emulate 16 bits, so that this is no time
of a GPU. Scaling: eight sigmoid layers learn the digits with Adam, whose first layers
have gradients around 1e-7 in the beginning.

Expected numbers:
  kept, bf16      ResNet-50 20 % less, transformer 36 % less; all memory 18 and 29 %
  as written      nnx.Embed and nnx.BatchNorm widen: 0 to 3 % of the products in bf16,
                  and memory grows by 3 to 5 %
  H100            ResNet-50: temporaries 1,494 to 797 MiB, 47 % less; all 41 % less;
                  kernels 6.9 to 4.7 ms, predicted. Two blocks of the transformer: 35
                  and 26 % less; kernels 2.7 to 1.6 ms
  on the wire     the same bytes: gradients are those of float32 masters; compression to
                  bf16 or fp16 halves them
  time            no gain on CPUs
  fp16            without a scale the loss stays at ln 10 = 2.30; with one it follows
                  float32, and a few steps are skipped
  bf16 masters    1 - 100 x 0.0006 stays 1, and 1,000 ones add up to 256; by SGD with
                  small steps, 97 % of a network's parameters never move
"""

import dataclasses
from typing import TYPE_CHECKING

import jax

import jaxdp
from experiments.harness import config as harness
from experiments.harness import show, timing
from experiments.harness.result import Result, Rows
from experiments.parts import amp_claims as claims
from experiments.parts import amp_figures as figures
from experiments.parts import amp_master as master
from experiments.parts import amp_memory as memory
from experiments.parts import amp_training as training
from experiments.parts import amp_underflow as underflow
from experiments.parts import digits
from experiments.parts.amp_models import size_bytes
from jaxdp import targets

if TYPE_CHECKING:
    from jax.sharding import Mesh

IMAGE_SIZE, ROWS = 224, 16  # pixels; rows of a device
TINY_SIZE, TINY_ROWS, TINY_STEPS = 32, 2, 40
FROZEN_STEPS = 100
H100_PROGRAMS = 4
SENT = "bf16, sent as bf16"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 4
    steps: int = 700  # of the deep network
    rows: int = 128  # of each device, of the digits
    interval: int = 100  # good steps before the loss scale grows
    seed: int = 0  # of parameters, split and batches
    repeats: int = timing.REPEATS  # timed steps of each way

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        if self.steps < 1 or self.interval < 1:
            raise ValueError(
                f"--steps got {self.steps} and --interval {self.interval}. Training "
                "needs at least one step, and so does a scale that grows. Use --steps "
                "700 --interval 100."
            )
        if not 1 <= self.devices * self.rows <= digits.TRAIN_ROWS:
            raise ValueError(
                f"--rows got {self.rows} for {self.devices} devices. A batch has "
                f"{self.devices * self.rows} rows, and there are {digits.TRAIN_ROWS} "
                f"training images. Use --rows {digits.TRAIN_ROWS // self.devices} or "
                "fewer."
            )


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    mesh = jaxdp.data_mesh(config.devices)
    kept, planned, absent = measure_memory(config)
    wire, times, program = measure_steps(config, mesh)
    flushed, runs, compared = measure_scaling(config, mesh)
    small, frozen = measure_masters(config)
    scaled = underflow.precisions(interval(config))[underflow.SCALED]
    return Result(
        claims=[
            claims.saves(kept, planned, times, absent),
            claims.scaling(flushed, compared, runs[underflow.SCALED], scaled),
        ],
        tables={
            "memory_of_a_step": kept,
            "memory_that_xla_plans": planned,
            "gradients_on_the_wire": wire,
            "step_times": times,
            "gradients_that_float16_makes_zero": flushed,
            "training_a_deep_network": compared,
            "small_numbers": small,
            "parameters_that_stay": frozen,
        },
        figures={
            "Memory of a training step": figures.memory(kept),
            "Gradients that float16 makes zero": figures.flushed(flushed),
            "Loss scaling at work": figures.training(runs),
        },
        programs={"bf16 step sent as bf16": program},
    )


def measure_memory(config: Config) -> tuple[Rows, Rows, str]:
    """What a step keeps; what XLA plans; and why not for an H100."""
    size, rows = (TINY_SIZE, TINY_ROWS) if config.tiny else (IMAGE_SIZE, ROWS)
    absent = (
        "nothing was compiled for an H100" if config.tiny else targets.missing("h100")
    )
    with show.progress("memory", 1 if absent else 1 + H100_PROGRAMS) as advance:
        kept = memory.kept(config.tiny, size, rows)
        planned = [*memory.planned(rows)]
        advance()
        if not absent:
            planned += memory.for_h100(size, rows, advance)
    return kept, planned, absent


def measure_steps(
    config: Config, mesh: "Mesh"
) -> tuple[Rows, Rows, jax.stages.Compiled]:
    """Bytes on the wire, step times, and one of the programs."""
    problem = digits.problem(config.seed, 0.05, 0.9)
    batch = next(digits.batches(problem.train, config.devices * config.rows, 1, 0))
    given = problem.loss_fn, problem.optimizer, problem.params, batch, mesh
    repeats = 2 if config.tiny else config.repeats
    names = (*training.TIMED, SENT) if config.tiny else tuple(training.WAYS)
    with show.progress("steps", len(names) + repeats) as advance:
        made = {}
        for name in names:
            made[name] = training.training(*given, training.WAYS[name])
            advance()
        wire = training.on_the_wire(made, size_bytes(problem.params))
        times = training.times(made, repeats, advance)
    return wire, times, made[SENT].program


def measure_scaling(
    config: Config, mesh: "Mesh"
) -> tuple[Rows, dict[str, underflow.Run], Rows]:
    """Gradients that are zero; the runs; what they reached."""
    problem = digits.problem(config.seed, 0.05, 0.9)
    steps = TINY_STEPS if config.tiny else config.steps
    size = config.devices * config.rows
    data = [*underflow.batches(problem.train, size, steps, config.seed)]
    params = underflow.init(config.seed)
    images, labels = data[0]
    flushed = underflow.flushed(params, (images[: config.rows], labels[: config.rows]))
    precisions = underflow.precisions(interval(config))
    runs = {}
    with show.progress("training", len(precisions) * steps) as advance:
        for name, precision in precisions.items():
            runs[name] = underflow.train(precision, params, data, mesh, advance)
    return flushed, runs, underflow.compare(runs, problem.test)


def measure_masters(config: Config) -> tuple[Rows, Rows]:
    """Small numbers, and parameters that never move; on one device, which is enough."""
    problem = digits.problem(config.seed, 0.05, 0.9)
    steps = 4 if config.tiny else FROZEN_STEPS
    data = [*underflow.batches(problem.train, config.rows, steps, config.seed)]
    mesh = jaxdp.data_mesh(1)
    with show.progress("masters", len(master.WAYS) * steps) as advance:
        return master.small_numbers(mesh), master.frozen(problem, data, mesh, advance)


def interval(config: Config) -> int:
    """Good steps before the scale grows: fewer in a run that is short."""
    return 4 if config.tiny else config.interval
