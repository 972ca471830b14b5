"""What XLA made of a program, read from its compiled text.

Its modules:

    hlo/, wellformed          the text as computations, and whether it is whole
    collective, members,      one collective: its kind, its devices, what each puts in
      agreement, chains
    walk, trips               which collectives run, and how often
    traffic, rounds           bytes by device and link; rounds that wait for each other
    report, table             `analyze`, and what it prints
    logical, sized, trained   what was written, before XLA changed it
    verdict/                  whether XLA kept it
    dependence                what waits for what
    memory/                   what a device holds
    products, timeline/       FLOPs, and when what would run on some hardware
"""

from jaxdp.program.collective import CollectiveOp
from jaxdp.program.dependence import Dependence, dependence
from jaxdp.program.memory.placed import Placement, placed, placed_by_kind
from jaxdp.program.report import ProgramReport, analyze

__all__ = (
    "CollectiveOp",
    "Dependence",
    "Placement",
    "ProgramReport",
    "analyze",
    "dependence",
    "placed",
    "placed_by_kind",
)
