"""The collectives a program was *written* with, before XLA changed them.

XLA sends other types than the program names (on CPU it widens bfloat16 to float32),
merges collectives and adds its own. This walks the traced program (its jaxpr) and
gives the same records as `walk` does for the compiled one, so that the two can be
compared: bytes asked for against bytes sent.

Only explicit collectives are here, those of a `shard_map` or `pmap` body. What the
partitioner adds to a `jit` with sharded arguments exists in the compiled program alone.
An array counts with the shape it has in the body: under a `shard_map` that is manual
over some mesh axes only, that is its size before the partitioner splits it further.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxdp import jaxprs
from jaxdp.program.collective import CollectiveOp
from jaxdp.program.hlo.shapes import Array

# HLO's kind by primitive, without the suffix "_start" of asynchronous forms.
KIND_OF = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "unreduced_pmax": "all-reduce",
    "unreduced_pmin": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "pbroadcast": "collective-broadcast",
}
REFUSED = ("ragged_all_to_all", "psend", "precv", "pbroadcast_dynamic")


@dataclass(frozen=True)
class _Place:
    """Where an equation is: the mesh and scopes around it, how often it runs."""

    mesh: tuple[tuple[str, int], ...] = ()
    scope: str = ""
    count: int = 1
    branch: tuple[tuple[str, int], ...] = ()
    path: tuple[int, ...] = ()


def collectives(jaxpr: Any, devices: int) -> tuple[CollectiveOp, ...]:
    """All explicit collectives of a jaxpr, in order.

    Args:
        jaxpr: a `Jaxpr` or `ClosedJaxpr`.
        devices: how many devices every mesh in it must have.

    Raises:
        ValueError: a collective in a `while_loop` without a fixed length, outside of
            every `shard_map`, of a kind whose bytes are not static, or a mesh of
            another size than `devices`.
    """
    return tuple(_walk(jaxpr, _Place(), devices))


def check_countable(name: str, caller: str) -> None:
    """Refuses a primitive that moves what no program tells.

    Raises:
        ValueError: It is one of `REFUSED`.
    """
    if name in REFUSED:
        raise ValueError(
            f"{caller} cannot count the primitive {name!r} in the traced program. It "
            f"counts {', '.join(KIND_OF)}; how much {name} moves is decided while the "
            "program runs. Write the exchange with ppermute or all_to_all."
        )


def _walk(jaxpr: Any, place: _Place, devices: int) -> Iterator[CollectiveOp]:
    for position, equation in enumerate(jaxpr.eqns):
        name = equation.primitive.name.removesuffix("_start")
        here = replace(place, path=(*place.path, position))
        check_countable(name, "analyze")
        if name in KIND_OF:
            yield from _read(equation, KIND_OF[name], here)
            continue
        for inner, inside in _inner(equation, here, devices):
            found = tuple(_walk(inner, inside, devices))
            if found and equation.primitive.name == "while":
                raise ValueError(
                    "analyze cannot tell how often a while_loop of the traced program "
                    f"runs, and it contains {found[0].name!r}. Logical bytes need a "
                    "trip count. Use jax.lax.fori_loop or jax.lax.scan with a fixed "
                    "length, or call analyze without traced=."
                )
            yield from found


def _inner(equation: Any, place: _Place, devices: int) -> Iterator[tuple[Any, _Place]]:
    """The jaxprs an equation runs, each with the place it runs in."""
    params = equation.params
    place = replace(place, scope=_scope(equation, place))
    if equation.primitive.name == "shard_map":
        place = replace(place, mesh=_mesh(params["mesh"], devices))
    elif equation.primitive.name == "scan":
        place = replace(place, count=place.count * params["length"])
    if equation.primitive.name == "cond":
        conditional = "/".join(map(str, place.path))
        for index, branch in enumerate(params["branches"]):
            yield branch, replace(place, branch=(*place.branch, (conditional, index)))
        return
    yield from ((program, place) for program in jaxprs.inner(equation))


def _scope(equation: Any, place: _Place) -> str:
    """The named scopes around an equation: an inner jaxpr knows its own alone."""
    scopes = place.scope, str(equation.source_info.name_stack)
    return "/".join(scope for scope in scopes if scope)


def _mesh(mesh: Any, devices: int) -> tuple[tuple[str, int], ...]:
    axes = tuple(mesh.shape.items())
    if mesh.size != devices:
        raise ValueError(
            f"analyze got a traced program on a mesh of {mesh.size} devices, "
            f"{dict(axes)}, and a compiled one for {devices}. Both must be the same "
            "program. Pass jax.jit(f).trace(*args) of the f and args you compiled."
        )
    return axes


def _read(equation: Any, kind: str, place: _Place) -> Iterator[CollectiveOp]:
    params = equation.params
    axes = params["axes"] if "axes" in params else params["axis_name"]
    # psum over an int sums an array dimension: nothing moves.
    names = [
        name
        for name in (axes if isinstance(axes, tuple | list) else (axes,))
        if not isinstance(name, int)
    ]
    if not names:
        return
    groups = _groups(names, place.mesh, equation.primitive.name)
    if indices := params.get("axis_index_groups"):
        groups = [[row[i] for i in index] for row in groups for index in indices]
    pairs = []
    if kind == "collective-permute":
        pairs = [(row[s], row[t]) for row in groups for s, t in params["perm"]]
        groups = []
    if kind == "collective-broadcast":
        root = params["source"]
        groups = [[row[root], *row[:root], *row[root + 1 :]] for row in groups]
    yield CollectiveOp(
        kind=kind,
        arrays=tuple(_array(variable.aval) for variable in equation.invars),
        groups=tuple(map(tuple, groups)),
        pairs=tuple(pairs),
        count=place.count,
        name=equation.primitive.name,
        op_name=_scope(equation, place),
        branch=place.branch,
    )


def _groups(
    names: list[str], mesh: tuple[tuple[str, int], ...], primitive: str
) -> list[list[int]]:
    """Devices that differ in the named mesh axes only, in the order of those axes."""
    sizes: Mapping[str, int] = dict(mesh)
    if missing := [name for name in names if name not in sizes]:
        raise ValueError(
            f"analyze found {primitive} over {missing}, which no mesh around it has: "
            f"the axes there are {list(sizes)}. Group sizes come from the mesh of a "
            "shard_map or pmap. Trace the whole program, not the body alone."
        )
    grid = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    inner = [list(sizes).index(name) for name in names]
    outer = [axis for axis in range(grid.ndim) if axis not in inner]
    size = int(np.prod([sizes[name] for name in names]))
    return grid.transpose(outer + inner).reshape(-1, size).tolist()


def _array(aval: Any) -> Array:
    """The array of an abstract value, with the element type in HLO's names."""
    name = aval.dtype.name if hasattr(aval.dtype, "name") else str(aval.dtype)
    for long, short in (
        ("bfloat", "bf"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "s"),
        ("complex", "c"),
        ("bool", "pred"),
    ):
        name = re.sub(rf"^{long}(?=\d|$)", short, name)
    return Array(name.replace("_", ""), tuple(aval.shape), 8 * aval.dtype.itemsize)
