"""Which devices take part in a collective: `replica_groups`, `source_target_pairs`.

XLA writes the same groups in several ways and picks one by version and partitioner:

    {{0,1},{2,3}}                                  a list
    {}                                             everybody, one group
    [4,2]<=[2,4]T(1,0)                             iota: reshape, transpose, reshape
    mesh['a'=2,'b'=4] {'b'}                        along mesh axes
    mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}    on a reordered mesh
    mesh['a'=2,'b'=4] {'b':(2)2}                   along a part of an axis
    single_device[device_id=3] {}                  one device

A syntax that is none of these is an error: a guessed group size gives wrong bytes and
no warning. What the numbers *mean* is a second question, answered by `to_devices`.
"""

import re
from collections.abc import Mapping
from math import prod

import numpy as np

from jaxdp.program.hlo.shapes import quote

Groups = tuple[tuple[int, ...], ...]
Pairs = tuple[tuple[int, int], ...]

_NUMBERS = r"\d+(?:,\d+)*"
_LIST = re.compile(rf"\{{((?:\{{{_NUMBERS}\}},?)*)\}}")
_IOTA = re.compile(rf"\[({_NUMBERS})\]<=\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?")
_AXIS = r"(?:'(?:[^'\\]|\\.)*'|\w+)"
_MESH = re.compile(
    rf"mesh\[({_AXIS}=\d+(?:,{_AXIS}=\d+)*)\]"
    rf"(?:, device_ids=\((?:\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?|({_NUMBERS}))\))?"
    rf" \{{((?:{_AXIS}(?::\(\d+\)\d+)?,?)*)\}}"
)
_SINGLE = re.compile(r"(?:single_device|maximal_mesh)\[device_id=(\d+)\] \{\}")
# Only these three carry `use_global_device_ids`, printed when true and left out when
# false; for the other kinds a channel alone means that the numbers are partitions.
_WITH_GLOBAL_IDS = ("all-reduce", "all-gather", "reduce-scatter")


def parse_groups(text: str, line: str = "") -> Groups:
    """Read `replica_groups`; `line` is what an error quotes.

    Returns:
        The groups with the numbers as written; `()` for `{}`, everybody.

    Raises:
        ValueError: a syntax that is not in the list above, or sizes that disagree.

    Example:
        >>> parse_groups("[4,2]<=[2,4]T(1,0)")
        ((0, 4), (1, 5), (2, 6), (3, 7))
        >>> parse_groups("mesh['a'=2,'b'=4] {'a'}")
        ((0, 4), (1, 5), (2, 6), (3, 7))
    """
    try:
        if match := _LIST.fullmatch(text):
            return tuple(_numbers(group) for group in re.findall(_NUMBERS, match[1]))
        if match := _IOTA.fullmatch(text):
            return _rows(_iota(match[2], match[3]).reshape(_numbers(match[1])))
        if match := _MESH.fullmatch(text):
            return _mesh_groups(*match.groups())
        if match := _SINGLE.fullmatch(text):
            return ((int(match[1]),),)
    except (ValueError, KeyError) as error:
        raise _unreadable("replica_groups", text, line) from error
    raise _unreadable("replica_groups", text, line)


def parse_pairs(text: str, line: str = "") -> Pairs:
    """Read `source_target_pairs`; `line` is what an error quotes.

    Raises:
        ValueError: anything that is no list of pairs.

    Example:
        >>> parse_pairs("{{0,1},{1,0}}")
        ((0, 1), (1, 0))
    """
    if match := _LIST.fullmatch(text):
        items = [_numbers(pair) for pair in re.findall(_NUMBERS, match[1])]
        pairs = tuple((item[0], item[-1]) for item in items if len(item) == 2)
        if len(pairs) == len(items):
            return pairs
    raise _unreadable("source_target_pairs", text, line)


def to_devices(
    groups: Groups,
    kind: str,
    attributes: Mapping[str, str],
    replicas: int,
    partitions: int,
) -> Groups:
    """Translate the numbers of an instruction into logical devices.

    Device `replica * partitions + partition` is the one at that place of the device
    assignment; JAX compiles for 1 replica, so there it is the place in the mesh.
    Numbers are replicas without a channel; partitions with one, for kinds that know
    no `use_global_device_ids`; devices where that is true; and where it is false,
    replicas, each standing for all of its partitions.
    """
    ids = np.arange(replicas * partitions).reshape(replicas, partitions)
    if attributes.get("use_global_device_ids") == "true":
        return _pick(ids.reshape(-1, 1), groups)
    if "channel_id" not in attributes:
        per_partition = (_pick(column[:, None], groups) for column in ids.T)
        return tuple(group for found in per_partition for group in found)
    if kind in _WITH_GLOBAL_IDS:
        return _pick(ids, groups)
    per_replica = (_pick(row[:, None], groups) for row in ids)
    return tuple(group for found in per_replica for group in found)


def _pick(table: np.ndarray, groups: Groups) -> Groups:
    """Replace each number by its row of `table`; no groups means one with all rows."""
    groups = groups or (tuple(range(len(table))),)
    return tuple(tuple(table[list(group)].reshape(-1).tolist()) for group in groups)


def _mesh_groups(
    mesh: str, reshape: str, transpose: str, listed: str, axes: str
) -> Groups:
    """Groups along mesh axes; a part `(before)size` of an axis is its middle factor."""
    sizes = {name: int(size) for name, size in re.findall(rf"({_AXIS})=(\d+)", mesh)}
    ids = np.array(_numbers(listed)) if listed else np.arange(prod(sizes.values()))
    if reshape:
        ids = _iota(reshape, transpose)
    factors = {name: [size] for name, size in sizes.items()}
    wanted = []
    for name, before, size in re.findall(rf"({_AXIS})(?::\((\d+)\)(\d+))?", axes):
        if name in (seen for seen, _ in wanted):
            raise ValueError(f"axis {name} occurs twice")
        if before:
            rest = sizes[name] // (int(before) * int(size))
            factors[name] = [int(before), int(size), rest]
        wanted.append((name, 1 if before else 0))
    places = [(name, part) for name in sizes for part in range(len(factors[name]))]
    grid = ids.reshape([factors[name][part] for name, part in places])
    inner = [places.index(place) for place in wanted]
    outer = [place for place in range(grid.ndim) if place not in inner]
    group_size = prod(grid.shape[place] for place in inner)
    return _rows(grid.transpose(outer + inner).reshape(-1, group_size))


def _iota(reshape: str, transpose: str | None) -> np.ndarray:
    sizes = _numbers(reshape)
    grid = np.arange(prod(sizes)).reshape(sizes)
    return (grid.transpose(_numbers(transpose)) if transpose else grid).reshape(-1)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _rows(grid: np.ndarray) -> Groups:
    return tuple(map(tuple, grid.tolist()))


def _unreadable(attribute: str, text: str, line: str) -> ValueError:
    return ValueError(
        f"analyze cannot read {attribute}={text!r}. It reads a list of lists, "
        "'[groups,size]<=[dims]T(order)' and \"mesh['axis'=size] {'axis'}\", and does "
        f"not guess, because a wrong group means wrong bytes. It is in {quote(line)}. "
        "Report this syntax with the jax version that printed it."
    )
