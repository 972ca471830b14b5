"""How each experiment is run for the ledger: with which options, or why not at all.

What counts for a claim is run wherever it can be. What also testifies is run if it is
quick, and otherwise read where it lies in the results. Options keep the sum below half
an hour on two cores; a longer run made by hand is read instead.
"""

import dataclasses
from collections.abc import Callable, Iterable

from experiments import network
from experiments.harness import registry
from experiments.ledger.catalogue import Entry
from jaxdp import targets

TARGET = "h100"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """One experiment as evidence.

    Attributes:
        minutes: What it takes on two cores, with these options.
        options: Of a run of full size.
        quick: Whether it is run also where something else counts.
        absent: Says why it cannot be run here, or nothing.
        compiles: Whether it compiles for H100 GPUs, if that can be done here.
    """

    minutes: float
    options: tuple[str, ...] = ()
    quick: bool = False
    absent: Callable[[], str] = str
    compiles: bool = False


def no_compiler() -> str:
    """Why steps cannot be compiled for H100 GPUs, and what to install."""
    return targets.missing(TARGET)


SOURCES = {
    "algorithms": Source(minutes=6.5),
    "amp": Source(minutes=1.5, compiles=True),
    "bandwidth": Source(
        minutes=3,
        options=("--most-hosts", "4", "--size-mb", "4", "--no-training"),
        absent=network.missing,
    ),
    "compare": Source(minutes=1),
    "ddp": Source(minutes=2),
    "dp": Source(minutes=0.3),
    "errors": Source(minutes=0.3),
    "gpu": Source(minutes=15, absent=no_compiler),
    "memory": Source(minutes=4, compiles=True),
    "overlap_delay": Source(minutes=0.8, quick=True, compiles=True),
    "pipeline": Source(minutes=1, compiles=True),
    "ps": Source(minutes=1),
    "ring": Source(minutes=0.3),
    "scaling": Source(minutes=4, compiles=True),
    "staleness": Source(minutes=3),
    "traffic": Source(minutes=4, compiles=True),
    "zero": Source(
        minutes=2.5,
        options=("--least", "8", "--most", "8", "--models", "resnet"),
        compiles=True,
    ),
}


def absent(name: str) -> str:
    """Why an experiment cannot be run here; empty if it can."""
    if name not in registry.names():
        return f"The experiment {name} is not built yet."
    return SOURCES[name].absent()


def lack(name: str) -> str:
    """What an experiment that runs here does without, and what to install; or ""."""
    return no_compiler() if SOURCES[name].compiles else ""


def to_run(entries: Iterable[Entry], quick: bool) -> list[str]:
    """What must have a result: whatever counts for a claim.

    Args:
        entries: The claims.
        quick: Whether quick ones are run too that only testify.

    Returns:
        Names of experiments that can be run here, the longest first.
    """
    wanted = set()
    for entry in entries:
        possible = [name for name in entry.evidence if not absent(name)]
        wanted |= {*possible[:1]}
        wanted |= {name for name in possible if quick and SOURCES[name].quick}
    return sorted(wanted, key=lambda name: (-SOURCES[name].minutes, name))
