"""Buckets and their overlap with the backward pass, in the compiled program."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.program.dependence import dependence
from tests import contract
from tests.contract import BATCHES, PARAMS

DEVICES = 4
WIDTH = 16
LAYER = WIDTH * WIDTH * 4 / 2**20  # MiB: one bucket per layer
# Names that sort in another order than that of use.
ORDER = ("head", "b", "d", "a", "c")
LAYERS = {name: contract.waves(WIDTH, WIDTH, start=ord(name[0])) for name in ORDER}
ROWS = contract.waves(4 * DEVICES, WIDTH, start=0.4)


def loss_fn(params, x, wrap=lambda f: f):
    layer = wrap(lambda w, x: jnp.tanh(x @ w))
    for name in ORDER[::-1]:  # c, a, d, b, head
        x = layer(params[name], x)
    return jnp.mean(x**2)


RING = functools.partial(jaxdp.RingAllReduce, LAYER, first_bucket_mb=None)
NATIVE = functools.partial(jaxdp.NativeAllReduce, LAYER, first_bucket_mb=None)


@functools.cache
def compiled(design, loss_fn=loss_fn):
    train = jaxdp.data_parallel(
        loss_fn, optax.sgd(0.1), jaxdp.data_mesh(DEVICES), design
    )
    state = train.init(LAYERS)
    return train.lower(state, ROWS).compile(), train.buckets(state, ROWS)


def names(buckets):
    return [bucket.names for bucket in buckets]


@pytest.mark.parametrize("design", [RING(), NATIVE()], ids=["ring", "native"])
def test_the_program_has_one_collective_per_bucket(design):
    program, buckets = compiled(design)
    expected = [("loss.total",)] + [(f"params['{name}']",) for name in ORDER]
    assert names(buckets) == expected
    rounds = 2 * (DEVICES - 1) if design == RING() else 1
    report = jaxdp.analyze(program)
    assert len(report.collectives) == rounds * len(buckets)
    layers = 5 * 1.5 * WIDTH * WIDTH * 4  # 2 (N - 1) / N = 1.5
    loss = 2 * (DEVICES - 1) * 4  # one element in chunks of one
    assert report.sent_bytes == (layers + loss,) * DEVICES


def test_native_without_a_cap_is_merged_by_xla():
    """AN-3: the bytes stay, the buckets do not; and so no bucket overlaps anything."""
    program, buckets = compiled(jaxdp.NativeAllReduce())
    assert len(buckets) == 6
    assert len(jaxdp.analyze(program).collectives) == 1
    apart = jaxdp.analyze(compiled(NATIVE())[0])
    assert jaxdp.analyze(program).sent_bytes == apart.sent_bytes


def waits(design, loss_fn=loss_fn):
    """For each collective, how many of the matrix products it waits for."""
    found = dependence(compiled(design, loss_fn)[0])
    after = found.collectives_after_matmuls()
    counts = [len(after.get(name, ())) for name in found.collectives]
    return sorted(counts), len(found.matmuls)


ALONE = functools.partial(RING, in_flight=None)


@pytest.mark.parametrize(
    ("make", "each"), [(ALONE, 2 * (DEVICES - 1)), (NATIVE, 1)], ids=["ring", "native"]
)
@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"]
)
def test_a_bucket_waits_for_its_own_gradients_only(make, each, wrap):
    """5 products forward; layer i from the end needs i more of dx and one of dw."""
    counts, total = waits(make(), functools.partial(loss_fn, wrap=wrap))
    if wrap is jax.checkpoint:  # computes the forward pass of a layer once more
        assert len(set(counts)) == 6
        assert sum(count < total for count in counts) >= 5 * each
    else:
        assert total == 5 + 9
        assert counts == sorted([5, 6, 7, 8, 9, 10] * each)


@pytest.mark.parametrize(
    ("in_flight", "expected"), [(1, [5, 6, 8, 10, 12, 14]), (2, [5, 6, 7, 9, 10, 12])]
)
def test_a_bucket_that_takes_turns_waits_for_what_those_before_it_need(
    in_flight, expected
):
    """They need no more dx than it does, but the dw of their own layers."""
    counts, _ = waits(RING(in_flight=in_flight))
    assert counts == sorted(expected * 2 * (DEVICES - 1))


@pytest.mark.parametrize("make", [RING, NATIVE], ids=["ring", "native"])
def test_without_overlap_all_buckets_wait_for_the_backward_pass(make):
    counts, total = waits(make(overlap=False))
    assert set(counts) == {total}


@pytest.mark.parametrize(
    "make",
    [jaxdp.RingAllReduce, jaxdp.NativeAllReduce],
    ids=["ring", "native"],
)
def test_buckets_and_overlap_change_no_numbers(make):
    """With two replicas there is one way to add; XLA fuses what is around it."""
    results = []
    for cap, overlap in ((None, True), (64 / 2**20, True), (64 / 2**20, False)):
        design = make(bucket_cap_mb=cap, first_bucket_mb=None, overlap=overlap)
        mesh = jaxdp.data_mesh(2)
        train = jaxdp.data_parallel(contract.loss_fn, optax.sgd(0.1), mesh, design)
        state = train.init(PARAMS)
        for batch in BATCHES[:3]:
            state, _ = train.step(state, batch)
        results.append(train.params(state))
    for other in results[1:]:
        chex.assert_trees_all_close(other, results[0], rtol=0, atol=5e-7)


def test_25_mb_buckets_compile_once():
    train = jaxdp.data_parallel(
        contract.loss_fn, optax.adam(0.1), jaxdp.data_mesh(2), jaxdp.RingAllReduce(25.0)
    )
    state = train.init(PARAMS)
    for batch in BATCHES[:3]:
        state, _ = train.step(state, batch)
    assert jitted(train)._cache_size() == 1


def jitted(train):
    """The jitted step behind `train.step`."""
    return train.step.__self__.jitted_step


class TestTable:
    """`train.buckets`."""

    @pytest.fixture
    def train(self):
        design = jaxdp.RingAllReduce(bucket_cap_mb=2.5 * LAYER, first_bucket_mb=LAYER)
        mesh = jaxdp.data_mesh(2)
        return jaxdp.data_parallel(loss_fn, optax.sgd(0.1), mesh, design)

    def test_order_of_use_with_a_small_first_bucket(self, train):
        assert names(train.buckets(train.init(LAYERS), ROWS)) == [
            ("loss.total",),  # with `head` it would pass the first cap
            ("params['head']", "params['b']"),
            ("params['d']", "params['a']"),
            ("params['c']",),
        ]

    def test_without_a_batch_the_tree_reversed(self, train):
        assert names(train.buckets(LAYERS)) == [
            ("params['head']",),
            ("params['d']", "params['c']"),
            ("params['b']", "params['a']"),
        ]

    def test_it_prints(self, train):
        text = str(train.buckets(LAYERS)).splitlines()
        assert text[0].split() == ["bucket", "dtype", "bytes", "leaves"]
        assert text[2] == "     2  float32          2,048  params['d'], params['c']"

    def test_it_is_pure(self, train):
        state = train.init(LAYERS)
        first = train.buckets(state, ROWS)
        state, _ = train.step(state, ROWS)
        shapes = jax.ShapeDtypeStruct(ROWS.shape, ROWS.dtype)
        assert train.buckets(state, ROWS) == first == train.buckets(LAYERS, shapes)

    def test_a_leaf_above_the_cap_stands_alone(self):
        design = jaxdp.RingAllReduce(bucket_cap_mb=LAYER / 2)
        mesh = jaxdp.data_mesh(2)
        train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), mesh, design)
        assert [len(bucket.names) for bucket in train.buckets(LAYERS)] == [1] * 5

    @pytest.mark.parametrize(
        ("design", "expected"),
        [
            pytest.param(jaxdp.GatherToRoot(), 1, id="root"),
            pytest.param(jaxdp.ParameterServer(), 1, id="server"),
            pytest.param(jaxdp.NativeAllReduce(), 6, id="native"),
            pytest.param(
                jaxdp.RingAllReduce(compression=jaxdp.compression.Bf16()),
                2,
                id="compressed",
            ),
        ],
    )
    def test_other_designs(self, design, expected):
        mesh = jaxdp.data_mesh(2)
        train = jaxdp.data_parallel(loss_fn, optax.sgd(0.1), mesh, design)
        assert len(train.buckets(train.init(LAYERS), ROWS)) == expected

    def test_dtypes_are_kept_apart(self):
        params = {"a": np.ones(3, "f"), "b": jnp.ones(3, jnp.bfloat16)}
        mesh = jaxdp.data_mesh(2)
        train = jaxdp.data_parallel(
            lambda p, x: jnp.mean(x) * (p["a"].sum() + p["b"].sum().astype("f")),
            optax.sgd(0.1),
            mesh,
        )
        buckets = train.buckets(params)
        assert [str(bucket.dtype) for bucket in buckets] == ["bfloat16", "float32"]
        assert [bucket.nbytes for bucket in buckets] == [6, 12]


@pytest.mark.parametrize("option", ["bucket_cap_mb", "first_bucket_mb"])
@pytest.mark.parametrize("design", [jaxdp.RingAllReduce, jaxdp.NativeAllReduce])
def test_caps_that_hold_nothing_are_refused(design, option):
    message = rf"{design.__name__} got {option}=-1\. It must be larger than 0 MiB"
    with pytest.raises(ValueError, match=message):
        design = design(**{option: -1})
        jaxdp.data_parallel(loss_fn, optax.sgd(1.0), jaxdp.data_mesh(2), design)


def test_unknown_algorithms_are_refused():
    with pytest.raises(ValueError, match="'hypercube'"):
        jaxdp.data_parallel(
            loss_fn, optax.sgd(1.0), jaxdp.data_mesh(2), jaxdp.AllReduce("hypercube")
        )
