"""Cutting a traced program: what segments hold, pass on, and make together."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxdp.streams.segments import Flat, cut


def flat_of(function, *args):
    closed = jax.make_jaxpr(function)(*args)
    return Flat.of(closed.jaxpr, [None] * len(args), closed.consts)


def evaluated(flat, segments, args):
    """The results of all segments, group by group."""
    values, found = dict(zip(flat.given, args, strict=True)), []
    for segment in segments:
        results, writes = segment([values[number] for number in segment.reads])
        values.update(zip(segment.writes, writes, strict=True))
        for number in segment.spent:
            del values[number]
        found.append([np.asarray(x) for x in results])
    return found


def chain(x, y):
    a = jnp.sin(x)
    b = jnp.cos(y)  # not needed for the first result
    c = a * 2
    d = b + a
    _ = jnp.exp(d)  # needed for none
    return c, d * a


def names(segment):
    return [operation.eqn.primitive.name for operation in segment.operations]


def test_what_a_result_does_not_need_moves_to_a_later_segment():
    flat = flat_of(chain, 1.0, 2.0)
    first, second = cut(flat, [[0], [1]])
    assert names(first) == ["sin", "mul"]
    assert names(second) == ["cos", "add", "mul"]
    x, y = flat.given
    assert first.reads == first.spent == (x,)
    (a,) = first.writes
    assert second.reads == (y, a)
    assert second.writes == ()


@pytest.mark.parametrize(
    "groups", [[[0], [1]], [[1], [0]], [[0, 1]], [[1, 0]], [[0], [1], [0]]]
)
def test_segments_make_what_the_program_makes(groups):
    flat = flat_of(chain, 1.0, 2.0)
    found = evaluated(flat, cut(flat, groups), (0.3, 0.7))
    expected = chain(0.3, 0.7)
    for group, results in zip(groups, found, strict=True):
        np.testing.assert_allclose(results, [expected[i] for i in group], rtol=1e-6)


def test_nothing_is_computed_twice():
    def loss(params, x):
        for w in params:
            x = jax.nn.relu(jnp.tanh(x @ w))
        return x.sum()

    params = [np.full((3, 3), i + 1.0, np.float32) for i in range(4)]
    x = np.ones((2, 3), np.float32)
    closed = jax.make_jaxpr(jax.grad(loss))(params, x)
    flat = Flat.of(closed.jaxpr, [None] * 5, closed.consts)
    segments = cut(flat, [[3], [2], [0, 1]])
    made = [
        o for s in segments for operation in s.operations for o in operation.outputs
    ]
    assert len(made) == len(set(made))
    for earlier, later in itertools.combinations(range(3), 2):
        assert segments[earlier].operations and segments[later].operations
        assert not set(segments[later].writes) & set(segments[earlier].writes)
    dots = [names(segment).count("dot_general") for segment in segments]
    assert dots == [5, 2, 4]  # 4 forward, then for each layer its own and its input
    expected = jax.tree.leaves(jax.grad(loss)(params, x))
    found = evaluated(flat, segments, [*params, x])
    for value, i in zip(itertools.chain(*found), (3, 2, 0, 1), strict=True):
        np.testing.assert_allclose(value, expected[i], rtol=1e-6)


def test_calls_are_opened_and_loops_stay_whole():
    table = jnp.arange(3.0)

    @jax.jit
    def inner(x):
        return jnp.sin(x), x + table

    def function(x):
        a, b = inner(x)
        total, _ = lax.scan(lambda c, v: (c + v, None), 0.0, b)
        return jax.nn.relu(a), total

    x = np.linspace(-1, 1, 3, dtype=np.float32)
    flat = flat_of(function, x)
    first, second = cut(flat, [[0], [1]])
    assert "scan" in names(second) and "sin" not in names(second)
    assert not {"jit", "pjit", "custom_jvp_call"} & {*names(first), *names(second)}
    found = evaluated(flat, [first, second], [x])
    for results, expected in zip(found, function(x), strict=True):
        np.testing.assert_allclose(results[0], expected, rtol=1e-6)


def test_results_that_nothing_computes():
    flat = flat_of(lambda x, y: (y, 2.0, x + y, y), 1.0, 5.0)
    segments = cut(flat, [[0, 1], [2], [3]])
    found = evaluated(flat, segments, (1.0, 5.0))
    assert [list(map(float, group)) for group in found] == [[5.0, 2.0], [6.0], [5.0]]
    assert [len(segment.operations) for segment in segments] == [0, 1, 0]


def test_side_effects_happen_once():
    seen = []

    def note(value):
        seen.append(float(value))
        return value

    def function(x):
        jax.debug.callback(note, x * 3)
        kind = jax.ShapeDtypeStruct((), jnp.float32)
        return io_callback(note, kind, x + 5) + 1, x + 2

    flat = flat_of(function, 1.0)
    first, second = cut(flat, [[0], [1]])
    assert names(first) == ["add", "io_callback", "add"]
    evaluated(flat, [first, second], (2.0,))
    jax.effects_barrier()
    assert seen == [7.0, 6.0]


def test_constants_are_known_and_not_passed_on():
    table = np.arange(4.0, dtype=np.float32)
    flat = flat_of(lambda x: (x * table, jnp.sum(table * x)), table)
    segments = cut(flat, [[0], [1]])
    assert {number for segment in segments for number in segment.reads}.isdisjoint(
        flat.constants
    )
    (first,), (second,) = evaluated(flat, segments, [table + 1])
    np.testing.assert_array_equal(first, table * (table + 1))
    assert second == (table * (table + 1)).sum()
