"""The text of a compiled program, read into computations and instructions."""

from jaxdp.program.hlo.module import Instruction, Module, parse

__all__ = ("Instruction", "Module", "parse")
