"""What designs are compared by."""

from typing import NamedTuple

from experiments.site import sources


class Measure(NamedTuple):
    """One number of every design.

    Attributes:
        group: The heading under which it stands.
        title: What it is, with its unit.
        about: How it was found, and what it is worth.
        sources: A design's number is that of the first that has one.
    """

    group: str
    title: str
    about: str
    sources: tuple[sources.Source, ...]


TRAVELS = "What travels in a step"
HELD = "What a device holds"
TIME = "How long a step takes"
HIDDEN = "How much communication nothing hides"
EIGHT = f"N = {sources.DEVICES},"
SELDOM = "Local SGD: in the one step of 8 that exchanges."
COUNTED = f"Counted in the compiled program, N = 8; Φ: bytes of the gradients. {SELDOM}"
PREDICTED = (
    "Predicted by replaying the program compiled for 8 x H100, with NVLink of 450 "
    f"GB/s: nothing ran there. {SELDOM}"
)
MEASURES = (
    Measure(
        TRAVELS,
        "the busiest device sends (Φ)",
        COUNTED,
        (
            sources.column("compare", "designs", "busiest (Φ)"),
            sources.column("traffic", "designs", "in Φ", label=EIGHT),
        ),
    ),
    Measure(
        TRAVELS,
        "all devices send (Φ)",
        COUNTED,
        (
            sources.column("compare", "designs", "all (Φ)"),
            sources.column("traffic", "designs", "all links", label=EIGHT),
        ),
    ),
    Measure(
        TRAVELS,
        "rounds, one after another",
        f"On the longest chain; XLA's all-reduce as the ring that NCCL makes. {SELDOM}",
        (
            sources.column("compare", "designs", "rounds"),
            sources.column("traffic", "designs", "rounds", label=EIGHT),
        ),
    ),
    Measure(
        HELD,
        "kept between steps (Φ)",
        "Parameters and momentum, on the fullest device, N = 8.",
        (sources.Source("compare", "designs", "kept_mb", sources.kept),),
    ),
    Measure(
        HELD,
        "model states of GPT-2 small (MiB)",
        "Parameters, gradients and Adam's state when a device holds most, in programs "
        "for 8 x H100.",
        (
            sources.column(
                *("zero", "held_by_a_device", "counted_mb", "stage"),
                prefix="stage ",
                model="GPT-2 small",
                N=sources.DEVICES,
            ),
        ),
    ),
    Measure(
        HELD,
        "all of a step of GPT-2 small (GiB)",
        "8 sequences of 1,024 tokens, nine tenths activations, in programs for 8 x "
        "H100.",
        (
            sources.column(
                *("gpu", "designs", "peak_bytes_per_device"),
                scale=2**-30,
                model="GPT-2 small",
                devices=sources.DEVICES,
            ),
        ),
    ),
    Measure(
        HELD,
        "ResNet-50, 64 images on 4 devices (MiB)",
        "The main device of DataParallel, and every device of DDP, in programs for "
        "H100.",
        (sources.column("memory", "the_step_on_h100", "all_mb", "device"),),
    ),
    Measure(
        TIME,
        "here, a small CNN (ms)",
        "Forced host devices share cores: no measurement of bandwidth.",
        (sources.column("compare", "designs", "step_ms"),),
    ),
    *(
        Measure(
            TIME,
            f"on 8 x H100, {model} (ms)",
            f"{PREDICTED} DataParallel: one transfer after the other.",
            (*read, sources.port(model)),
        )
        for model, read in sources.models("step_ms").items()
    ),
    *(
        Measure(
            HIDDEN,
            f"exposed on 8 x H100, {model} (%)",
            f"Of the communication of the step. {PREDICTED}",
            read,
        )
        for model, read in sources.models("exposed_fraction", 100.0).items()
    ),
)


def read_from(experiment: str) -> list[sources.Source]:
    """All that is read from the result of an experiment."""
    every = (source for measure in MEASURES for source in measure.sources)
    return [source for source in every if source.experiment == experiment]
