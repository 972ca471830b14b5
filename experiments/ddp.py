"""What does DistributedDataParallel do, and is it faster than DataParallel?

Command:   make experiment EXP=ddp             ARGS="--devices 8 --layers 8"
Hardware:  any; without GPUs, 8 forced host devices. The comparison with PyTorch runs
           two real processes of each side, and is left out where it is not installed.
Runtime:   about two minutes on two cores.

DistributedDataParallel packs gradients into buckets, sends each as soon as the backward
pass has made its gradients (overlap), and sends nothing for all micro-batches of a step
but the last (`no_sync`). Each is looked for in compiled programs: an MLP of 8 layers of
128 x 128 with biases (528,384 bytes of gradients), 64 rows a device, SGD. Then a small
CNN on digits takes the same step as DataParallel and as three designs of
`data_parallel`.

Expected numbers, for N = 8 devices and L = 8 layers:
  buckets          as many rings in the program as `train.buckets` lists; 14 permutes
                   each; bytes do not depend on the cap
  overlap          of 4 buckets of 2 layers the first waits for 4 of 15 matrix
                   multiplications of the backward pass, the last for 9: those it is
                   made of; without overlap all wait for 15
  accumulation     1/k of the bytes per row; the gradient of the full batch, to 1e-5
  PyTorch          the same parameters after 20 steps, to 1e-4; by recursive doubling
                   distributing costs no more than theirs, by a ring often more: at
                   this size rounds cost, and not bytes
  busiest device   sends N / 2 times the bytes of a ring under DataParallel
"""

import dataclasses

import jax

import jaxdp
from benchmarks import distributing
from experiments.harness import config as harness
from experiments.harness import show, timing
from experiments.harness.result import Result, Rows
from experiments.parts import ddp_accumulation as accumulation
from experiments.parts import ddp_buckets as buckets
from experiments.parts import ddp_figures as figures
from experiments.parts import ddp_rivals as rivals
from experiments.parts import ddp_torch as pytorch

TINY = buckets.Sizes(layers=3, width=16, rows=2)
CAPS = (1.01, 2.01, 4.01, None)  # layers that fit into a bucket
DRAWN = 2.01
PROCESSES = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    layers: int = 8
    width: int = 128  # of the layers
    rows: int = 64  # on one device
    batch_size: int = 128  # images of digits over all devices
    repeats: int = 3 * timing.REPEATS  # timed steps of DataParallel and of each design
    seconds: float = 10.0  # for the cost of each model beside PyTorch; 0 leaves it out

    def check(self) -> None:
        """Checks the options."""
        super().check()
        self.check_repeats(self.repeats)
        self.check_divides(self.batch_size)
        if self.devices < 2 or min(self.layers, self.width, self.rows) < 1:
            raise ValueError(
                f"--devices got {self.devices}, --layers {self.layers}, --width "
                f"{self.width} and --rows {self.rows}. Gradients travel between at "
                "least 2 devices, and a network with a batch needs at least 1 of the "
                "others. Use --devices 8 --layers 8 --width 128 --rows 64, for example."
            )

    @property
    def sizes(self) -> buckets.Sizes:
        """Of the network whose buckets are looked at."""
        if self.tiny:
            return TINY
        return buckets.Sizes(layers=self.layers, width=self.width, rows=self.rows)


@harness.full_precision
def run(config: Config) -> Result:
    """Answers the question."""
    mesh = jaxdp.data_mesh(config.devices)
    steps = compile_steps(mesh, config.sizes)
    early, late = steps[DRAWN, True], steps[DRAWN, False]
    waiting = {
        name: buckets.waiting(one, config.sizes)
        for name, one in (("overlap", early), ("no overlap", late))
    }
    accumulated = accumulation.rows(mesh, config.sizes)
    repeats = 2 if config.tiny else config.repeats
    batch_size = config.devices if config.tiny else config.batch_size
    compared = rivals.compare(mesh, batch_size, repeats)
    return Result(
        claims=[rivals.claim(compared, config.devices)],
        tables={
            "buckets": buckets.planned(early),
            "rings_in_the_program": [
                buckets.compiled(one, config.devices) for one in steps.values()
            ],
            "what_a_bucket_waits_for": wait_rows(waiting, config.sizes),
            "accumulation": accumulated,
            "against_data_parallel": compared,
            "on_real_links": rivals.shares(config.devices),
            **beside_pytorch(config),
        },
        figures={
            "When buckets may travel": figures.progress(
                "When buckets may travel", waiting, config.sizes.backward_matmuls
            ),
            "Bytes per row": figures.per_row("Bytes per row", accumulated),
        },
        programs={"overlap": early.program, "no overlap": late.program},
    )


def compile_steps(
    mesh: jax.sharding.Mesh, sizes: buckets.Sizes
) -> dict[tuple[float | None, bool], buckets.Step]:
    """The step with every cap, and one of them without overlap, too."""
    found = {}
    ways = [*((cap, True) for cap in CAPS), (DRAWN, False)]
    with show.progress("compiling steps", len(ways)) as advance:
        for layers, overlap in ways:
            cap_mb = None if layers is None else layers * sizes.layer_mb
            found[layers, overlap] = buckets.step(mesh, sizes, cap_mb, overlap)
            advance()
    return found


def wait_rows(waiting: dict[str, list[int]], sizes: buckets.Sizes) -> Rows:
    """How many multiplications each bucket waits for."""
    return [
        {
            "bucket": i,
            "waits for, overlap": early,
            "waits for, no overlap": late,
            "of backward matmuls": sizes.backward_matmuls,
        }
        for i, (early, late) in enumerate(zip(*waiting.values(), strict=True), start=1)
    ]


def beside_pytorch(config: Config) -> dict[str, Rows]:
    """Parameters and costs; nothing in tiny form, or without PyTorch."""
    if config.tiny or not config.seconds:
        return {}
    if absent := distributing.missing():
        show.console.print(absent)
        return {}
    processes = min(PROCESSES, config.devices)
    return {
        "same_parameters_as_pytorch": pytorch.parity(processes),
        "cost_of_distributing": pytorch.costs(config.seconds, processes),
    }
