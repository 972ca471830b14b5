"""Whether the compiler kept a design: what was written, beside what is sent.

The traced program says which collectives a design asks for, and in which bucket. The
compiled one says what became of them: XLA merges collectives, takes them apart, sends
them in another dtype or does their work by another kind. Each such change is a
`Finding`; whether it breaks what the design promises depends on the design.
`NativeAllReduce` without a cap leaves merging to XLA; with one it does not.

Bits that travel as integers of the same width are no change. What stands between the
start and the end of a collective is listed, and breaks no design: XLA schedules.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax.sharding import PartitionSpec as P

from jaxdp.buckets import Bucket
from jaxdp.designs import Design, NativeAllReduce
from jaxdp.program import logical
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.trained import step_mesh, step_shapes, trainer_behind
from jaxdp.program.verdict.changes import MERGING, Finding, find, label
from jaxdp.program.verdict.distance import Distance, distances
from jaxdp.state import TrainState
from jaxdp.trainer import Trainer

if TYPE_CHECKING:
    from jaxdp.program.report import ProgramReport

PyTree = Any


@dataclass(frozen=True)
class JudgedBucket:
    """One bucket of a design, and whether the compiled program has it.

    Attributes:
        name: The scope of its operations, such as "bucket_2".
        collectives: How many it was written with.
        found: Whether all of them are there, alone and as written.
        contents: What is in it, as of `train.buckets`; None if that does not tell.
    """

    name: str
    collectives: int
    found: bool
    contents: Bucket | None = None


@dataclass(frozen=True)
class Verdict:
    """What the compiler made of written collectives; prints as a table.

    Attributes:
        findings: Every difference.
        buckets: Those written, in order.
        distances: What is scheduled between start and end of each collective.
        written: How many collectives were written.
    """

    findings: tuple[Finding, ...]
    buckets: tuple[JudgedBucket, ...]
    distances: tuple[Distance, ...]
    written: int

    @property
    def kept(self) -> bool:
        """Whether nothing that was found breaks what the design promises."""
        return not any(finding.broken for finding in self.findings)

    @property
    def buckets_asked(self) -> int:
        """How many buckets were written."""
        return len(self.buckets)

    @property
    def buckets_found(self) -> int:
        """How many of them travel by themselves, as written."""
        return sum(bucket.found for bucket in self.buckets)

    def __str__(self) -> str:
        """The verdict in one line, then findings, buckets and distances."""
        from jaxdp.program.verdict.table import verdict_table

        return verdict_table(self)


def verify(report: "ProgramReport", train: Any, *arguments: Any) -> Verdict:
    """Whether the compiler kept the design of a training.

    Args:
        report: Of the compiled step of the training, on its mesh, or as
            `jaxdp.compile_for` compiled it for other devices.
        train: What `jaxdp.data_parallel` made.
        arguments: For a report made of text: parameters or a state, and the batch.

    Returns:
        The verdict.

    Raises:
        TypeError: `train` is no training.
        ValueError: The program is not the step of this training, or arguments are
            missing, or a mesh of several axes has another number of devices.
    """
    trainer = trainer_behind(train, "verify")
    state, batch = step_shapes(report, trainer, arguments)
    mesh = step_mesh(trainer, report.devices, report.device)
    program = trainer.trace_on(mesh, state, batch)
    written = logical.collectives(program, report.devices)
    contents = _contents(report, trainer, state, batch)
    return _judged(report, written, _allowed(trainer.replica.design), contents)


def compare(
    report: "ProgramReport", written: Sequence[CollectiveOp] | None = None
) -> Verdict:
    """Whether the compiler kept the collectives of a program, of training or not.

    Args:
        report: Made with `traced`, unless `written` is given.
        written: What the program was meant to send; None for what was traced.

    Raises:
        ValueError: There is nothing to compare with.

    Example:
        >>> import jax, jaxdp
        >>> step = jax.jit(lambda x: x + 1)
        >>> traced = step.trace(1.0)
        >>> report = jaxdp.analyze(traced.lower().compile(), traced)
        >>> print(compare(report))
        kept: nothing was written to be sent, and nothing is
    """
    written = report.logical_collectives if written is None else written
    if written is None:
        raise ValueError(
            "compare got a report without logical collectives. It needs what was "
            "written beside what was compiled. Pass traced= to jaxdp.analyze, or "
            "written=."
        )
    return _judged(report, written, ())


def _allowed(design: Design) -> Collection[str]:
    """Kinds of changes that a design leaves to XLA."""
    native = isinstance(design, NativeAllReduce)
    return MERGING if native and design.bucket_cap_mb is None else ()


def _contents(
    report: "ProgramReport", trainer: Trainer, state: TrainState, batch: PyTree
) -> tuple[Bucket, ...]:
    """The buckets of a step; none where every device has parameters of its own."""
    alike = trainer.specs[0].params == P() or trainer.replica.design.in_parts("params")
    if not alike or report.devices % trainer.mesh.size:
        return ()
    return tuple(trainer.buckets(*trainer.shapes(state, batch)))


def _judged(
    report: "ProgramReport",
    written: Sequence[CollectiveOp],
    allowed: Collection[str],
    contents: Sequence[Bucket] = (),
) -> Verdict:
    """The verdict on what was written."""
    findings = find(written, report.collectives, allowed)
    changed = {id(op) for finding in findings for op in finding.written}
    names: dict[str, list[CollectiveOp]] = {}
    for op in written:
        if "bucket_" in label(op):
            names.setdefault(label(op), []).append(op)
    contents = contents if len(contents) == len(names) else ()
    known = dict(zip(names, contents, strict=True)) if contents else {}
    buckets = tuple(
        JudgedBucket(name, len(ops), changed.isdisjoint(map(id, ops)), known.get(name))
        for name, ops in names.items()
    )
    found = distances(report.module) if report.module is not None else ()
    return Verdict(findings, buckets, found, len(written))
