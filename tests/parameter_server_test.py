"""ParameterServer: who works, who serves, what is refused, and what travels."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp import aggregation
from tests import contract
from tests.contract import BATCHES, PARAMS
from tests.helpers import assert_bit_equal, assert_replicas_bit_equal

BOUND = 2e-6  # as in tests/designs_test.py
Server = jaxdp.ParameterServer


def train_with(design, mesh, optimizer=None, loss_fn=contract.loss_fn, **options):
    mesh = jaxdp.data_mesh(mesh) if isinstance(mesh, int) else mesh
    optimizer = optimizer or optax.adam(0.01)
    return jaxdp.data_parallel(loss_fn, optimizer, mesh, design, **options)


@functools.cache
def reference():
    return contract.on_one_device(
        contract.loss_fn, optax.adam(0.01), PARAMS, BATCHES[:3]
    )


def grid(workers, devices):
    return jax.make_mesh((workers, devices), ("worker", "device"))


@pytest.mark.parametrize(
    ("design", "mesh"),
    [
        pytest.param(Server(dedicated=True), (4,), id="dedicated"),
        pytest.param(Server(servers=2, dedicated=True), (5,), id="two-dedicated"),
        pytest.param(Server(servers=3, dedicated=True), (5,), id="more-than-workers"),
        pytest.param(
            Server(servers=2, dedicated=True, update_on="worker"), (4,), id="ded-worker"
        ),
        pytest.param(Server(), (4, 2), id="workers-of-two"),
        pytest.param(Server(servers=2), (2, 4), id="two-servers-of-four"),
        pytest.param(Server(servers=2, update_on="worker"), (2, 2), id="worker-of-two"),
        pytest.param(Server(dedicated=True), (4, 2), id="dedicated-of-two"),
    ],
)
def test_equals_one_device(design, mesh):
    mesh = jaxdp.data_mesh(*mesh) if len(mesh) == 1 else grid(*mesh)
    train = train_with(design, mesh)
    state = train.init(PARAMS)
    for batch, expected, loss in zip(BATCHES, *reference(), strict=False):
        state, metrics = train.step(state, batch)
        chex.assert_trees_all_close(state.params, expected, rtol=0, atol=BOUND)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=0, atol=BOUND)
        assert_replicas_bit_equal((state.params, metrics))


def test_one_server_is_bit_identical_to_gather_to_root():
    histories = []
    for design in (jaxdp.GatherToRoot(), Server(), Server(policy="window")):
        train = train_with(design, 8)
        state = train.init(PARAMS)
        for batch in BATCHES[:4]:
            state, metrics = train.step(state, batch)
        histories.append((train.params(state), metrics["loss"]))
    assert_bit_equal(histories[0], histories[1])
    assert_bit_equal(histories[0], histories[2])


def test_averages_before_the_optimizer():
    """PS-5: gradients 1 and 3, rate 0.1, momentum 0.9; one by one gives -0.49."""
    for servers in (1, 2):
        train = train_with(
            Server(servers=servers),
            2,
            optax.sgd(0.1, momentum=0.9),
            lambda w, x: jnp.mean(w * x),
        )
        state, _ = train.step(train.init(np.float32(0)), np.array([1, 3], "f"))
        np.testing.assert_allclose(state.params, -0.2, rtol=1e-6)
        momentum = jax.tree.leaves(state.opt_state.opt_state)[0]
        np.testing.assert_allclose(momentum[0], 2, rtol=1e-6)


@pytest.mark.parametrize("servers", [1, 2])
def test_dedicated_servers_compute_nothing(servers):
    """A server that ran the loss would meet its blank rows: 0 / 0 is a NaN."""
    seen = []

    def loss_fn(w, x):
        jax.debug.callback(lambda rows: seen.append(rows.tolist()), x)
        return jnp.mean(w * x / x)

    train = train_with(Server(servers, dedicated=True), 4, optax.sgd(1.0), loss_fn)
    rows = np.arange(1.0, 13.0, dtype="f")
    state, metrics = train.step(train.init(np.float32(3)), rows)
    jax.block_until_ready(state)
    jax.effects_barrier()
    workers = 4 - servers
    assert sorted(seen) == [part.tolist() for part in np.split(rows, workers)]
    assert (state.params, metrics["loss"]) == (2, 3)
    assert metrics["refused_pushes"].tolist() == [0] * workers


def test_lower_takes_the_rows_of_the_workers():
    train = train_with(Server(dedicated=True), 4)
    state = train.init(PARAMS)
    batch = jax.tree.map(lambda x: x[:6], BATCHES[0])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    texts = [train.lower(state, given).as_text() for given in (batch, shapes)]
    assert texts[0] == texts[1]
    assert "tensor<8x5xf32>" in texts[0]  # two rows a device, the server's blank


def test_padded_batches_of_dedicated_servers():
    """Seven rows for three workers: 3, 3 and 1."""
    mesh, design = jaxdp.data_mesh(4), Server(dedicated=True)

    def loss_fn(w, x, mask):
        return jaxdp.masked_mean(w * x, mask)

    train = train_with(design, mesh, optax.sgd(1.0), loss_fn)
    rows = np.array([1, 2, 3, 4, 5, 6, 49], "f")
    batch = jaxdp.shard_batch(rows, mesh, remainder="pad", design=design)
    assert [d.id for d in batch.batch.sharding.mesh.devices] == [1, 2, 3]
    assert batch.mask.tolist() == [True] * 7 + [False] * 2
    state, metrics = train.step(train.init(np.float32(2)), batch)
    np.testing.assert_allclose(state.params, 2 - 10, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 20, rtol=1e-6)


def test_counters_of_a_model_state_reach_dedicated_servers():
    def loss_fn(w, x, model_state):
        state = {"count": model_state["count"] + 1, "mean": jnp.mean(x)}
        return jnp.mean(w * x), jaxdp.Aux({"top": jnp.max(x)}, state)

    design = Server(2, dedicated=True)
    train = train_with(design, 4, optax.sgd(1.0), loss_fn, model_state="mean")
    given = {"count": jnp.int32(4), "mean": jnp.float32(0)}
    state = train.init(np.float32(0), model_state=given)
    for _ in range(2):
        state, metrics = train.step(state, np.array([1, 3, 7, 9], "f"))
    assert_replicas_bit_equal((state.model_state, state.params, metrics))
    assert int(state.model_state["count"]) == 6
    assert (float(state.model_state["mean"]), float(metrics["top"])) == (5, 6)


def test_a_loss_that_waits_for_dedicated_servers_is_refused():
    """They compute none: the program would hang."""

    def loss_fn(w, x):
        return jnp.mean(w * (x - jax.lax.pmax(jax.lax.stop_gradient(x), "data")))

    train = train_with(Server(dedicated=True), 4, optax.sgd(1.0), loss_fn)
    with pytest.raises(ValueError, match=r"over axis 'data'.*first 1 rank.*only serve"):
        train.step(train.init(np.float32(1)), np.ones(3, "f"))


# Non-finite pushes.

ROWS = np.array([1.0, 2.0, np.nan, 4.0], "f")  # worker 2 of 4 pushes a NaN


def poisoned(w, x, model_state=None):
    loss = jnp.mean(w * x)
    if model_state is None:
        return loss
    return loss, jaxdp.Aux(model_state=jnp.mean(x))


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("update_on", ["server", "worker"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_push_that_is_not_finite_is_refused(update_on, max_staleness, bad):
    design = Server(2, update_on=update_on, max_staleness=max_staleness)
    train = train_with(design, 4, optax.sgd(1.0), poisoned)
    state = train.init(np.float32(3))
    rows = np.where(np.isnan(ROWS), np.float32(bad), ROWS)
    state, metrics = train.step(state, rows)
    assert metrics["refused_pushes"].tolist() == [0, 0, 1, 0]
    np.testing.assert_allclose(metrics["loss"], 7, rtol=1e-6)  # 3 * (1 + 2 + 4) / 3
    state, metrics = train.step(state, np.array([bad, 1, bad, 8], "f"))
    assert metrics["refused_pushes"].tolist() == [1, 0, 1, 0]
    state = train.flush(state)
    assert state.opt_state.refused.tolist() == [1, 0, 2, 0]
    np.testing.assert_allclose(state.params, 3 - 7 / 3 - 9 / 2, rtol=1e-6)


@pytest.mark.parametrize("max_staleness", [0, 1])
@pytest.mark.parametrize("update_on", ["server", "worker"])
def test_a_step_in_which_all_are_refused_changes_nothing(update_on, max_staleness):
    design = Server(update_on=update_on, max_staleness=max_staleness)
    train = train_with(design, 2, optax.adam(0.1), poisoned, model_state="mean")
    state = train.init(np.float32(3), model_state=np.float32(0.5))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state.opt_state))
    state, metrics = train.step(state, np.array([np.nan, np.nan], "f"))
    state = train.flush(state)
    assert_bit_equal((state.params, state.opt_state.opt_state), before)
    assert float(state.model_state) == 0.5
    assert metrics["refused_pushes"].tolist() == [1, 1]
    assert np.isnan(metrics["loss"])


def test_one_bad_device_refuses_the_push_of_its_worker():
    train = train_with(Server(), grid(3, 2), optax.sgd(1.0), poisoned)
    rows = np.array([1, 3, 5, np.nan, 2, 6], "f")  # worker 1 has rows 2 and 3
    state, metrics = train.step(train.init(np.float32(0)), rows)
    assert metrics["refused_pushes"].tolist() == [0, 1, 0]
    np.testing.assert_allclose(state.params, -(1 + 3 + 2 + 6) / 4, rtol=1e-6)


# Aggregates.

GRADIENTS = np.array([[1, -2, 0], [4, 40, 3], [-9, 6, 5], [2, 3, 90]], "f")  # [W, 3]


def clipped(gradients, max_norm):
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return (gradients / np.maximum(norms / max_norm, 1)).mean(0)


@pytest.mark.parametrize(
    ("aggregate", "expected", "servers"),
    [
        (aggregation.median, np.median(GRADIENTS, 0), 3),
        (aggregation.median, np.median(GRADIENTS, 0), 1),
        (aggregation.trimmed_mean(1), np.sort(GRADIENTS, 0)[1:3].mean(0), 2),
        (aggregation.trimmed_mean(0), GRADIENTS.mean(0), 2),
        (aggregation.clipped_mean(5.0), clipped(GRADIENTS, 5.0), 1),
    ],
    ids=["median-3", "median-1", "trimmed", "untrimmed", "clipped"],
)
@pytest.mark.parametrize("update_on", ["server", "worker"])
def test_an_aggregate_sees_all_workers(aggregate, expected, servers, update_on):
    design = Server(servers, update_on=update_on, aggregate=aggregate)
    new, metrics = contract.one_step(
        design, lambda w, x: jnp.sum(w * x[0]), np.zeros(3, "f"), GRADIENTS, devices=4
    )
    np.testing.assert_allclose(-np.asarray(new), expected, rtol=1e-6)
    assert metrics["loss"] == 0


def test_an_aggregate_sees_each_workers_own_mean():
    """Weights 1 and 3: workers' means are 2 and 5, whatever their weights."""
    seen = []

    def aggregate(gradients):
        jax.debug.callback(lambda g: seen.append(g.tolist()), gradients)
        return gradients[1]

    def loss_fn(w, x):
        return jaxdp.Mean(jnp.sum(w * x[0, 0] * x[0, 1]), x[0, 1])

    rows = np.array([[2, 1], [5, 3]], "f")  # value, weight
    new, _ = contract.one_step(
        Server(aggregate=aggregate), loss_fn, np.float32(0), rows
    )
    jax.effects_barrier()
    np.testing.assert_allclose(new, -5, rtol=1e-6)
    assert [2.0, 5.0] in seen


def test_an_aggregate_sees_the_mean_over_all_devices_of_a_worker():
    """Worker 1: values 5 and 8 of weights 3 and 1, so (15 + 8) / 4."""

    def loss_fn(w, x):
        return jaxdp.Mean(w * x[0, 0] * x[0, 1], x[0, 1])

    rows = np.array([[2, 1], [9, 9], [5, 3], [8, 1]], "f")  # value, weight
    design = Server(aggregate=lambda gradients: gradients[1])
    train = train_with(design, grid(2, 2), optax.sgd(1.0), loss_fn)
    state, _ = train.step(train.init(np.float32(0)), rows)
    np.testing.assert_allclose(state.params, -23 / 4, rtol=1e-6)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=["ranks", "grid"])
def test_each_server_starts_from_its_own_part(mesh):
    """The optimizer goes back to where its parameters started, minus the gradient."""
    start = np.arange(1.0, 9.0, dtype="f")

    def update(updates, state, params=None):
        return jax.tree.map(lambda u, s, p: s - p - u, updates, state, params), state

    optimizer = optax.GradientTransformation(lambda params: params, update)
    mesh = jaxdp.data_mesh(*mesh) if len(mesh) == 1 else grid(*mesh)
    loss_fn = lambda w, x: jnp.mean(x) * jnp.sum(w)  # noqa: E731
    train = train_with(Server(2), mesh, optimizer, loss_fn)
    state = train.init(start)
    for value in (3, 5):
        state, _ = train.step(state, np.full(mesh.size, value, "f"))
    np.testing.assert_array_equal(state.params, start - 5)


def test_a_refused_push_is_a_row_of_zeros_for_an_aggregate():
    aggregate = aggregation.trimmed_mean(0)
    new, metrics = contract.one_step(
        Server(aggregate=aggregate), poisoned, np.float32(0), ROWS, devices=4
    )
    np.testing.assert_allclose(new, -(1 + 2 + 0 + 4) / 4, rtol=1e-6)
    assert metrics["refused_pushes"].tolist() == [0, 0, 1, 0]


def test_aggregates_keep_dtypes():
    params = {"f16": np.zeros(3, np.float16), "bf16": jnp.zeros(2, jnp.bfloat16)}

    def loss_fn(params, x):
        total = sum(jnp.sum(leaf.astype("f")) for leaf in params.values())
        return total * jnp.mean(x)

    for aggregate in (aggregation.median, aggregation.trimmed_mean(1)):
        new, _ = contract.one_step(
            Server(2, aggregate=aggregate),
            loss_fn,
            params,
            np.array([1, 2, 6], "f"),
            devices=3,
        )
        expected = jax.tree.map(lambda leaf: jnp.full_like(leaf, -2), params)
        assert_bit_equal(new, expected)


# Bad input.


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({"servers": 5}, 4, r"servers=5 .*on 4 ranks.*from 1 to 4 servers"),
        ({"servers": 0}, 4, r"servers=0 .*from 1 to 4"),
        (
            {"servers": 4, "dedicated": True},
            4,
            r"4 - 4 = 0 would be left to work.*from 1 to 3 servers",
        ),
        ({"dedicated": True}, 1, r"1 - 1 = 0 would be left"),
        ({"max_staleness": -1}, 4, r"max_staleness=-1.*at least 0"),
        ({"max_staleness": 1.5}, 4, r"max_staleness=1\.5.*number of updates"),
        ({"max_staleness": float("inf")}, 4, r"=inf.*jaxdp\.asynchronous"),
        ({"update_on": "both"}, 4, r"update_on='both'.*'server' or 'worker'"),
        ({"policy": "fifo"}, 4, r"policy='fifo'.*'sliding' or 'window'"),
        ({"aggregate": "mean"}, 4, r"aggregate='mean'.*'sum' or a function"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, devices, message):
    with pytest.raises(ValueError, match=message):
        train_with(Server(**options), devices)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        (
            lambda tree: tree,
            r"float32\[3, 2\].*gradients of 3 workers.*\['a'\] float32\[2",
        ),
        (lambda tree: tree["a"].mean(0), r"makes one array float32\[2\]"),
        (lambda tree: {"a": tree["a"].sum()}, r"makes \['a'\] float32\[\]"),
        (
            lambda tree: {"a": tree["a"].mean(0).astype(jnp.float16)},
            r"makes \['a'\] float16\[2\]",
        ),
    ],
    ids=["all-workers", "structure", "shape", "dtype"],
)
def test_aggregates_that_change_the_tree_are_refused(aggregate, message):
    train = train_with(Server(aggregate=aggregate), 3)
    with pytest.raises(ValueError, match=message):
        train.init({"a": np.zeros(2, "f")})


def test_what_cannot_run_on_parts_is_refused():
    clip = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    message = r"optimizer on 2 parts \(2 servers.*depends on others.*update_on='worker'"
    with pytest.raises(ValueError, match=message):
        train_with(Server(2), 4, clip).init(PARAMS)
    with pytest.raises(ValueError, match=r"on 3 parts \(1 servers, each of 3 devices"):
        train_with(Server(), grid(2, 3), clip).init(PARAMS)
    design = Server(2, aggregate=aggregation.clipped_mean(1.0))
    with pytest.raises(
        ValueError, match=r"its aggregate on 2 parts.*depends on others"
    ):
        train_with(design, 4).init(PARAMS)
    for design in (Server(), Server(2, update_on="worker")):
        train_with(design, 4, clip).init(PARAMS)


def test_aggregation_checks_its_numbers():
    with pytest.raises(ValueError, match=r"trim=-1.*at least 0"):
        aggregation.trimmed_mean(-1)
    with pytest.raises(ValueError, match=r"of 4 workers.*2 x 2 = 4.*at most 1"):
        aggregation.trimmed_mean(2)(np.zeros((4, 1), "f"))
    with pytest.raises(ValueError, match=r"max_norm=0.*above 0"):
        aggregation.clipped_mean(0.0)


def test_a_mesh_of_two_axes_is_for_servers_only():
    with pytest.raises(ValueError, match=r"axes \('worker', 'device'\).*one axis"):
        train_with(jaxdp.RingAllReduce(), grid(2, 2))
    with pytest.raises(ValueError, match=r"exactly 1 to 2 axes"):
        mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"))
        train_with(Server(), mesh)
