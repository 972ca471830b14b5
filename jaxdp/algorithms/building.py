"""What the builders of schedules share."""

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Concatenate, ParamSpec

from jaxdp.schedule import Placement, Round, Schedule, Transfer

Options = ParamSpec("Options")
Builder = Callable[Concatenate[int, Options], Schedule]
Pair = tuple[int, int]


def for_any_devices(build: Builder[Options]) -> Builder[Options]:
    """Lets the schedules of a function tell how to be built for other devices.

    The last ones are kept: a ring of 1,024 devices takes a second to build.

    Raises:
        ValueError: From the function: no devices, or a `root` that is none of them.
    """
    signature = inspect.signature(build)

    @functools.lru_cache(maxsize=64)
    def kept(devices: int, *args: Options.args, **options: Options.kwargs) -> Schedule:
        if devices < 1:
            raise ValueError(
                f"{build.__name__} got {devices} devices. It needs at least 1. Give "
                "the number of devices on the mesh axis."
            )
        root = signature.bind(devices, *args, **options).arguments.get("root", 0)
        if not 0 <= root < devices:
            raise ValueError(
                f"{build.__name__} got root={root} on {devices} devices. The root is a "
                f"rank from 0 to {devices - 1}: choose one of those."
            )
        family = functools.partial(_resized, built, args, options)
        return dataclasses.replace(build(devices, *args, **options), family=family)

    @functools.wraps(build)
    def built(devices: int, /, *args: Options.args, **options: Options.kwargs):
        return kept(devices, *args, **options)

    return built


def _resized(build: Callable[..., Schedule], args, options, devices: int) -> Schedule:
    """The same algorithm, with the same options, for other devices."""
    return build(devices, *args, **options)


def everywhere(devices: int, chunks: int) -> Placement:
    """Every chunk on every device."""
    return (tuple(range(devices)),) * chunks


def one_each(devices: int) -> Placement:
    """Chunk `r` on device `r` alone."""
    return tuple((r,) for r in range(devices))


def one_round(transfers: Sequence[Transfer]) -> tuple[Round, ...]:
    """One round of these transfers; none at all if there are none (N = 1)."""
    return (Round(tuple(transfers)),) if transfers else ()


def whole(pairs: Sequence[Pair], op) -> Round:
    """One round in which the only chunk moves along pairs."""
    return Round((Transfer(tuple(pairs), (0,) * len(pairs), op),))


def moved(moves: Sequence[tuple[int, int, int]], op) -> Transfer:
    """One transfer of these `(source, target, chunk)`."""
    pairs = tuple((source, target) for source, target, _ in moves)
    return Transfer(pairs, tuple(chunk for *_, chunk in moves), op)


def blocks(pairs: Sequence[Pair], firsts: Sequence[int], count: int, op) -> Round:
    """One round in which blocks of `count` chunks move along pairs, as one message.

    `firsts[i]` is the first chunk of the block that pair `i` moves.
    """
    moves = (tuple(first + offset for first in firsts) for offset in range(count))
    return Round(tuple(Transfer(tuple(pairs), chunks, op) for chunks in moves))


def backwards(schedule: Schedule, name: str) -> Schedule:
    """A broadcast run backwards: every device sends its sum where data came from.

    Chunks of one root exchange their turns, so that the first is reduced first.
    """
    chunks: dict[tuple[int, ...], list[int]] = {}
    for chunk, root in enumerate(schedule.starts):
        chunks.setdefault(root, []).append(chunk)
    turned = {c: d for of in chunks.values() for c, d in zip(of, of[::-1], strict=True)}
    rounds = tuple(
        Round(
            tuple(moved([(t, s, turned[c]) for s, t, c in each], "add") for each in r)
        )
        for r in (round_.transfers for round_ in reversed(schedule.rounds))
    )
    return Schedule(
        name, schedule.devices, schedule.chunks, schedule.ends, schedule.starts, rounds
    )


def overlapped(first: Schedule, second: Schedule, delay: int, name: str) -> Schedule:
    """As `first.then(second)`, but `second` starts `delay` rounds after `first`."""
    waiting = (Round(()),) * min(delay, len(second.rounds))
    pairs = itertools.zip_longest(
        first.rounds, waiting + second.rounds, fillvalue=Round(())
    )
    rounds = tuple(Round(a.transfers + b.transfers) for a, b in pairs)
    return dataclasses.replace(first.then(second, name), rounds=rounds)


def checked_chunks(name: str, chunks: int) -> int:
    """Checks how many chunks are in flight.

    Raises:
        ValueError: Fewer than one.
    """
    if chunks < 1:
        raise ValueError(
            f"{name} got chunks={chunks}. It cuts the buffer into at least 1 chunk. "
            "Use 1 to send it whole, more to keep several in flight."
        )
    return chunks
