"""Rounds of communication on the critical path of a compiled program."""

from jaxdp.program.hlo import Module


def critical_rounds(module: Module) -> int:
    """The longest chain of collectives that wait for each other, in rounds."""
    raise NotImplementedError
