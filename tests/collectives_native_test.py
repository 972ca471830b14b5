"""`all_reduce` by `lax.psum`, and the choice that "auto" makes."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from tests import helpers

LEAVES = [(3, 4), (), (0,), (7,)]


def trees(devices, dtype=np.float32):
    random = np.random.default_rng(0)
    return [random.normal(size=(devices, *shape)).astype(dtype) for shape in LEAVES]


def program(algorithm, devices):
    run = helpers.per_device(
        helpers.collective("all_reduce", algorithm), jaxdp.data_mesh(devices)
    )
    return run.lower(trees(devices)).as_text()


def count(text, operation):
    return text.count(f'"stablehlo.{operation}"')


@pytest.mark.parametrize("mode", helpers.MODES)
@pytest.mark.parametrize("mean", [False, True], ids=["sum", "mean"])
def test_native_sums(mode, mean):
    given = trees(4)
    run = helpers.collective("all_reduce", "native", mean=mean)
    found = helpers.per_device(run, jaxdp.data_mesh(4), mode)(given)
    for leaf, x in zip(found, given, strict=True):
        total = x.astype(np.float64).sum(axis=0) / (4 if mean else 1)
        np.testing.assert_allclose(leaf, np.broadcast_to(total, x.shape), 1e-6, 1e-6)
        assert leaf.dtype == x.dtype


def test_native_is_an_all_reduce_and_no_permutes():
    text = program("native", 4)
    assert count(text, "all_reduce") == 2  # of what has elements, and of what has none
    assert count(text, "collective_permute") == 0


def test_native_sums_bfloat16_in_float32():
    x = np.array([[256.0], [1.0], [1.0], [1.0]], jnp.bfloat16)  # 256 + 1 = 256
    run = helpers.collective("all_reduce", "native")
    (found,) = set(np.asarray(helpers.per_device(run, jaxdp.data_mesh(4))(x)).flat)
    assert found == jnp.bfloat16(259.0)


def test_native_leaves_integers_alone():
    x = np.arange(4, dtype=np.int32)[:, None]
    run = helpers.collective("all_reduce", "native")
    helpers.assert_bit_equal(helpers.per_device(run, jaxdp.data_mesh(4))(x), x)


def test_auto_is_what_is_chosen_for_so_few_bytes():
    for devices in (2, 4):
        few = 4 * sum(math.prod(shape) for shape in LEAVES)
        chosen = jaxdp.choose_algorithm(few, devices).algorithm
        assert program("auto", devices) == program(chosen, devices)
        assert program("auto", devices) != program("ring", devices)


def test_auto_is_native_between_two_processes_on_cpus(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert program("auto", 2) == program("native", 2)
    assert program("auto", 4) == program("ring", 4)


@pytest.mark.parametrize("algorithm", ["auto", "native"])
def test_designs_take_both(algorithm):
    def loss_fn(params, batch):
        return jnp.mean((batch @ params) ** 2)

    train = jaxdp.data_parallel(
        loss_fn, optax.sgd(0.5), jaxdp.data_mesh(4), jaxdp.AllReduce(algorithm)
    )
    state, metrics = train.step(
        train.init(np.array([1.0, 2.0], np.float32)),
        np.array([[1, 0], [0, 1], [1, 1], [2, 0]], np.float32),
    )
    assert metrics["loss"] == (1 + 4 + 9 + 4) / 4
    # d/dw = 2/4 sum of (row . w) row = 1/2 ([1, 0] + [0, 2] + [3, 3] + [4, 0])
    np.testing.assert_allclose(train.params(state), [1 - 2, 2 - 1.25], 1e-6)


def test_unknown_algorithms_are_told_of_both():
    known = r"'auto', .*'native', .*'recursive_doubling', 'ring', 'star'"
    with pytest.raises(ValueError, match=rf"algorithm='bush'.*{known}"):
        program("bush", 4)
