"""Any design's checkpoint is a start for any other, on any number of devices."""

import functools

import jax
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.checkpoint.content import content_of
from jaxdp.training import trainer_of
from tests.checkpoint_helpers import (
    DESIGNS,
    assert_same,
    loss_fn,
    params,
    restored,
    run,
    saved,
    training,
)

PROMPT = sorted({*DESIGNS} - {"local", "late"})  # all make the same updates
NUMBERS = range(3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """By design: a checkpoint after three steps on 4 devices, and what was saved."""
    made = {}

    def make(design):
        if design not in made:
            train, state = training(design)
            state, _ = run(train, state, NUMBERS)
            folder = saved(tmp_path_factory.mktemp(design), train, state)
            wanted = jax.tree.map(np.asarray, train.params(state))
            made[design] = folder, wanted, run(train, state, [3])
        return made[design]

    return make


@pytest.mark.parametrize("design", DESIGNS)
def test_same_design_goes_on_with_the_same_bits(checkpoint, design):
    folder, wanted, (after, losses) = checkpoint(design)
    train, fresh = training(design)
    state = restored(folder, train, fresh).state
    assert_same(jax.tree.map(np.asarray, train.params(state)), wanted)
    again, same_losses = run(train, state, [3])
    assert same_losses == losses
    assert_same(content(train, again), content(train, after))


@functools.cache
def fresh_training(design, devices):
    """A restore leaves the first state as it is."""
    least = {"root": 2, "servers": 2, "worker": 2, "dedicated": 3}
    return training(design, max(devices, least.get(design, 1)))


# What lies on disk is the same for all: it takes no more than each way in and out.
PAIRS = [(d, "zero3" if d == "ring" else "ring") for d in PROMPT]
PAIRS += [("zero2", d) for d in PROMPT] + [("servers", "root"), ("int8", "powersgd")]


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_every_design_goes_on_from_every_other(checkpoint, source, target):
    folder, wanted, _ = checkpoint(source)
    train, fresh = fresh_training(target, 2)
    state = restored(folder, train, fresh, quietly=True).state
    assert_same(jax.tree.map(np.asarray, train.params(state)), wanted)
    assert int(state.step) == 3
    moments, found = jaxdp.checkpoint.load(folder), content(train, state)
    for name in ("mu/w", "nu/w", "mu/dense/k", "nu/s", "count"):
        name = f"opt_state/0/{name}"
        assert found[name].tobytes() == moments[name].tobytes(), name


@pytest.mark.parametrize(
    ("design", "devices"),
    [(f"zero{stage}", n) for stage in (1, 2, 3) for n in (1, 2, 3, 8)]
    + [(d, 3) for d in PROMPT if not d.startswith("zero")],
)
def test_other_device_counts_train_on(checkpoint, design, devices):  # CK-1
    folder, wanted, (_, losses) = checkpoint(design)
    train, fresh = fresh_training(design, devices)
    state = restored(folder, train, fresh).state
    assert_same(jax.tree.map(np.asarray, train.params(state)), wanted)
    state, found = run(train, state, [3])
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    again = content(train, state)
    assert again["opt_state/0/mu/w"].shape == (10,)  # no padding of any layout
    sizes = {n: x.size for n, x in again.items() if n.startswith("params/")}
    assert sizes == {"params/dense/k": 12, "params/s": 1, "params/w": 10}


def test_ring_of_other_designs_is_the_ring_that_was_never_away(checkpoint):
    folder, _, (_, losses) = checkpoint("ring")
    finals = []
    for through in ("ring", "servers", "root"):
        train, fresh = training(through, 2)
        state = restored(folder, train, fresh).state
        state, found = run(train, state, [3, 4])
        np.testing.assert_allclose(found[0], losses[0], rtol=1e-6)
        finals.append(jax.tree.map(np.asarray, train.params(state)))
    for other in finals[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            *(other, finals[0]),
        )


def test_local_replicas_start_from_their_mean_elsewhere(tmp_path):
    design = jaxdp.LocalSGD(sync_every=2)
    train, state = training(design, 4)
    state, _ = run(train, state, range(3))  # after the third nothing is averaged
    own = np.asarray(state.params["w"])
    momentum = np.asarray(state.opt_state[0].mu["w"])
    assert len({row.tobytes() for row in own}) == 4
    saved(tmp_path, train, state)
    train, fresh = training(design, 2)
    back = restored(tmp_path, train, fresh).state
    for row in np.asarray(back.params["w"]):
        np.testing.assert_array_equal(row, own.mean(axis=0))
    for row in np.asarray(back.opt_state[0].mu["w"]):
        np.testing.assert_array_equal(row, momentum.mean(axis=0))
    assert np.asarray(back.opt_state[0].count).tolist() == [3, 3]
    train, fresh = training("ring", 2)
    with pytest.warns(jaxdp.checkpoint.CheckpointWarning, match="'replicas'.*LocalSGD"):
        back = restored(tmp_path, train, fresh).state
    np.testing.assert_array_equal(back.params["w"], own.mean(axis=0))


def test_residuals_keep_their_mean_on_other_device_counts(checkpoint):
    folder, _, _ = checkpoint("int8")
    before = jaxdp.checkpoint.load(folder)["carried/residuals/w"]
    assert before.shape == (4, 10)
    assert np.any(before)
    for devices in (4, 3):
        train, fresh = training("int8", devices)
        after = np.asarray(
            restored(folder, train, fresh).state.opt_state.residuals["w"]
        )
        assert after.shape == (devices, 10)
        if devices == 4:
            np.testing.assert_array_equal(after, before)
        mean = before.astype(np.float32).mean(axis=0)
        np.testing.assert_allclose(after.mean(axis=0), mean, rtol=1e-6)
    train, fresh = training("ring")
    with pytest.warns(jaxdp.checkpoint.CheckpointWarning, match="'residuals'"):
        restored(folder, train, fresh)


def test_gradients_in_flight_stay_with_their_design(checkpoint, tmp_path):
    folder, _, _ = checkpoint("late")
    other = jaxdp.ParameterServer(servers=2, max_staleness=1, policy="window")
    for design, devices in (("ring", 4), ("late", 2), ("servers", 4), (other, 4)):
        train, fresh = training(design, devices)
        with pytest.raises(ValueError, match=r"gradients in flight.*train\.flush"):
            restored(folder, train, fresh)
    train, fresh = training("late")
    state = train.flush(restored(folder, train, fresh).state)
    wanted = jax.tree.map(np.asarray, train.params(state))
    saved(tmp_path, train, state)
    assert not any("in_flight" in name for name in jaxdp.checkpoint.load(tmp_path))
    for design, devices in (("ring", 8), ("late", 2)):
        train, fresh = training(design, devices)
        back = restored(tmp_path, train, fresh).state
        assert_same(jax.tree.map(np.asarray, train.params(back)), wanted)
        run(train, back, [3])


def test_refused_pushes_are_counted_on(tmp_path):
    train, state = training("server")
    bad = {"x": np.full((24, 10), np.nan, np.float32), "y": np.zeros(24, np.float32)}
    bad["x"][:18] = 1  # the last of four workers
    state, _ = train.step(state, bad)
    saved(tmp_path, train, state)
    train, fresh = training("server")
    back = restored(tmp_path, train, fresh).state
    assert np.asarray(back.opt_state.refused).tolist() == [0, 0, 0, 1]


def test_servers_parts_come_from_the_longest_path(tmp_path):
    """A parameter `w` beside a `dense/w` of another shape."""
    values = {"w": np.arange(1, 8, dtype=np.float32), "dense": {"w": np.eye(3)}}
    values = jax.tree.map(np.float32, values)

    def sum_fn(params, batch):
        return sum((leaf * batch.mean()).sum() for leaf in jax.tree.leaves(params))

    train, _ = training("servers", 4, loss_fn=sum_fn)
    state, _ = train.step(train.init(values), np.ones(8, np.float32))
    saved(tmp_path, train, state)
    found = jaxdp.checkpoint.load(tmp_path)
    assert found["opt_state/0/mu/dense/w"].shape == (3, 3)
    assert found["opt_state/0/mu/w"].shape == (7,)
    np.testing.assert_allclose(found["opt_state/0/mu/w"], 0.1, rtol=1e-6)


def test_params_of_helpers_are_uneven():
    """Else no layout would need padding."""
    sizes = [leaf.size for leaf in jax.tree.leaves(params())]
    assert all(size % 8 for size in sizes)


def test_states_of_two_axes_are_joined(tmp_path):
    mesh = jax.make_mesh((4, 2), ("worker", "device"))
    design = jaxdp.ParameterServer(servers=2)
    train = jaxdp.data_parallel(loss_fn, optax.adam(0.01), mesh, design)
    state, _ = run(train, train.init(params()), NUMBERS)
    saved(tmp_path, train, state)
    wanted = jax.tree.map(np.asarray, train.params(state))
    _, losses = run(train, state, [3])
    ring, fresh = training("ring", 8)
    back = restored(tmp_path, ring, fresh).state
    assert_same(jax.tree.map(np.asarray, ring.params(back)), wanted)
    reference, _ = run(ring, ring.init(params()), NUMBERS)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-7),
        *(back.opt_state, reference.opt_state),
    )
    again = restored(tmp_path, train, train.init(params())).state
    assert run(train, again, [3])[1] == losses


def content(train, state):
    """What a checkpoint would keep, by name."""
    host = jax.tree.map(np.asarray, state)
    found = content_of(host, trainer_of(train, "test", "")).names()
    return {name: np.asarray(leaf) for name, leaf in found.items()}
