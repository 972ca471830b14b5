"""What XLA made of a program: collectives, bytes per device, links and memory.

`analyze` takes the compiled program, because XLA adds, merges and retypes collectives
on the way: only the optimized text says what is sent. Given the traced program too, it
puts the bytes the program *asked* for next to them.

Devices are numbered as in the compiled program: by position in the flattened mesh, not
by `jax.Device.id`. All figures are for one run of the program.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax

from jaxdp.program import hlo, logical, traffic, walk, wellformed
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.shapes import quote
from jaxdp.program.memory import Memory, memory_of
from jaxdp.program.rounds import critical_rounds
from jaxdp.program.table import table

if TYPE_CHECKING:  # what is computed on demand is imported on demand
    from jaxdp.program.memory.held import Holdings
    from jaxdp.program.timeline import Timeline
    from jaxdp.program.verdict import Verdict
    from jaxdp.targets import Hardware

_COMPILE = "jax.jit(f).lower(*args).compile()"


@dataclass(frozen=True)
class ProgramReport:
    """The communication and memory of one compiled program.

    Attributes:
        collectives: every collective, in the order of the text.
        devices: how many devices run the program.
        logical_collectives: those the program was written with; None without
            `traced`.
        memory: None where the backend does not say, and for text.
        module: the parsed text.
        arguments: shapes of what the program takes, as `(args, kwargs)`; None for text.
        device: one of those it was compiled for; None for text.
    """

    collectives: tuple[CollectiveOp, ...]
    devices: int
    logical_collectives: tuple[CollectiveOp, ...] | None = None
    memory: Memory | None = None
    module: hlo.Module | None = field(default=None, repr=False, compare=False)
    arguments: Any = field(default=None, repr=False, compare=False)
    device: Any = field(default=None, repr=False, compare=False)

    @cached_property
    def sent_bytes(self) -> tuple[int, ...]:
        """Bytes each device sends; see `traffic` for what is exact and what a model."""
        return self._per_device(traffic.total(self.collectives, traffic.sent))

    @cached_property
    def received_bytes(self) -> tuple[int, ...]:
        """Bytes each device receives."""
        return self._per_device(traffic.total(self.collectives, traffic.received))

    @cached_property
    def link_bytes(self) -> Mapping[tuple[int, int], int]:
        """Bytes by (source, target); exact for permutes, else by `traffic.links`."""
        return dict(traffic.total(self.collectives, traffic.links))

    @cached_property
    def logical_sent_bytes(self) -> tuple[int, ...] | None:
        """Bytes each device would send as written; None without `traced`."""
        if self.logical_collectives is None:
            return None
        return self._per_device(traffic.total(self.logical_collectives, traffic.sent))

    @property
    def permutes(self) -> int:
        """How many collective-permutes one run executes."""
        return self.count("collective-permute")

    def count(self, kind: str) -> int:
        """How often one run executes a kind of collective, loops multiplied out.

        An upper bound if some of them are conditional.
        """
        return traffic.total(self.collectives, lambda op: Counter([op.kind]))[kind]

    def static_count(self, kind: str) -> int:
        """How many operations of a kind the text has, whatever runs them how often."""
        return sum(op.kind == kind for op in self.collectives)

    @cached_property
    def rounds(self) -> int:
        """Rounds of communication on the longest chain of collectives that wait."""
        return critical_rounds(module_behind(self, "rounds"))

    def timeline(self, hardware: "Hardware | str") -> "Timeline":
        """When the program computes and communicates on some hardware, predicted.

        Args:
            hardware: A `jaxdp.targets.Hardware`, or a target such as "h100".
        """
        from jaxdp.program.timeline import replay

        return replay(module_behind(self, "timeline"), hardware)

    def exposed_communication(self, hardware: "Hardware | str") -> float:
        """Seconds that communication adds to the program, predicted."""
        return self.timeline(hardware).exposed_s

    def verify(self, train: Any, *arguments: Any) -> "Verdict":
        """Whether the compiler kept the design of a training.

        Args:
            train: What `jaxdp.data_parallel` made.
            arguments: State and batch of the step; for a report made of text alone.
        """
        from jaxdp.program.verdict import verify

        return verify(self, train, *arguments)

    def held(self, train: Any) -> "Holdings":
        """What a device holds when it needs the most memory, by kind and name.

        Args:
            train: What `jaxdp.data_parallel` made, and this is the step of.
        """
        from jaxdp.program.memory.held import held

        return held(self, train)

    def summary(self) -> str:
        """A plain-text table: one line per collective, then the totals."""
        figures = {
            "sent": self.sent_bytes,
            "received": self.received_bytes,
            "written": self.logical_sent_bytes,
            "memory": self.memory and (self.memory.peak_bytes,) * self.devices,
        }
        rounds = None if self.module is None else self.rounds
        return table(self.collectives, self.devices, figures, self.link_bytes, rounds)

    def __str__(self) -> str:
        """The summary."""
        return self.summary()

    def _per_device(self, total: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(total.get(device, 0) for device in range(self.devices))


def module_behind(report: ProgramReport, asked: str) -> hlo.Module:
    """The parsed text of a report.

    Args:
        report: Of any program.
        asked: Which of its figures is read from the text, as errors call it.

    Raises:
        ValueError: The report was made by hand, without one.
    """
    if report.module is None:
        raise ValueError(
            f"report.{asked} got a report without a program: its module is None. "
            "It reads the program's text. Make the report with jaxdp.analyze."
        )
    return report.module


def analyze(compiled: Any, traced: Any = None) -> ProgramReport:
    """Report the collectives, traffic and memory of a compiled program.

    Args:
        compiled: a `jax.stages.Compiled`, or the text of one (`compiled.as_text()`).
        traced: the same program traced, `jax.jit(f).trace(*args)` or a jaxpr, for
            `logical_sent_bytes`.

    Returns:
        A `ProgramReport`. It fails rather than guess: every figure is either read from
        the program or follows from the formulas in `jaxdp.program.traffic`. What a
        custom call moves by itself is not visible, and not counted.

    Raises:
        TypeError: `compiled` is not compiled, or `traced` is not traced.
        ValueError: the text has a collective, a group syntax or a loop that cannot be
            counted, an operation that XLA is not known to have, or is not whole; the
            message quotes the line.

    Example:
        >>> import jax
        >>> report = analyze(jax.jit(lambda x: x + 1).lower(1.0).compile())
        >>> report.collectives, report.sent_bytes
        ((), (0,))
    """
    module = hlo.parse(_text(compiled))
    wellformed.check(module)
    written = None
    if traced is not None:
        written = logical.collectives(_jaxpr(traced), module.devices)
    return ProgramReport(
        collectives=walk.collectives(module),
        devices=module.devices,
        logical_collectives=written,
        memory=None if isinstance(compiled, str) else memory_of(compiled),
        module=module,
        arguments=None if isinstance(compiled, str) else compiled.in_avals,
        device=None if isinstance(compiled, str) else _device(compiled),
    )


def _device(compiled: jax.stages.Compiled) -> Any:
    """One of a program's devices; None if it takes and returns nothing."""
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    return min(shardings[0].device_set, key=lambda d: d.id) if shardings else None


def _text(compiled: Any) -> str:
    text = compiled.as_text() if isinstance(compiled, jax.stages.Compiled) else compiled
    given = f"a {type(compiled).__name__}"
    if isinstance(text, str) and text.lstrip().startswith("HloModule "):
        # Before optimization GSPMD has not added its collectives: they would be
        # missing from the report, without a word.
        if "is_scheduled=true" in text.split("\n\n")[0]:
            return text.lstrip()
        header = quote(text.lstrip().partition("\n")[0])
        given = f"HLO text that is not optimized, without is_scheduled=true in {header}"
    elif isinstance(text, str):
        start = text.lstrip()[:40]
        given = f"text that is not HLO and starts with {start!r}"
    elif text is None:
        given = "a compiled program without text"
    raise TypeError(
        f"analyze got {given}. It needs a jax.stages.Compiled, or the text "
        "compiled.as_text() of one, because only the optimized program says what is "
        f"sent. Compile first: {_COMPILE}."
    )


def _jaxpr(traced: Any) -> Any:
    jaxpr = traced.jaxpr if isinstance(traced, jax.stages.Traced) else traced
    if not hasattr(jaxpr, "eqns"):
        raise TypeError(
            f"analyze got traced={type(traced).__name__}. It needs a jax.stages.Traced "
            "or a jaxpr, whose equations hold the collectives as written. Pass "
            "jax.jit(f).trace(*args) or jax.make_jaxpr(f)(*args)."
        )
    return jaxpr
