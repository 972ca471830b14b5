"""What XLA made of a program, read from its compiled text."""

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
