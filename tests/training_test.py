"""`data_parallel` refuses what it cannot train, and says what to do instead."""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.training import DataParallel, trainer_of
from tests import contract
from tests.contract import DESIGNS, over_designs, over_kinds

ROWS = np.array([1.0, 3.0], "f")


def loss_fn(w, x):
    return jnp.mean(w * x)


def make(
    loss_fn: Callable = loss_fn,
    optimizer: Any = None,
    mesh: Any = 2,
    design: Any = None,
    **options: Any,
) -> DataParallel:
    mesh = jaxdp.data_mesh(mesh) if isinstance(mesh, int) else mesh
    return jaxdp.data_parallel(
        loss_fn,
        optimizer or optax.adam(0.1),
        mesh,
        design or jaxdp.RingAllReduce(),
        **options,
    )


def explicit(shape=(4,), names=("data",)):
    """What `jax.make_mesh` gives: Explicit axes."""
    count = int(np.prod(shape))
    return jax.make_mesh(shape, names, devices=jax.devices()[:count])


@pytest.mark.parametrize(
    ("mesh", "options", "error", "message"),
    [
        pytest.param(
            explicit((2, 2), ("data", "model")),
            {},
            ValueError,
            r"mesh with axes \('data', 'model'\)\. It needs exactly one axis",
            id="two-axes",
        ),
        pytest.param(
            explicit(),
            {"axis_name": "batch"},
            ValueError,
            r"axes \('data',\).*exactly the axis 'batch' and no other.*data_mesh",
            id="other-axis",
        ),
        pytest.param(jax.devices()[:2], {}, TypeError, "mesh=.*Mesh", id="list"),
        pytest.param(None, {}, TypeError, "mesh=None.*data_mesh", id="none"),
    ],
)
def test_meshes_that_are_refused(mesh, options, error, message):
    with pytest.raises(error, match=f"data_parallel got .*{message}"):
        make(mesh=mesh, **options)


@pytest.mark.parametrize("root", [-1, 4])
def test_a_root_that_is_no_rank_is_refused(root):
    message = rf"root={root} on a mesh of 4 devices.*from 0 to 3"
    with pytest.raises(ValueError, match=message):
        make(mesh=4, design=jaxdp.GatherToRoot(root=root))


@pytest.mark.parametrize("cap", [0, -1.5, float("nan")])
def test_bucket_caps_that_hold_nothing_are_refused(cap):
    message = rf"bucket_cap_mb={cap}\. It must be larger than 0 MiB"
    with pytest.raises(ValueError, match=message):
        make(design=jaxdp.RingAllReduce(bucket_cap_mb=cap))


@pytest.mark.parametrize("design", [jaxdp.RingAllReduce, "ring"], ids=["class", "name"])
def test_designs_that_are_none_are_refused(design):
    with pytest.raises(TypeError, match=r"got design=.*RingAllReduce\(\)"):
        make(design=design)


def test_all_parameters_without_a_gradient_are_listed():
    params = {
        "bool": True,
        "float": np.float32(1),
        "half": jnp.bfloat16(1),
        "int": [np.zeros(3, np.int32), jnp.zeros(2)],
        "key": jax.random.key(0),
        "name": "dense",
        "names": np.array(["dense"]),
        "none": None,
        "python": 1.0,
    }
    message = (
        r"params\['bool'\] \(bool\), params\['int'\]\[0\] \(int32\), "
        r"params\['key'\] \(key<fry>\), params\['name'\] \(str\), "
        r"params\['names'\] \(<U5\), params\['python'\] \(float\)\. Every leaf must be "
        r"a floating or complex array.*model_state"
    )
    with pytest.raises(TypeError, match=message):
        make().init(params)


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        pytest.param(
            lambda w, x: w * x, ValueError, r"loss of shape \(1,\).*mean", id="vector"
        ),
        pytest.param(
            lambda w, x: x[0].astype(int), TypeError, "dtype int32", id="integer"
        ),
        pytest.param(
            lambda w, x: (w, {"a": w}), TypeError, "tuple as its loss", id="tuple"
        ),
        pytest.param(lambda w, x: None, TypeError, "NoneType as its", id="none"),
        pytest.param(
            lambda w, x: (w, jaxdp.Aux(metrics={"loss": w})),
            ValueError,
            "metric named 'loss'",
            id="metric-named-loss",
        ),
        pytest.param(
            lambda w, x: (w, jaxdp.Aux(model_state={"a": w})),
            ValueError,
            r"model_state, and train\.init got none",
            id="model-state",
        ),
    ],
)
@over_kinds
def test_losses_that_are_refused(design, loss, error, message):
    with pytest.raises(error, match=f"loss_fn returned .*{message}"):
        contract.one_step(design, loss, np.float32(1), ROWS)


@pytest.mark.parametrize("call", ["step", "lower", "params"])
@pytest.mark.parametrize(
    ("other", "error", "message"),
    [
        pytest.param(
            lambda: make(design=jaxdp.GatherToRoot(root=1)).init(np.float32(1)),
            ValueError,
            r"made by GatherToRoot\(root=1\), and this program uses RingAllReduce\(",
            id="other-design",
        ),
        pytest.param(
            lambda: make(design=jaxdp.RingAllReduce(1.5)).init(np.float32(1)),
            ValueError,
            r"RingAllReduce\(bucket_cap_mb=1\.5, .*\), and .*RingAllReduce\(.*=25\.0, ",
            id="other-options",
        ),
        pytest.param(
            lambda: make(mesh=4).init(np.float32(1)),
            ValueError,
            r"on devices \[0, 1, 2, 3\], and this program runs on \[0, 1\].*init",
            id="other-mesh",
        ),
        pytest.param(
            lambda: make(mesh=jaxdp.data_mesh(jax.devices()[1::-1])).init(
                np.float32(1)
            ),
            ValueError,
            r"on devices \[1, 0\], and this program runs on \[0, 1\], in this order",
            id="reversed-mesh",
        ),
        pytest.param(lambda: np.float32(1), TypeError, "type float32.*init", id="none"),
    ],
)
def test_states_of_other_programs_are_refused(call, other, error, message):
    train = make()
    arguments = (other(),) if call == "params" else (other(), ROWS)
    with pytest.raises(error, match=rf"train\.{call} got a state .*{message}"):
        getattr(train, call)(*arguments)


@over_kinds
def test_an_optimizer_state_of_other_parameters_is_refused(design):
    train = make(lambda p, x: jnp.mean(x) * sum(map(jnp.sum, p)), design=design(2))
    state, other = train.init([jnp.ones(3)]), train.init([jnp.ones(3), jnp.ones(4)])
    mixed = dataclasses.replace(state, opt_state=other.opt_state)
    counts = [len(jax.tree.leaves(s.opt_state)) for s in (other, state)]
    assert counts[0] == counts[1] + 2  # Adam's two moments of the second leaf
    message = rf"{counts[0]} leaves of .*this optimizer keeps {counts[1]} leaves of "
    with pytest.raises(ValueError, match=message):
        train.step(mixed, ROWS)


def test_a_state_serves_one_step_only():
    """jax 0.10 ends the process when a program is given deleted arrays."""
    train = make()
    state = train.init(np.float32(1))
    train.step(state, ROWS)
    for call in (train.step, train.lower):
        with pytest.raises(
            RuntimeError, match=r"deleted\. train\.step donates.*one step"
        ):
            call(state, ROWS)
    with pytest.raises(RuntimeError, match=r"train\.params got .*deleted"):
        train.params(state)


def test_batches_are_checked():
    train = make(mesh=4)
    state = train.init(np.float32(1))
    for call in (train.step, train.lower):
        with pytest.raises(ValueError, match="66 rows for 4 devices"):
            call(state, np.ones(66, "f"))


@over_designs
def test_reversed_meshes(design):
    """ER-1: rank r is the r-th device of the mesh, whatever its id."""
    mesh = jaxdp.data_mesh(jax.devices()[3::-1])
    train = make(
        lambda w, x: jnp.sum(w * x * 2.0 ** jax.lax.axis_index("data")),
        mesh=mesh,
        design=design(4),
    )
    state, metrics = train.step(
        train.init(np.float32(1)), np.array([1.0, 10.0, 100.0, 1000.0], "f")
    )
    assert metrics["loss"] == (1 + 20 + 400 + 8000) / 4
    if isinstance(state.design, jaxdp.GatherToRoot):
        (count, *_) = jax.tree.leaves(state.opt_state)
        on = {s.device.id: int(s.data[0]) for s in count.addressable_shards}
        assert on == {3 - rank: int(rank == state.design.root) for rank in range(4)}


@pytest.mark.parametrize(
    "context",
    [
        pytest.param(None, id="plain"),
        pytest.param(explicit(), id="set-mesh"),
        pytest.param(explicit((2, 2), ("a", "b")), id="set-other-mesh"),
        pytest.param(jaxdp.data_mesh(4), id="set-auto-mesh"),
    ],
)
@over_kinds
def test_meshes_of_make_mesh(design, context):
    """ER-1: their Explicit axes would make `shard_map` refuse plain arrays."""
    mesh = explicit()
    placed = jax.device_put(jnp.arange(4.0), jax.NamedSharding(mesh, jax.P("data")))
    weight = jax.device_put(jnp.float32(1), jax.NamedSharding(mesh, jax.P()))
    with jax.set_mesh(context) if context else contextlib.nullcontext():
        train = make(optimizer=optax.sgd(1.0), mesh=mesh, design=design(4))
        state, metrics = train.step(train.init(weight), placed)
        state, metrics = train.step(state, placed)
        params = train.params(state)
        assert "step" in train.lower(state, placed).as_text()
    assert (metrics["loss"], params) == (-0.75, -2)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param(lambda x: jax.device_put(x, jax.devices()[6]), id="one-device"),
        pytest.param(
            lambda x: jax.device_put(
                x, jax.NamedSharding(jaxdp.data_mesh(8), jax.P("data"))
            ),
            id="more-devices",
        ),
        pytest.param(
            lambda x: jax.device_put(
                x, jax.NamedSharding(jaxdp.data_mesh(jax.devices()[::-1]), jax.P())
            ),
            id="reversed",
        ),
        pytest.param(lambda x: x, id="host"),
    ],
)
def test_arrays_elsewhere_are_moved(place):
    """ER-1: parameters, model state, key and batch on other devices than the mesh."""
    values = np.arange(8.0, dtype="f")
    train = make(
        lambda w, x, model_state, rng: jnp.mean(x) * jnp.sum(w + 0 * model_state),
        optax.sgd(1.0),
        mesh=4,
    )
    key = jax.device_put(jax.random.key(0), jax.devices()[7])
    state = train.init(place(values), model_state=place(values), rng=key)
    state, metrics = train.step(state, place(values))
    assert metrics["loss"] == 3.5 * 28
    np.testing.assert_array_equal(train.params(state), values - 3.5)
    assert state.params.sharding.mesh == jaxdp.data_mesh(4)


@pytest.mark.parametrize("shardings", [False, True], ids=["plain", "with-shardings"])
@pytest.mark.parametrize("design", DESIGNS)
def test_lower_takes_abstract_arguments(design, shardings):
    train = make(lambda w, x, rng: jnp.mean(w * x), design=DESIGNS[design](2))
    state = train.init(np.float32(1), rng=jax.random.key(0))
    batch = jaxdp.shard_batch(ROWS, jaxdp.data_mesh(2))

    def abstract(leaf):
        sharding = leaf.sharding if shardings else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    lowered = train.lower(*jax.tree.map(abstract, (state, batch)))
    assert lowered.as_text() == train.lower(state, batch).as_text()
    report = jaxdp.analyze(lowered.compile())
    assert all(nbytes > 0 for nbytes in report.sent_bytes)


def test_steps_can_be_traced():
    """As the body of a scan over batches."""
    train = make(optimizer=optax.sgd(1.0))
    batches = np.array([[1.0, 3.0], [2.0, 6.0]], "f")
    state, metrics = jax.jit(lambda s, b: jax.lax.scan(train.step, s, b))(
        train.init(np.float32(10)), batches
    )
    assert metrics["loss"].tolist() == [20, 32]
    assert train.params(state) == 10 - 2 - 4


def test_init_does_not_keep_the_callers_arrays():
    params = {"w": np.ones(2, "f")}
    train = make(lambda p, x: jnp.mean(x) * jnp.sum(p["w"]), optax.sgd(1.0))
    state = train.init(params)
    params["w"][:] = 7
    np.testing.assert_array_equal(train.params(state)["w"], [1, 1])


@pytest.mark.parametrize("count", [1, 8])
def test_cpu_devices_that_share_threads_run_a_step_at_a_time(monkeypatch, count):
    """Many steps in flight end the process; one device may have them."""
    params = {"w": jnp.full((600, 600), 1e-3)}
    train = jaxdp.data_parallel(
        lambda params, x: jnp.mean((x @ params["w"] @ params["w"].T) ** 2),
        optax.sgd(1e-6),
        jaxdp.data_mesh(count),
    )
    trainer = trainer_of(train, "test", "")
    run_step, were_done = trainer.run_step, []

    def noted(state, batch):
        were_done.append(state.step.is_ready())
        return run_step(state, batch)

    x = jaxdp.shard_batch(np.ones((4800, 600), np.float32), trainer.mesh)
    state, _ = train.step(train.init(params), x)
    monkeypatch.setattr(trainer, "run_step", noted)
    for _ in range(4):
        state, metrics = train.step(state, x)
    assert all(were_done) == (count > 1)
    assert np.isfinite(metrics["loss"])
