"""A run that is restored goes on as if it had never stopped."""

import json
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.checkpoint import Checkpoints, CheckpointWarning, manager, restoring
from jaxdp.checkpoint.content import without_keys
from tests.checkpoint_helpers import (
    assert_same,
    batch,
    loss_fn,
    params,
    restored,
    run,
    saved,
    training,
)


def test_step_after_a_save_does_not_change_what_is_saved(tmp_path, monkeypatch):
    """The state is donated while its arrays are still to be written."""
    train, state = training()
    state, _ = run(train, state, [0])
    wanted = jax.tree.map(np.array, (state.params, state.opt_state))
    may_write = threading.Event()
    write = manager.arrays.write

    def late(*given):
        assert may_write.wait(60)
        return write(*given)

    monkeypatch.setattr(manager.arrays, "write", late)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(train, state)
        state, _ = run(train, state, [1, 2, 3])
        assert checkpoints.steps() == []
        may_write.set()
    back = restored(tmp_path, *training()).state
    assert_same(jax.tree.map(np.array, (back.params, back.opt_state)), wanted)
    again, _ = run(train, back, [1, 2, 3])
    assert_same(jax.tree.map(np.array, again), jax.tree.map(np.array, state))


def test_restored_state_does_not_share_what_was_read(tmp_path, monkeypatch):
    """Its arrays are donated, too; on CPUs they might lie in NumPy's memory."""
    train, state = training("ring", 1)
    state, _ = run(train, state, [0])
    saved(tmp_path, train, state)
    read, seen = restoring.arrays.read, {}

    def keep(*given):
        seen.update(read(*given))
        return seen.copy()

    monkeypatch.setattr(restoring.arrays, "read", keep)
    back = restored(tmp_path, *training("ring", 1)).state
    before = {name: leaf.copy() for name, leaf in seen.items()}
    run(train, back, [1, 2])
    assert_same(seen, before)


def dropout_fn(params, batch, rng, model_state):
    """Noise by key, and a state that counts and averages."""
    noise = jax.random.normal(rng, batch["x"].shape)
    loss = loss_fn(params, batch | {"x": batch["x"] + 0.1 * noise})
    mean = 0.9 * model_state["mean"] + 0.1 * batch["x"].mean(axis=0)
    new = {"mean": mean, "count": model_state["count"] + 1}
    return loss, jaxdp.Aux(model_state=new)


@pytest.mark.parametrize(
    "key", [jax.random.key(7), jax.random.PRNGKey(7), jax.random.key(7, impl="rbg")]
)
def test_everything_of_a_run_comes_back(tmp_path, key):  # CK-3
    """Overflows at steps 2 and 3, saved after 5, ten more steps."""

    def overflowing(params, batch, rng, model_state):
        loss, aux = dropout_fn(params, batch, rng, model_state)
        return loss * jnp.where(batch["bad"][0] > 0, jnp.inf, 1), aux

    train, _ = training(
        "ring",
        2,
        optax.chain(optax.add_noise(0.01, 0.5, key=3), optax.adam(0.01)),
        loss_fn=overflowing,
        precision=jaxdp.Precision(
            "fp16", loss_scale="dynamic", initial_scale=256, growth_interval=4
        ),
        model_state="mean",
    )
    model_state = {"mean": np.zeros(10, np.float32), "count": np.int32(0)}

    def first():
        return train.init(params(), rng=key, model_state=model_state)

    def go(state, numbers):
        told = []
        for number in numbers:
            bad = np.full(24, float(number in (2, 3)), np.float32)
            state, metrics = train.step(state, batch(number) | {"bad": bad})
            told.append([float(metrics[k]) for k in ("loss", "loss_scale", "skipped")])
        return state, told

    state, told = go(first(), range(6))
    assert [row[2] for row in told] == [0, 0, 1, 1, 0, 0]
    saved(tmp_path, train, state)
    whole, expected = go(state, range(6, 16))
    back = restored(tmp_path, train, first()).state
    assert float(back.loss_scale.scale) == 256 / 4
    assert int(back.loss_scale.good_steps) == 2
    assert int(back.loss_scale.skipped) == 2
    assert jax.tree.structure(back) == jax.tree.structure(first())
    again, told = go(back, range(6, 16))
    assert len({row[1] for row in told}) > 1  # it has grown
    np.testing.assert_equal(told, expected)
    assert_same(
        jax.tree.map(np.array, without_keys(again)),
        jax.tree.map(np.array, without_keys(whole)),
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.01)),
        optax.masked(optax.adam(0.01), {"dense": True, "s": False, "w": True}),
        optax.MultiSteps(optax.adam(0.01), 3).gradient_transformation(),
        optax.sgd(0.01),
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 9)),
    ],
    ids=["chain", "masked", "multisteps", "stateless", "schedule"],
)
def test_types_of_the_optimizer_state_come_back(tmp_path, optimizer):  # CK-5
    train, state = training("ring", 2, optimizer)
    state, _ = run(train, state, [0, 1])
    saved(tmp_path, train, state)
    after, losses = run(train, state, [2, 3])
    back = restored(tmp_path, *training("ring", 2, optimizer)).state
    assert jax.tree.structure(back) == jax.tree.structure(after)
    again, same = run(train, back, [2, 3])
    assert same == losses
    assert_same(jax.tree.map(np.array, again), jax.tree.map(np.array, after))


def test_accumulation_that_is_not_complete_is_kept(tmp_path):  # ST-6
    """Gradients 1 to 6, applied four at a time: two are pending with mean 5.5."""
    optimizer = optax.MultiSteps(optax.sgd(1.0), 4).gradient_transformation()

    def line(params, batch):
        return params * batch.mean()

    train = jaxdp.data_parallel(line, optimizer, jaxdp.data_mesh(2))
    state = train.init(np.float32(0))
    for gradient in range(1, 7):
        state, _ = train.step(state, np.full(4, gradient, np.float32))
    saved(tmp_path, train, state)
    back = restored(tmp_path, train, train.init(np.float32(0))).state
    assert float(train.params(back)) == -2.5
    assert int(back.opt_state.mini_step) == 2
    assert float(back.opt_state.acc_grads) == 5.5
    for gradient in (7, 8):
        back, _ = train.step(back, np.full(4, gradient, np.float32))
    assert float(train.params(back)) == -2.5 - 6.5


def test_one_array_under_two_names_is_two_leaves(tmp_path):  # CK-6, ST-4
    """As it is after `init`: each gets its own part of the gradient, 2 and 3."""
    shared = jnp.ones(5)

    def two(params, batch):
        return (params["a"] * 2 + params["b"] * 3).mean() * batch.mean()

    train = jaxdp.data_parallel(two, optax.sgd(1.0), jaxdp.data_mesh(2))
    state = train.init({"a": shared, "b": shared})
    saved(tmp_path, train, state)
    back = restored(tmp_path, train, train.init({"a": shared, "b": shared})).state
    for each in (state, back):
        each, _ = train.step(each, np.ones(4, np.float32))
        np.testing.assert_allclose(each.params["a"], 1 - 2 / 5, rtol=1e-6)
        np.testing.assert_allclose(each.params["b"], 1 - 3 / 5, rtol=1e-6)
    assert not shared.is_deleted()

    def once(params, batch):  # one leaf, used twice
        return (params * 2 + params * 3).sum() * batch.mean()

    train = jaxdp.data_parallel(once, optax.sgd(1.0), jaxdp.data_mesh(2))
    saved(tmp_path / "once", train, train.init(np.ones(1, np.float32)))
    state = train.init(np.ones(1, np.float32))
    back = restored(tmp_path / "once", train, state).state
    back, _ = train.step(back, np.ones(4, np.float32))
    assert np.asarray(back.params).tolist() == [-4.0]  # 1 - 5


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("stop", [3, 5, 7])
def test_data_goes_on_where_it_was(tmp_path, devices, stop):  # DA-3
    """20 samples in batches of 4, 2 epochs; 5 is the boundary."""

    def first(params, batch, mask):
        return jaxdp.masked_mean(params * batch["id"], mask)

    train = jaxdp.data_parallel(first, optax.sgd(0.1), jaxdp.data_mesh(devices))
    data = {"id": np.arange(20, dtype=np.float32)}

    def samples(sampler, state, steps, checkpoints=None):
        seen = []
        while len(seen) < steps:
            for rows in jaxdp.epoch_batches(data, sampler, jaxdp.data_mesh(devices)):
                seen.append(np.asarray(rows.batch["id"]).tolist())
                state, _ = train.step(state, rows)
                if checkpoints and len(seen) == stop:
                    checkpoints.save(train, state, data=sampler.state())
                if len(seen) == steps:
                    break
        return seen

    with Checkpoints(tmp_path) as checkpoints:
        sampler = jaxdp.Sampler(20, 4, seed=5)
        whole = samples(sampler, train.init(np.float32(1)), 10, checkpoints)
    back = restored(tmp_path, train, train.init(np.float32(1)))
    sampler = jaxdp.Sampler(20, 4, seed=5)
    sampler.restore(back.data)
    assert samples(sampler, back.state, 10 - stop) == whole[stop:]


@pytest.mark.parametrize("here", [2, 4])
def test_model_states_of_replicas(tmp_path, here):
    """Copies on as many devices; on others all start from the first one's."""

    def stateful(params, batch, model_state):
        return loss_fn(params, batch), jaxdp.Aux(
            model_state=model_state + batch["x"].mean()
        )

    def make(devices, policy):
        train, _ = training("ring", devices, loss_fn=stateful, model_state=policy)
        return train, train.init(params(), model_state=np.float32(0))

    train, state = make(4, "per_replica")
    state, _ = run(train, state, [0])
    own = np.asarray(state.model_state)
    assert len(set(own.tolist())) == 4
    saved(tmp_path, train, state)
    back = restored(tmp_path, *make(here, "per_replica")).state
    wanted = own if here == 4 else [own[0]] * here
    np.testing.assert_array_equal(back.model_state, wanted)
    back = restored(tmp_path, *make(here, "mean")).state
    assert float(back.model_state) == own[0]


def test_odd_leaves_come_back(tmp_path):
    """Empty, complex, 16-bit, and names that are paths themselves."""
    tree = {
        "a/b": np.asarray([1, -0.0, np.inf], np.float32),
        "a": {"b": np.asarray([2], np.float32), "": np.zeros((0, 3), np.float32)},
        "c.d e": jnp.asarray([1.5, -2], jnp.bfloat16),
        "ü": np.asarray([1 + 2j], np.complex64),
        "f": np.float16(3),
        "t": (np.asarray([[4, 5]], np.float32), [np.float32(6)]),
    }

    def nothing(params, batch):
        return batch.mean() * sum(jnp.real(x).sum() for x in jax.tree.leaves(params))

    train = jaxdp.data_parallel(nothing, optax.sgd(0.0), jaxdp.data_mesh(2))
    saved(tmp_path, train, train.init(tree))
    zeros = jax.tree.map(np.zeros_like, tree)
    back = restored(tmp_path, train, train.init(zeros)).state
    assert_same(jax.tree.map(np.asarray, back.params), jax.tree.map(np.asarray, tree))


def test_newest_is_taken_and_some_are_kept(tmp_path):
    train, state = training("ring", 2)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        for number in range(4):
            state, _ = run(train, state, [number])
            checkpoints.save(train, state, data={"at": number}, metadata=[number, "x"])
    assert checkpoints.steps() == [3, 4]
    back = restored(tmp_path, *training("ring", 2))
    assert (int(back.state.step), back.data, back.metadata) == (4, {"at": 3}, [3, "x"])
    back = restored(tmp_path, *training("ring", 2), step=3)
    assert (int(back.state.step), back.data) == (3, {"at": 2})
    with pytest.raises(FileNotFoundError, match=r"step=7.*\[3, 4\]"):
        restored(tmp_path, *training("ring", 2), step=7)
    with Checkpoints(tmp_path, keep=1) as checkpoints:  # an older one, saved last
        checkpoints.save(train, back.state)
    assert checkpoints.steps() == [3, 4]
    with pytest.raises(ValueError, match=r"keep=0.*at least 1"):
        Checkpoints(tmp_path, keep=0)


def test_nothing_saved_is_nothing_restored(tmp_path):
    assert Checkpoints(tmp_path / "new").restore(*training("ring", 2)) is None


def test_a_step_is_saved_again_under_its_number(tmp_path):
    train, state = training("ring", 2)
    saved(tmp_path, train, state, data="first")
    saved(tmp_path, train, state, data="second")
    assert [path.name for path in tmp_path.iterdir()] == ["00000000-2"]
    assert restored(tmp_path, train, state).data == "second"


def test_save_returns_before_the_disk_is_done(tmp_path, monkeypatch):
    train, state = training("ring", 2)
    state, _ = run(train, state, [0])
    write = manager.arrays.write

    def slow(*given):
        time.sleep(1.0)
        return write(*given)

    monkeypatch.setattr(manager.arrays, "write", slow)
    start_s = time.monotonic()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(train, state)
        assert time.monotonic() - start_s < 0.5
        assert checkpoints.steps() == []
    assert time.monotonic() - start_s >= 1.0
    assert checkpoints.steps() == [1]


def test_manifest_tells_what_it_is(tmp_path):
    train, state = training("ring", 2)
    saved(tmp_path, train, state, data={"epoch": 2})
    facts = json.loads((tmp_path / "00000000" / "manifest.json").read_text())
    assert facts["design"].startswith("RingAllReduce(")
    assert (facts["devices"], facts["mesh"], facts["data"]) == (
        2,
        {"data": 2},
        {"epoch": 2},
    )
    assert facts["versions"]["jax"] == jax.__version__
    assert facts["arrays"]["params/dense/k"]["shape"] == [3, 4]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (np.ones(2), r"JSON cannot say: .*ndarray.*tolist"),
        ((1, 2), r"data=\(1, 2\).*give back as \[1, 2\].*lists instead of tuples"),
        ({1: 2}, r"texts as the keys"),
    ],
    ids=["array", "tuple", "number_as_key"],
)
def test_data_must_come_back_as_it_was(tmp_path, data, said):
    train, state = training("ring", 2)
    with pytest.raises(TypeError, match=said):
        Checkpoints(tmp_path).save(train, state, data=data)


def test_states_that_are_none(tmp_path):
    train, state = training("ring", 2)
    checkpoints = Checkpoints(tmp_path)
    not_a_state: Any = {"params": 1}
    with pytest.raises(TypeError, match=r"save got train=function.*data_parallel"):
        checkpoints.save(lambda: None, state)
    with pytest.raises(TypeError, match=r"save got a state of type dict.*train\.init"):
        checkpoints.save(train, not_a_state)
    other, _ = training("root", 2)
    with pytest.raises(ValueError, match=r"restore.*RingAllReduce.*GatherToRoot"):
        checkpoints.restore(other, state)
    _, elsewhere = training("ring", 4)
    with pytest.raises(ValueError, match=r"save got a state on devices \[0, 1, 2, 3\]"):
        checkpoints.save(train, elsewhere)
    run(train, state, [0])
    with pytest.raises(RuntimeError, match=r"save got a state whose arrays.*donates"):
        checkpoints.save(train, state)
    assert not tmp_path.joinpath("00000000").exists()


def test_leaving_by_an_error_keeps_the_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    train, state = training("ring", 2)
    with pytest.warns(CheckpointWarning, match="could not save step 0"):
        with pytest.raises(KeyError, match="mine"):
            with Checkpoints(tmp_path / "file" / "in") as checkpoints:
                checkpoints.save(train, state)
                raise KeyError("mine")
