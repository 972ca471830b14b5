"""The collectives of a traced program by schedule and size, for any number of devices.

`logical` lists every permute; this keeps a collective of ours together, as the schedule
that it was built from. A schedule can be built for another number of devices, so that
what a program of 8 devices says holds for one of 1,024, which nobody can compile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from jaxdp.executor import accumulation_dtype
from jaxdp.jaxprs import inner
from jaxdp.primitive import collective_p
from jaxdp.program.logical import KIND_OF, check_countable
from jaxdp.schedule import Schedule, local_rows


@dataclass(frozen=True)
class SizedCollective:
    """One collective over all devices.

    Attributes:
        schedule: Of one of ours; None for one of XLA's.
        kind: Of one of XLA's, such as "all-reduce"; else that of the schedule.
        elements: What each device puts in, padding included.
        itemsize: Bytes of an element.
        count: How often one run executes it.
        partial_itemsize: Bytes of an element of a partial sum, which may be wider; None
            for the same.
    """

    schedule: Schedule | None
    kind: str
    elements: int
    itemsize: int
    count: int = 1
    partial_itemsize: int | None = None

    def resized(self, devices: int) -> "SizedCollective":
        """The same for another number of devices, each of which puts in as much.

        Raises:
            ValueError: The schedule is for its own devices alone.
        """
        if self.schedule is None:
            return self
        return replace(self, schedule=self.schedule.resized(devices))

    @property
    def padded_elements(self) -> int:
        """Elements in all chunks of the schedule together, each chunk full."""
        assert self.schedule is not None
        length = -(-self.elements // local_rows(self.schedule.starts))
        return length * self.schedule.chunks


def sized_collectives(jaxpr: Any) -> tuple[SizedCollective, ...]:
    """All collectives of a traced program, in order; of branches the largest.

    Args:
        jaxpr: Whose collectives each run over all devices.

    Raises:
        ValueError: A collective in a `while_loop`, which may run any number of times;
            a native permute, which is no collective of all devices; or a primitive
            whose bytes are not static.
    """
    return tuple(_walk(jaxpr, 1))


def _walk(jaxpr: Any, count: int) -> Iterator[SizedCollective]:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name.removesuffix("_start")  # of asynchronous forms
        check_countable(name, "sized_collectives")
        if name == collective_p.name:
            yield _ours(eqn, count)
        elif name in KIND_OF:
            yield from _native(eqn, KIND_OF[name], count)
        elif name == "cond":
            branches = [tuple(_walk(branch, count)) for branch in inner(eqn)]
            yield from max(branches, key=_size)
        else:
            times = count * eqn.params["length"] if name == "scan" else count
            found = tuple(m for one in inner(eqn) for m in _walk(one, times))
            if found and name == "while":
                raise ValueError(
                    f"sized_collectives found a {found[0].kind} in a while_loop, which "
                    "may run any number of times. What it sends needs a number. Use "
                    "jax.lax.scan or fori_loop with a fixed length."
                )
            yield from found


def _ours(eqn: Any, count: int) -> SizedCollective:
    collective, (given, *_) = eqn.params["collective"], eqn.invars
    dtype = given.aval.dtype
    partial = accumulation_dtype(dtype).itemsize
    return SizedCollective(
        collective.schedule,
        collective.kind,
        given.aval.size,
        dtype.itemsize,
        count,
        partial if partial > dtype.itemsize else None,
    )


def _native(eqn: Any, kind: str, count: int) -> Iterator[SizedCollective]:
    if kind == "collective-permute":
        raise ValueError(
            f"sized_collectives found {eqn.primitive.name} outside of a schedule. It "
            "reads collectives of all devices, whose pairs are known for other numbers "
            "of them. Use jaxdp's collectives, or compile for each number of devices."
        )
    axes = eqn.params["axes"] if "axes" in eqn.params else (eqn.params["axis_name"],)
    if all(isinstance(axis, int) for axis in axes):
        return  # sums a dimension of the array: nothing moves
    for variable in eqn.invars:
        aval = variable.aval
        yield SizedCollective(None, kind, aval.size, aval.dtype.itemsize, count)


def _size(found: tuple[SizedCollective, ...]) -> int:
    return sum(m.count * m.elements * m.itemsize for m in found)
