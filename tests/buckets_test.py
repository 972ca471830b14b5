"""Which leaves travel, and which share a bucket."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxdp import buckets

FLOAT0 = np.zeros(3, jax.dtypes.float0)
MIB = 2**20


def leaves() -> dict:
    return {
        "float32": jnp.ones(2),
        "bfloat16": jnp.ones(2, jnp.bfloat16),
        "complex64": jnp.ones(2, jnp.complex64),
        "float8": jnp.ones(2, jnp.float8_e5m2),
        "number": 1.5,
        "numpy": np.ones(2, np.float32),
        "abstract": jax.ShapeDtypeStruct((2,), jnp.float32),
        "int32": jnp.ones(2, jnp.int32),
        "count": 3,
        "bool": jnp.ones(2, jnp.bool),
        "float0": FLOAT0,
        "key": jax.random.key(0),
    }


def test_what_is_summed_and_what_is_moved():
    summed = [name for name, leaf in leaves().items() if buckets.is_summable(leaf)]
    moved = [name for name, leaf in leaves().items() if buckets.is_movable(leaf)]
    keys = [name for name, leaf in leaves().items() if buckets.is_key(leaf)]
    assert summed == list(leaves())[:7]
    assert moved == [name for name in leaves() if name != "float0"]
    assert keys == ["key"]


def test_leaves_under_tracing_are_told_apart_too():
    @jax.jit
    def fn(tree):
        names = [name for name, leaf in tree.items() if buckets.is_summable(leaf)]
        assert names == [
            "bfloat16",
            "complex64",
            "float32",
            "float8",
            "number",
            "numpy",
        ]
        assert buckets.is_key(tree["key"])
        return tree["int32"]

    tree = leaves()
    del tree["float0"], tree["abstract"]
    fn(tree)


def test_groups_are_of_one_dtype_and_keep_the_order():
    tree = [
        jnp.ones(1),
        jnp.ones(2, jnp.bfloat16),
        np.ones(3, np.float32),
        jnp.ones((0, 4)),
        2.5,
        jnp.ones(5, jnp.int32),
        FLOAT0,
        jax.random.key(0),
        jax.random.key(0, impl="rbg"),
        jax.random.key(1),
    ]
    moved = buckets.by_dtype(tree, buckets.is_movable)
    assert moved == [[0, 2, 4], [1], [3], [5], [7, 9], [8]]
    assert buckets.by_dtype(tree, buckets.is_summable) == [[0, 2, 4], [1], [3]]


def test_no_leaves_no_groups():
    assert buckets.by_dtype([], buckets.is_movable) == []
    assert buckets.assign([]) == []
    assert buckets.assign([jnp.ones(3, jnp.int32), FLOAT0], 1.0) == []


def mebibytes(size: float, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    count = int(size * MIB) // jnp.dtype(dtype).itemsize
    return jax.ShapeDtypeStruct((count,), dtype)


@pytest.mark.parametrize(
    ("sizes", "cap", "expected"),
    [
        ([1, 1, 1], None, [[0, 1, 2]]),
        ([1, 1, 1], 2.0, [[0, 1], [2]]),
        ([1, 1, 1], 1.999, [[0], [1], [2]]),
        ([1, 5, 1, 1], 2.0, [[0], [1], [2, 3]]),
        ([0.5, 0.5, 1, 0.25], 1.0, [[0, 1], [2], [3]]),
        ([3], 0.001, [[0]]),
    ],
    ids=["no_cap", "exactly_full", "just_over", "large_leaf", "in_order", "tiny_cap"],
)
def test_buckets_fill_up_to_their_cap(sizes, cap, expected):
    assert buckets.assign([mebibytes(size) for size in sizes], cap) == expected


def test_buckets_hold_one_dtype_and_count_its_bytes():
    """CO-5: a bfloat16 leaf fills half of what a float32 leaf of its length does."""
    tree = [
        mebibytes(1),
        mebibytes(1, jnp.bfloat16),
        mebibytes(1),
        mebibytes(1, jnp.bfloat16),
        mebibytes(1, jnp.complex64),
        mebibytes(1, jnp.int32),
    ]
    assert buckets.assign(tree, 2.0) == [[0, 2], [1, 3], [4]]
    assert buckets.assign(tree, 1.0) == [[0], [1], [2], [3], [4]]
    assert buckets.assign(tree) == [[0, 2], [1, 3], [4]]


def test_every_summable_leaf_is_in_one_bucket():
    tree = list(leaves().values())
    for cap in (None, 1.0, 1e-9):
        assigned = sorted(i for bucket in buckets.assign(tree, cap) for i in bucket)
        assert assigned == list(range(7))
