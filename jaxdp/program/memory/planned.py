"""Memory of a compiled program, as XLA planned it for each device."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Memory:
    """Bytes one device needs, from `compiled.memory_analysis()`.

    The program is the same on every device, and so are these numbers. They do not
    show what else a device holds, such as arrays of another program; for those see
    `jaxdp.program.placed`. What XLA places in the memory of the host is not counted.

    Attributes:
        argument_bytes: What the program is given.
        output_bytes: What it returns.
        temporary_bytes: What it needs in between.
        aliased_bytes: Part of the output that is in the place of a donated argument.
        code_bytes: The machine code; 0 where the backend does not say. No part of
            `peak_bytes`.
    """

    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    aliased_bytes: int
    code_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """Arguments, outputs and temporaries, with donated arguments counted once."""
        everything = self.argument_bytes + self.output_bytes + self.temporary_bytes
        return everything - self.aliased_bytes


def memory_of(compiled: jax.stages.Compiled) -> Memory | None:
    """The memory of a program, or None where the backend does not say all of it."""
    stats = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    sizes = [getattr(stats, f"{name}_size_in_bytes", None) for name in names]
    known = [size if size is not None and size >= 0 else None for size in sizes]
    arguments, outputs, temporaries, aliased, code = known
    if arguments is None or outputs is None or temporaries is None:
        return None
    return Memory(arguments, outputs, temporaries, aliased or 0, code or 0)
