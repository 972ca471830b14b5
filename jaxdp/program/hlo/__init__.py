"""The text of a compiled program, read into computations and instructions."""

from jaxdp.program.hlo.module import Computation, Instruction, Module, parse, root_of

__all__ = ("Computation", "Instruction", "Module", "parse", "root_of")
