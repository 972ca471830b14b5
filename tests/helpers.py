"""What tests share: runners of collectives, NumPy references, compiled programs.

Everywhere entry r of a leading axis of length N belongs to rank r.
"""

import importlib.util
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdp

PyTree = Any
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"
)
MODES = ("checked", "unchecked", "pmap")
SUMS = ("all_reduce", "reduce_scatter", "reduce")
REPLICATED = ("all_reduce", "all_gather", "broadcast")
KINDS = (*SUMS, "all_gather", "broadcast", "gather", "scatter")
CASES = [
    ("all_reduce", "ring"),
    ("all_reduce", "star"),
    ("reduce_scatter", "ring"),
    ("all_gather", "ring"),
    ("reduce", "star"),
    ("broadcast", "star"),
    ("gather", "star"),
    ("scatter", "star"),
]


def collective(kind: str, algorithm: Any, root: int = 0, **options) -> Callable:
    """The collective as a function of its tree alone, on the axis 'data'."""
    if kind in ("reduce", "broadcast", "gather", "scatter"):
        options["root"] = root
    return lambda tree: getattr(jaxdp, kind)(
        tree, "data", algorithm=algorithm, **options
    )


def per_device(fn: Callable, mesh: Mesh, mode: str = "checked") -> Callable:
    """`fn` on every device, as a compiled function of stacked trees."""
    if mode == "pmap":
        return jax.pmap(fn, axis_name="data", devices=list(mesh.devices.flat))

    def body(*blocks):
        result = fn(*jax.tree.map(lambda x: x[0], blocks))
        return jax.tree.map(lambda x: x[None], result)

    return jax.jit(
        jax.shard_map(
            body,
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=mode == "checked",
        )
    )


def replicated(fn: Callable, mesh: Mesh, check_vma: bool = True) -> Callable:
    """`fn` on every device, whose result is declared to be the same everywhere."""

    def body(*blocks):
        return fn(*jax.tree.map(lambda x: x[0], blocks))

    return jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=check_vma
        )
    )


def as_numpy(tree: PyTree) -> PyTree:
    """The leaves as NumPy arrays; of keys their data."""

    def leaf(x):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        return np.asarray(x)

    return jax.tree.map(leaf, tree)


def assert_bit_equal(actual: PyTree, expected: PyTree) -> None:
    """Same structure, shapes, dtypes and bits."""
    actual, expected = as_numpy(actual), as_numpy(expected)
    chex.assert_trees_all_equal_structs(actual, expected)
    chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
    chex.assert_trees_all_equal(
        *(
            jax.tree.map(lambda x: np.frombuffer(x.tobytes(), np.uint8), tree)
            for tree in (actual, expected)
        )
    )


def assert_replicas_bit_equal(tree: PyTree) -> None:
    """Every device holds the same bits."""
    for leaf in jax.tree.leaves(tree):
        shards = [as_numpy(shard.data) for shard in leaf.addressable_shards]
        assert len(shards) == leaf.sharding.num_devices
        assert {shard.tobytes() for shard in shards} == {shards[0].tobytes()}


def ring_order_sum(x: np.ndarray) -> np.ndarray:
    """Sums `[N, L]` over N as a ring does, chunk c from rank c + 1 round to rank c."""
    n, length = x.shape
    chunk = -(-length // n)
    total = np.empty(length, x.dtype)
    for e in range(length):
        c = e // chunk
        value = x[(c + 1) % n, e]
        for hop in range(2, n + 1):
            value = value + x[(c + hop) % n, e]
        total[e] = value
    return total


def star_order_sum(x: np.ndarray, root: int) -> np.ndarray:
    """Sums `[N, L]` over N as a root does: its own, then the others in rank order."""
    total = x[root]
    for rank in range(len(x)):
        if rank != root:
            total = total + x[rank]
    return total


def reference(
    kind: str, algorithm: str, tree: PyTree, root: int = 0, mean: bool = False
) -> PyTree:
    """What every device must end with, bit for bit, of NumPy leaves `[N, ...]`."""
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.dtype, []).append(i)
    for dtype, indices in groups.items():
        arrays = [leaves[i] for i in indices]
        if kind not in SUMS:
            moved = [_moved(kind, x, root) for x in arrays]
        elif jnp.issubdtype(dtype, jnp.inexact):
            moved = _summed(kind, algorithm, arrays, root, mean)
        else:
            moved = arrays
        for i, array in zip(indices, moved, strict=True):
            leaves[i] = array
    return jax.tree.unflatten(structure, leaves)


def _moved(kind: str, x: np.ndarray, root: int) -> np.ndarray:
    n = len(x)
    if kind == "all_gather":
        return np.broadcast_to(x, (n, *x.shape))
    if kind == "broadcast":
        return np.broadcast_to(x[root], x.shape)
    if kind == "scatter":
        return x[root]
    result = np.zeros((n, *x.shape), x.dtype)
    result[root] = x
    return result


def _summed(kind, algorithm, arrays, root, mean) -> list[np.ndarray]:
    dtype, n = arrays[0].dtype, len(arrays[0])
    wide = np.complex64 if jnp.issubdtype(dtype, jnp.complexfloating) else np.float32
    flats = [x.reshape(n, -1).astype(wide) for x in arrays]

    def total(flat):
        result = (
            ring_order_sum(flat)
            if algorithm == "ring"
            else star_order_sum(flat, root if kind == "reduce" else 0)
        )
        return (result / wide(n) if mean else result).astype(dtype)

    if kind == "reduce_scatter":
        return [
            np.pad(total(flat), (0, -flat.shape[1] % n)).reshape(n, -1)
            if flat.size
            else np.zeros((n, 0), dtype)
            for flat in flats
        ]
    summed = total(np.concatenate(flats, axis=1))
    parts = np.split(summed, np.cumsum([flat.shape[1] for flat in flats])[:-1])
    result = []
    for part, x in zip(parts, arrays, strict=True):
        everywhere = np.broadcast_to(part.reshape(x.shape[1:]), x.shape)
        if kind == "reduce":
            keep = (np.arange(n) == root).reshape(n, *[1] * (x.ndim - 1))
            everywhere = np.where(keep, everywhere, np.zeros((), dtype))
        result.append(everywhere)
    return result


class Permute(NamedTuple):
    """One `collective-permute` of a compiled program."""

    dtype: str
    elements: int
    pairs: str

    @property
    def nbytes(self) -> int:
        bits = re.search(r"\d+$", self.dtype)
        return self.elements * (int(bits[0]) // 8 if bits else 1)


def compiled_text(fn: Callable, *args) -> str:
    """The text of the compiled program."""
    return fn.lower(*args).compile().as_text()


def permutes(text: str) -> list[Permute]:
    """The permutes of a program, which must hold no other collective."""
    others = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-broadcast"
    assert not re.findall(rf"({others})(?:-start)?\(", text)
    found = re.findall(
        r" (\w+)\[([\d,]*)\]\S* collective-permute\("
        r".*source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}",
        text,
    )
    assert len(found) == len(re.findall(r"collective-permute(?:-start)?\(", text))
    return [
        Permute(dtype, int(np.prod([int(d) for d in dims.split(",") if d])), pairs)
        for dtype, dims, pairs in found
    ]
