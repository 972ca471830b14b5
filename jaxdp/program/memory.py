"""Memory of a compiled program, as XLA planned it for each device."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Memory:
    """Bytes one device needs, from `compiled.memory_analysis()`.

    The program is the same on every device, and so are these numbers. They do not
    show what else a device holds, such as arrays of another program.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries, with donated arguments counted once."""
        everything = self.argument_bytes + self.output_bytes + self.temporary_bytes
        return everything - self.aliased_bytes


def memory_of(compiled: jax.stages.Compiled) -> Memory | None:
    """The memory of a program, or None where the backend does not say."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    return Memory(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        aliased_bytes=stats.alias_size_in_bytes,
    )
