"""What does every device hold in a step of nn.DataParallel, and why more on the first?

Command:   make experiment EXP=memory          ARGS="--devices 4 --image-size 224"
Hardware:  any; without GPUs, 4 forced host devices and 15 GiB of free memory.
Runtime:   about 4 min on two cores, 1 of it to compile for H100, if XLA's compiler for
           it is installed (the extra [compile]).

ResNet-50 (25,557,032 parameters, Φ = 97.49 MiB) on 64 random images of 224 x 224, SGD
with momentum: one call without gradients, then one training step, by
`jaxdp.DataParallel`. After each transfer and program the arrays on each device are
counted by kind, and what XLA says the program needed beside them is added. A step under
observation waits for everything it starts, so gradients arrive after the main device's
backward pass; otherwise they can arrive during it, at most (N - 1) Φ more.

Expected numbers, in MiB; activations and temporaries are XLA's choice, here on a CPU:
  backward          3,325 on the main device, 3,227 on others: 3.0 % more; 2,096 of it
                    are activations, 926 temporaries of the backward program
  gradients early   3,617 on the main device, 12 % more: 3 Φ received, Φ of optimizer
                    state and 0.24 of gathered outputs, 390.2 in all
  reduce            595 against 107, when activations and replicas are gone
  inference         358 on every device, 89 % less; gathered logits 256,000 bytes
  one program       2,330 on every device: the GatherToRoot step, compiled, not run
  H100              compiled, not run, gradients early: 1,924 on the main device against
                    1,534, 25.5 % more, since activations take less; 1,668 in DDP
  the article       806 against 452, which is 78 % more
"""

import dataclasses
from typing import TYPE_CHECKING

from experiments.harness import config as harness
from experiments.harness import devices as machine
from experiments.harness import show
from experiments.harness.result import Result
from experiments.parts import footprint, footprint_h100, resnet, room
from experiments.parts import footprint_claims as claims
from experiments.parts import footprint_figures as figures
from experiments.parts.footprint import Held, Split
from experiments.parts.footprint_figures import Bar
from jaxdp import targets

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BACKWARD, REDUCE = "7 backward", "8 reduce"
TINY_ROWS, TINY_SIZE = 2, 32  # per device; pixels
SMALLEST = 32  # pixels: ResNet-50 halves an image five times
PIXEL_BYTES = 4000  # for each pixel of the images: activations in float32
FIXED_BYTES = 3 * room.GIB  # parameters and gradients, programs, their compilation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(harness.Config):
    """Options of the experiment."""

    devices: int = 4  # how many replicas
    batch_size: int = 64  # rows over all devices
    image_size: int = 224  # pixels

    def check(self) -> None:
        """Checks the options, and that a host without GPUs has room for the step."""
        super().check()
        if self.devices < 2:
            raise ValueError(
                f"--devices got {self.devices}. A main device and another one make "
                "at least 2. Use --devices 4."
            )
        self.check_divides(self.batch_size)
        if self.image_size < SMALLEST:
            raise ValueError(
                f"--image-size got {self.image_size}. ResNet-50 halves an image 5 "
                f"times, so that it needs at least 2^5 = {SMALLEST} pixels. Use "
                f"--image-size {SMALLEST} or more."
            )
        if not self.tiny and self.on_host():
            self.check_room(room.available_bytes())

    def on_host(self) -> bool:
        """Whether all devices are going to share the memory of the host."""
        return self.platform == "cpu" or machine.count_gpus() < self.devices

    def check_room(self, free: int | None) -> None:
        """Refuses a step that the system would kill."""
        pixels = self.batch_size * self.image_size**2
        needed = FIXED_BYTES + PIXEL_BYTES * pixels
        if free is None or needed <= free:
            return
        most = max(free - FIXED_BYTES, 0) / (PIXEL_BYTES * self.batch_size)
        fits = int(most**0.5) // SMALLEST * SMALLEST
        smaller = f"--image-size {fits}" if fits else "--tiny"
        raise ValueError(
            f"--image-size got {self.image_size} with --batch-size {self.batch_size}, "
            f"and this host has {free / room.GIB:.1f} GiB of free memory. Its "
            f"{self.devices} forced devices share it, and the step needs about "
            f"{FIXED_BYTES / room.GIB:.0f} GiB + {pixels:,} pixels x {PIXEL_BYTES:,} "
            f"bytes of activations = {needed / room.GIB:.1f} GiB. Free some, or use "
            f"{smaller}."
        )


def run(config: Config) -> Result:
    """Answers the question."""
    rows = TINY_ROWS if config.tiny else config.batch_size // config.devices
    image_size = TINY_SIZE if config.tiny else config.image_size
    with show.progress("inference, training, one program, H100", 4) as advance:
        given = resnet.problem(config.devices, rows, image_size, config.tiny)
        inference = resnet.infer(given)
        advance()
        training = resnet.train(given)
        advance()
        report, whole = resnet.as_one_program(given)
        advance()
        on_h100 = footprint_h100.rows(given)
        advance()
    if not on_h100:
        show.console.print(targets.missing(footprint_h100.TARGET))
    names = given.devices
    backward = footprint.fullest(training, names, BACKWARD)
    reduce = footprint.together(training, names, REDUCE)
    early = footprint.with_received(backward, reduce)
    differences = [
        footprint.difference("backward", backward),
        footprint.difference("early", early),
        footprint.difference("reduce", reduce),
    ]
    peak = footprint.fullest(training, names)
    inferring = footprint.fullest(inference, names)
    saved = footprint.saved(peak, inferring)
    counted = resnet.count()
    gathered = footprint.together(inference, names, "5 gather")
    return Result(
        claims=[
            claims.main_device(differences, backward, image_size, rows, on_h100),
            claims.gather_buffer(gathered, rows * config.devices, resnet.CLASSES),
            claims.no_grad(saved),
            claims.parameters(counted),
        ],
        tables={
            "difference_of_the_main_device": [*differences, claims.ARTICLE],
            "training_each_device_at_its_peak": footprint.by_part(peak),
            "training_all_gradients_received": footprint.by_part(reduce),
            "inference_each_device_at_its_peak": footprint.by_part(inferring),
            "saved_without_gradients": saved,
            "training_by_stage": footprint.by_stage(training, names),
            "inference_by_stage": footprint.by_stage(inference, names),
            "the_step_as_one_program": resnet.by_device(given, report, whole),
            **({"the_step_on_h100": on_h100} if on_h100 else {}),
            "resnet_50": counted,
        },
        figures={
            "Memory by device": draw(backward, early, reduce, inferring, whole),
            "Memory over a training step": figures.lines(
                "Memory over a training step",
                training,
                names,
                "every transfer and program, in their order; with what programs need "
                "while they run",
            ),
        },
    )


def draw(
    backward: Held, early: Held, reduce: Held, inferring: Held, whole: Split
) -> "Figure":
    """Devices beside each other, at the moments that matter."""
    main = next(iter(early))
    groups = [
        [
            *(Bar(f"{device}, 7 backward", held) for device, held in backward.items()),
            Bar(f"{main}, if all gradients are there", early[main]),
        ],
        [Bar(f"{device}, 8 reduce", held) for device, held in reduce.items()],
        [Bar(f"{device}, inference", held) for device, held in inferring.items()],
        [Bar("GatherToRoot, every device", whole)],
        [
            Bar("main device, as the article says", claims.MAIN_MB * footprint.MIB),
            Bar("other devices, as the article says", claims.OTHERS_MB * footprint.MIB),
        ],
    ]
    note = "the gather buffer is part of everything else: too small to be seen"
    return figures.bars("Memory by device", groups, note)
