"""What designs are compared by, and where the numbers of each measure stand."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.harness.result import Document
from experiments.site.designs import canonical

DEVICES = 8
# What titles below say; results with other options have other numbers.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "compare": {"devices": DEVICES},
    "traffic": {},
    "gpu": {"tiny": False, "target": "h100", "hosts": 1, "rows": None},
    "overlap": {"tiny": False},
    "zero": {"tiny": False},
    "memory": {"tiny": False, "devices": 4, "batch_size": 64, "image_size": 224},
}
Read = Callable[[Document], dict[str, float]]  # by design


class Source(NamedTuple):
    """An experiment that has numbers of a measure, and the column they stand in."""

    experiment: str
    table: str
    value: str
    read: Read


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
    sources: tuple[Source, ...]


def column(
    experiment: str,
    table: str,
    value: str,
    key: str = "design",
    scale: float = 1.0,
    prefix: str = "",
    label: str = "",
    **only: Any,
) -> Source:
    """Reads one column of a table, of results with the options of `OPTIONS`.

    Args:
        experiment: Whose result it is.
        table: Its name.
        value: The column with the numbers.
        key: The column with the designs.
        scale: What numbers are multiplied with.
        prefix: What stands before the content of `key` to make a name.
        label: What the text below the table must contain.
        **only: What other columns must have.
    """

    def read(document: Document) -> dict[str, float]:
        config = {"tiny": False} | document["config"]
        options = OPTIONS[experiment].items()
        if any(config.get(name) != wanted for name, wanted in options):
            return {}
        return {
            canonical(f"{prefix}{row.get(key)}", DEVICES): scale * row[value]
            for row in document["tables"].get(table, ())
            if all(row.get(name) == wanted for name, wanted in only.items())
            and label in str(row.get("label"))
            and _finite(row.get(value))
        }

    return Source(experiment, table, value, read)


def _kept(document: Document) -> dict[str, float]:
    """What devices keep between steps in `compare`, in multiples of the gradients."""
    kept = column("compare", "designs", "kept_mb").read(document)
    phi = column("compare", "sent_in_a_step", "Φ_bytes").read(document)
    return {
        name: size * 2**20 / phi[name] for name, size in kept.items() if phi.get(name)
    }


def _finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < 1e18 and math.isfinite(value)


def _models(value: str, scale: float = 1.0) -> Mapping[str, tuple[Source, ...]]:
    """A number of compiled steps: in `gpu`, and of ZeRO in `overlap`, by model."""
    return {
        model: (
            column("gpu", "designs", value, scale=scale, model=model, devices=DEVICES),
            *(
                column(
                    *("overlap", "steps", value),
                    scale=scale,
                    model=model,
                    devices=DEVICES,
                    variant=variant,
                )
                for variant in ("after", "as it is")
            ),
        )
        for model in ("ResNet-50", "GPT-2 small")
    }


TRAVELS = "What travels in a step"
HELD = "What a device holds"
TIME = "How long a step takes"
HIDDEN = "How much communication nothing hides"
EIGHT = f"N = {DEVICES},"
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
            column("compare", "designs", "busiest (Φ)"),
            column("traffic", "designs", "in Φ", label=EIGHT),
        ),
    ),
    Measure(
        TRAVELS,
        "all devices send (Φ)",
        COUNTED,
        (
            column("compare", "designs", "all (Φ)"),
            column("traffic", "designs", "all links", label=EIGHT),
        ),
    ),
    Measure(
        TRAVELS,
        "rounds, one after another",
        f"On the longest chain; XLA's all-reduce as the ring that NCCL makes. {SELDOM}",
        (
            column("compare", "designs", "rounds"),
            column("traffic", "designs", "rounds", label=EIGHT),
        ),
    ),
    Measure(
        HELD,
        "kept between steps (Φ)",
        "Parameters and momentum, on the fullest device, N = 8.",
        (Source("compare", "designs", "kept_mb", _kept),),
    ),
    Measure(
        HELD,
        "model states of GPT-2 small (MiB)",
        "Parameters, gradients and Adam's state when a device holds most, in programs "
        "for 8 x H100.",
        (
            column(
                *("zero", "held_by_a_device", "counted_mb", "stage"),
                prefix="stage ",
                model="GPT-2 small",
                N=DEVICES,
            ),
        ),
    ),
    Measure(
        HELD,
        "all of a step of GPT-2 small (GiB)",
        "8 sequences of 1,024 tokens, nine tenths activations, in programs for 8 x "
        "H100.",
        (
            column(
                *("gpu", "designs", "peak_bytes_per_device"),
                scale=2**-30,
                model="GPT-2 small",
                devices=DEVICES,
            ),
        ),
    ),
    Measure(
        HELD,
        "ResNet-50, 64 images on 4 devices (MiB)",
        "The main device of DataParallel, and every device of DDP, in programs for "
        "H100.",
        (column("memory", "the_step_on_h100", "all_mb", "device"),),
    ),
    Measure(
        TIME,
        "here, a small CNN (ms)",
        "Forced host devices share cores: no measurement of bandwidth.",
        (column("compare", "designs", "step_ms"),),
    ),
    *(
        Measure(TIME, f"on 8 x H100, {model} (ms)", PREDICTED, sources)
        for model, sources in _models("step_ms").items()
    ),
    *(
        Measure(
            HIDDEN,
            f"exposed on 8 x H100, {model} (%)",
            f"Of the communication of the step. {PREDICTED}",
            sources,
        )
        for model, sources in _models("exposed_fraction", 100.0).items()
    ),
)


def sources(experiment: str) -> list[Source]:
    """All that is read from the result of an experiment."""
    every = (source for measure in MEASURES for source in measure.sources)
    return [source for source in every if source.experiment == experiment]
