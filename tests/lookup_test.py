"""Tables of rows, and the formulas that stand for them."""

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st

from jaxdp.lookup import formula, looked_up


def table(trips: int, devices: int, columns: int, entry) -> np.ndarray:
    """`[trips, devices, columns]` of what `entry` says."""
    return np.fromfunction(np.vectorize(entry), (trips, devices, columns), dtype=int)


def test_a_ring_has_a_formula():
    """Round s: rank r sends chunk r - 1 - s modulo N."""
    found = formula(table(7, 8, 1, lambda s, r, c: (r - 1 - s) % 8))
    assert found is not None
    assert (found.steps[:2], found.modulus, found.at(3, 2, 0)) == ((7, 1), 8, 6)


def test_every_third_row_has_a_formula():
    """Rows 2, 5, 8, ..., 14 and round again: a ring of five with rows between."""
    found = formula(table(4, 6, 1, lambda s, r, c: 2 + 3 * ((r + s) % 5)))
    assert found is not None
    assert (found.stride, found.base, found.modulus) == (3, 2, 5)
    assert [found.at(3, rank, 0) for rank in range(6)] == [11, 14, 2, 5, 8, 11]


def test_what_is_no_ring_has_none():
    assert formula(table(1, 8, 1, lambda s, r, c: r ^ 1)) is None
    assert formula(np.array([[[0], [1], [1]]])) is None


@hypothesis.given(
    steps=st.tuples(*[st.integers(-3, 3)] * 3),
    shape=st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 4)),
    modulus=st.integers(1, 9),
    stride=st.integers(1, 3),
    base=st.integers(0, 5),
    data=st.data(),
)
def test_every_entry_comes_out(steps, shape, modulus, stride, base, data):
    """Whether a formula was found or not; entries of -1 may be anything."""
    b, a, e = steps

    def entry(trip, rank, column):
        return base + stride * ((b * trip + a * rank + e * column) % modulus)

    entries = table(shape[0], shape[1], shape[2], entry)
    holes = data.draw(st.lists(st.booleans(), min_size=0, max_size=entries.size - 1))
    entries.reshape(-1)[: len(holes)][np.array(holes, bool)] = -1
    found = formula(entries)
    for trip in range(shape[0]):
        for rank in range(shape[1]):
            for column in range(shape[2]):
                wanted = entries[trip, rank, column]
                if wanted >= 0 and found is not None:
                    assert found.at(trip, rank, column) == wanted


@pytest.mark.parametrize(
    "entry",
    [
        lambda s, r, c: (r + 2 * s + c) % 5,
        lambda s, r, c: (r ^ 1) + s + c,
        lambda s, r, c: 4,
        lambda s, r, c: r,
    ],
    ids=["ring", "exchange", "constant", "rank"],
)
@pytest.mark.parametrize(("trips", "columns"), [(1, 1), (1, 3), (4, 1), (4, 3)])
def test_programs_read_what_the_table_says(entry, trips, columns):
    entries = table(trips, 6, columns, entry)
    look_up = jax.jit(lambda *place: looked_up(entries, *place))
    for trip in range(trips):
        for rank in range(6):
            given = (rank,) if trips == 1 else (rank, trip)
            found = look_up(*given)
            wanted = entries[trip, rank]
            np.testing.assert_array_equal(found, wanted[0] if columns == 1 else wanted)
