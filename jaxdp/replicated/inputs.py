"""What replicas are called with: which leaves are split, and which are refused.

Arrays are split along `dim`; everything else goes to every replica as it is. Host
arrays of NumPy are converted on their way to a device. What only looks like data (a
list of numbers, an image, a tensor of another library) is refused here, by its place in
the tree, rather than by a device later.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxdp.buckets import is_key
from jaxdp.trees import place

PyTree = Any


class Inputs(NamedTuple):
    """Positional and keyword inputs of one call."""

    inputs: tuple[Any, ...]
    keywords: dict[str, Any]


FOREIGN = ("__array__", "__array_interface__", "__dlpack__", "__cuda_array_interface__")
SHOWN = 3  # leaves of one kind in a message
NUMBERS = (bool, int, float, complex)


def is_array(leaf: Any) -> bool:
    """Whether a leaf is an array of JAX or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def is_split(leaf: Any) -> bool:
    """Whether a leaf is split: an array, but not a single key."""
    return is_array(leaf) and not (is_key(leaf) and not leaf.ndim)


def value_of(leaf: Any) -> Any:
    """What a leaf holds below `grad`; still a tracer inside `jit` and `vmap`."""
    while isinstance(leaf, Tracer) and hasattr(leaf, "primal"):
        leaf = leaf.primal
    return leaf


def is_traced(leaf: Any) -> bool:
    """Whether a leaf has no value yet: inside `jit`, but not inside `grad` alone."""
    return isinstance(value_of(leaf), Tracer)


def chunk_sizes(rows: int, devices: int) -> list[int]:
    """Sizes of the slices, as `torch.chunk` makes them: 66 on 4 are 17, 17, 17, 15.

    All but the last have ceil(rows / devices) rows, so that fewer slices than devices
    can come out: 9 rows on 4 are 3, 3, 3.
    """
    size = -(-rows // devices)
    return [min(size, rows - start) for start in range(0, rows, size)]


def check(tree: PyTree, dim: int, caller: str, name: str = "") -> int:
    """Checks a tree of inputs.

    Args:
        tree: Any nesting.
        dim: The dimension to split; counted from the end if negative.
        caller: The public function, named in errors.
        name: What the tree is called in errors; empty for `Inputs`.

    Returns:
        How many rows all arrays have along `dim`.

    Raises:
        TypeError: Leaves that look like data and are none, or a `dim` that is no int.
        ValueError: No array to split, `dim` out of range, arrays of different length,
            or no rows; or the call is being traced by `jit` or `vmap`.
    """
    check_dim(dim, caller)
    lengths: set[int | None] = set()
    plain = True
    for leaf in jax.tree.leaves(tree):
        plain &= _is_plain(leaf)
        if is_array(leaf) and is_split(leaf):
            lengths.add(leaf.shape[dim] if -leaf.ndim <= dim < leaf.ndim else None)
    if not plain:
        _refuse_strangers(tree, caller, name)
        _refuse_lists(tree, caller, name)
    if len(lengths) == 1 and (rows := lengths.pop()):
        return rows
    _refuse_lengths(tree, dim, caller, name)
    raise AssertionError  # one of the refusals above applies


def check_dim(dim: Any, caller: str) -> None:
    """Checks that `dim` is an integer.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(dim, int | np.integer) or isinstance(dim, bool):
        raise TypeError(
            f"{caller} got dim={dim!r}. It must be an integer, the dimension along "
            "which arrays are split and joined. Use dim=0 for batches [rows, ...]."
        )


def check_arrays(tree: PyTree, caller: str, name: str) -> None:
    """Checks that all leaves can go to a device.

    Raises:
        TypeError: Leaves that look like data and are none.
        ValueError: The call is being traced by `jit` or `vmap`.
    """
    if all(map(_is_plain, jax.tree.leaves(tree))):
        return
    _refuse_strangers(tree, caller, name)
    _refuse_lists(tree, caller, name)


def numbers(tree: PyTree, caller: str, name: str) -> PyTree:
    """The tree with its Python numbers as arrays.

    Raises:
        TypeError: Leaves that are neither arrays nor numbers.
        ValueError: The call is being traced by `jit` or `vmap`.
    """
    if all(map(_is_plain, jax.tree.leaves(tree))):
        return tree
    _refuse_strangers(tree, caller, name)
    bad = [
        f"{place(path, name)} of type {type(leaf).__name__}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if not is_array(leaf) and not isinstance(leaf, NUMBERS)
    ]
    if bad:
        raise TypeError(
            f"{caller} got {', '.join(bad)}. All leaves must be arrays or numbers, "
            "which are trained or updated. Let apply_fn bring along what is not."
        )
    return jax.tree.map(lambda x: x if is_array(x) else jnp.asarray(x), tree)


def _is_plain(leaf: Any) -> bool:
    """Whether there is nothing to convert or refuse about a leaf."""
    return is_array(leaf) and _has_numbers(leaf) and not is_traced(leaf)


def _has_numbers(array: Any) -> bool:
    """Whether a device takes arrays of this dtype: no objects, text, dates, records."""
    if isinstance(array, jax.Array):
        return True
    wide = array.dtype.char in "gG"  # long double
    return not wide and (array.dtype == bool or jnp.issubdtype(array.dtype, jnp.number))


def check_traced(tree: PyTree, caller: str, name: str) -> None:
    """Refuses a call that `jit` or `vmap` trace.

    Raises:
        ValueError: Names the first leaf without a value.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if is_traced(leaf):
            raise ValueError(
                f"{caller} got {place(path, name)} without a value, from a "
                "surrounding jax.jit or jax.vmap. It is a program of the host, which "
                "starts one compiled program per device, and cannot be compiled into "
                "one. Take it out of jax.jit; jax.grad around it works."
            )


def _refuse_strangers(tree: PyTree, caller: str, name: str) -> None:
    """Refuses leaves that are arrays of a kind that no device takes."""
    check_traced(tree, caller, name)
    bad = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        where = place(path, name)
        if is_array(leaf):
            if not _has_numbers(leaf):
                remedy = "Convert it to numbers"
                bad.append(f"{where} is an array of dtype {leaf.dtype}. {remedy}")
        elif any(hasattr(leaf, mark) for mark in FOREIGN):
            kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
            bad.append(f"{where} is a {kind}. {_conversion(leaf)}")
    if bad:
        shown = "; ".join(bad[:SHOWN])
        more = f"; and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise TypeError(
            f"{caller} got arrays that no device takes: {shown}{more}. Arrays must "
            "be jax.Array or numpy.ndarray, with numbers in them."
        )


def _conversion(leaf: Any) -> str:
    """How to convert an array of another library."""
    library = type(leaf).__module__.partition(".")[0]
    if library == "torch":
        return "Pass tensor.numpy(force=True)"
    if library == "PIL":
        return "Pass numpy.asarray(image)[None], one row for each image"
    return "Pass numpy.asarray(...) of it"


def _refuse_lists(tree: PyTree, caller: str, name: str) -> None:
    """Refuses lists of numbers: they would go to every replica whole."""

    def is_numbers(part: Any) -> bool:
        if not isinstance(part, list) or not part:
            return False
        return all(isinstance(x, NUMBERS) or is_numbers(x) for x in part)

    bad = [
        f"{place(path, name)} ({len(part)} entries)"
        for path, part in jax.tree_util.tree_leaves_with_path(tree, is_numbers)
        if is_numbers(part)
    ]
    if bad:
        raise TypeError(
            f"{caller} got lists of numbers: {', '.join(bad)}. Only arrays are split; "
            "a list would go to every replica whole. Pass numpy.asarray(...) of it if "
            "its entries are rows, or a tuple if all replicas need it."
        )


def _refuse_lengths(tree: PyTree, dim: int, caller: str, name: str) -> None:
    """Refuses arrays that cannot be split together."""
    shapes = {
        place(path, name): leaf.shape
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if is_split(leaf)
    }
    listed = ", ".join(f"{where} {shape}" for where, shape in shapes.items())
    if not shapes:
        leaves = len(jax.tree.leaves(tree))
        raise ValueError(
            f"{caller} got no array among the {leaves} leaves of its inputs. It needs "
            "at least one, whose rows decide how many replicas run. Pass the batch as "
            "a jax.Array or numpy.ndarray."
        )
    short = {
        where: shape
        for where, shape in shapes.items()
        if not -len(shape) <= dim < len(shape)
    }
    if short:
        bad = ", ".join(
            f"{where} of shape {shape} ({_range(len(shape))})"
            for where, shape in short.items()
        )
        raise ValueError(
            f"{caller} got arrays without the dimension dim={dim}: {bad}. All arrays "
            "are split along it. Choose another dim; pass a constant as a Python "
            "number, which all replicas get."
        )
    lengths = {shape[dim] for shape in shapes.values()}
    if len(lengths) > 1:
        raise ValueError(
            f"{caller} got arrays of different length along dim={dim}: {listed}. All "
            f"are split together and need equally many rows, here {len(lengths)} "
            "different numbers. Give every array one entry per row; pass what all "
            "replicas need as a closure or parameter."
        )
    raise ValueError(
        f"{caller} got 0 rows along dim={dim}: {listed}. At least 1 is needed. Skip "
        "this batch."
    )


def _range(ndim: int) -> str:
    """Which values of `dim` an array allows."""
    return f"allows {-ndim} to {ndim - 1}" if ndim else "allows none"


def rows_of(sizes: Sequence[int], replica: int) -> str:
    """Which rows a replica has, in words."""
    start = sum(sizes[:replica])
    last = start + sizes[replica] - 1
    return f"row {start}" if last == start else f"rows {start} to {last}"
