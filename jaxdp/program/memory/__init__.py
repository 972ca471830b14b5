"""The memory of a compiled program: as XLA planned it, and by what it holds."""

from jaxdp.program.memory.planned import Memory, memory_of

__all__ = ("Memory", "memory_of")
