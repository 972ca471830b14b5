"""Replicas that fail: what `apply_fn` may not bring along, return or raise."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.replicated import gather, parallel_apply
from jaxdp.replicated.observe import observed_by
from tests.replicated_helpers import ids_of, numbered, put, refuses

FOUR = [0, 1, 2, 3]
X = numbered(10)


def model(
    apply_fn: Any, params: Any = 2.0, device_ids: Any = FOUR, **options: Any
) -> jaxdp.DataParallel:
    return jaxdp.DataParallel(apply_fn, params, device_ids=device_ids, **options)


ELSEWHERE = {"a": {"b": [X, put([1, 2, 3], 3, "f")]}}


def captures_global(w, x):
    return w * x + ELSEWHERE["a"]["b"][1].sum()


def capturing(array, wrap=lambda f: f):
    nested = {"deep": (array,)}
    return wrap(lambda w, x: w * x + nested["deep"][0].sum())


CAPTURED = {
    "closure": (lambda array: capturing(array), ["nested['deep'][0]"]),
    "global": (lambda array: captures_global, ["ELSEWHERE['a']['b'][1]"]),
    "jit": (lambda array: capturing(array, jax.jit), ["nested['deep'][0]"]),
    "checkpoint": (lambda array: capturing(array, jax.checkpoint), ["captured"]),
    "partial": (
        lambda array: functools.partial(lambda a, w, x: w * x + a.sum(), array),
        ["captured"],
    ),
    "default": (lambda array: lambda w, x, a=array: w * x + a.sum(), ["captured"]),
    "scan": (
        lambda array: (
            lambda w, x: jax.lax.scan(
                lambda x, _: (x + array.sum(), None), w * x, None, 2
            )[0]
        ),
        ["captured array"],
    ),
}


@pytest.mark.parametrize("case", CAPTURED)
def test_captured_arrays(case):
    """The hard-wired `cuda:0`: named, with its device and those of the replicas."""
    make, parts = CAPTURED[case]
    apply_fn = make(ELSEWHERE["a"]["b"][1])
    devices = "cpu:0, cpu:1, cpu:2, cpu:3"
    with refuses(ValueError, *parts, "shape (3,) on cpu:3", devices, "parameter"):
        model(apply_fn)(X)
    with refuses(ValueError, *parts, "shape (3,) on cpu:3", devices, "parameter"):
        jax.grad(lambda w: jnp.sum(model(apply_fn).apply(w, X)))(1.0)


@pytest.mark.parametrize(
    "array", [numbered(3), jnp.asarray(numbered(3)), 6.0], ids=["numpy", "jax", "float"]
)
def test_uncommitted_captures_are_constants(array):
    output = model(capturing(jnp.asarray(array)))(X)
    assert output.tolist() == (2 * X + 6).tolist()


def test_a_capture_may_lie_where_all_replicas_run():
    output = model(capturing(put([1, 2, 3], 3, "f")), device_ids=[3])(X)
    assert output.tolist() == (2 * X + 6).tolist() and ids_of(output) == 3


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "in-a-branch"])
def test_transfers_inside(nested):
    def move(x):
        return jax.device_put(x, jax.devices()[2])

    def apply_fn(w, x):
        return jax.lax.cond(w > 0, move, jnp.sin, x) if nested else move(x)

    with refuses(ValueError, "jax.device_put to cpu:2", "cpu:0, cpu:1", "Remove"):
        model(apply_fn)(X)
    assert model(lambda w, x: w * jax.device_put(x))(X)[9] == 20


def by_rows(others, one):
    """One output for the last slice, which has one row, and another for the rest."""
    return lambda w, x: one(x) if x.shape[0] == 1 else others(x)


STRUCTURES = {
    "structure": (lambda x: {"a": x}, lambda x: [x], "{'a': *}", "[*]"),
    "rank": (lambda x: x, lambda x: x[:, None], "float32[3]", "float32[1, 1]"),
    "dtype": (lambda x: x, lambda x: x.astype(int), "float32[3]", "int32[1]"),
    "width": (
        lambda x: jnp.ones((3, 5)),
        lambda x: jnp.ones((1, 7)),
        "float32[3, 5]",
        "float32[1, 7]",
    ),
    "squeeze": (jnp.squeeze, jnp.squeeze, "float32[3]", "float32[]"),
}


@pytest.mark.parametrize("case", STRUCTURES)
def test_outputs_that_differ(case):
    """ST-7: a squeezed batch axis among them."""
    others, one, first, last = STRUCTURES[case]
    parts = (f"{first} from cpu:0", f"{last} from cpu:3")
    if case == "structure":
        parts = ("{'a': *}) from cpu:0", "[*]) from cpu:3 (replica 3)")
    with refuses(ValueError, "gather got outputs", *parts):
        model(by_rows(others, one))(X)
    with refuses(ValueError, "gather got outputs", *parts):
        pieces = [others(X[:3]), *[others(X[3:6])] * 2, one(X[9:])]
        gather(jax.device_put(pieces, jax.devices()[:4]), 5)


def test_every_output_needs_the_dimension():
    with refuses(ValueError, "dim=1", "float32[3] from cpu:0", "one entry per row"):
        model(lambda w, x: x.sum(1), dim=1)(numbered(3, 8))


class Odd(Exception):
    """An error that takes no message."""

    def __init__(self):
        super().__init__("odd")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ZeroDivisionError("one row"), ZeroDivisionError, "one row"),
        (FileNotFoundError(2, "gone"), FileNotFoundError, "gone"),
        (Odd(), RuntimeError, " odd"),
        (KeyError("w2"), RuntimeError, " 'w2'"),
        (UnicodeDecodeError("utf8", b"a", 0, 1, "no"), RuntimeError, "decode byte"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_replica_that_raises_while_it_is_traced(error, kind, text):
    def apply_fn(w, x):
        if x.shape[0] == 1:
            raise error
        return w * x

    name = type(error).__name__
    message = f"Replica 3 on cpu:6, row 9 raised {name}:"
    run = model(apply_fn, device_ids=[2, 0, 4, 6])
    with refuses(kind, message, text) as caught:
        run(X)
    assert type(caught.value) is kind and caught.value.__cause__ is error
    with refuses(kind, message, text):
        jax.grad(lambda w: jnp.sum(run.apply(w, X)))(1.0)


def test_rows_of_a_replica_are_named():
    def apply_fn(w, x):
        raise ValueError("all")

    with refuses(ValueError, "Replica 0 on cpu:3, rows 0 to 2 raised ValueError: all"):
        model(apply_fn, device_ids=[3, 1, 0, 2])(X)


def test_parallel_apply_names_replica_and_device():
    replicas = [put(2, 3, "f"), put(2, 1, "f")]
    inputs = [(put([1, 2], 3, "f"),), (put([3], 1, "f"),)]
    with refuses(TypeError, "Replica 1 on cpu:1 raised TypeError", "shape (1,)"):
        parallel_apply(lambda w, x: w * x.reshape(2), replicas, inputs)


class Watcher:
    """Keeps what replicas made, and waits for nothing."""

    def __init__(self):
        self.outputs = []

    def see(self, event):
        self.outputs += event.made.get("outputs", [])

    def settle(self):
        pass


@jax.jit
def late(x):
    """The same, after a while; JAX on CPU runs in line what holds no large product."""
    product = jnp.ones((600, 600)) * x[0]
    for _ in range(12):
        product = jnp.sin(product @ product)
    return x + 0 * product[0, 0]


def test_the_others_have_finished_when_one_raises():
    def slow(w, x):
        if x.shape[0] == 1:
            raise ValueError("one row")
        return w * late(x)

    watcher = Watcher()
    with observed_by(watcher), refuses(ValueError, "Replica 3"):
        model(slow)(X)
    assert len(watcher.outputs) == 3
    assert all(output.is_ready() for output in watcher.outputs)


@pytest.mark.parametrize("differentiated", [False, True], ids=["call", "grad"])
def test_a_replica_that_raises_at_run_time(differentiated):
    """Rows 3 to 5 only, on the host; nothing is left running."""
    calls, ends = [], []

    def on_the_host(x):
        calls.append(x[0])
        time.sleep(0.02)
        ends.append(x[0])
        if x[0] == 4:
            raise ValueError("four")
        return x

    def apply_fn(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return w * jax.pure_callback(on_the_host, shape, x)

    def run(w):
        return jnp.sum(model(apply_fn).apply(w, late(X)))

    message = "Replica 1 on cpu:1, rows 3 to 5 raised"
    with refuses(jax.errors.JaxRuntimeError, message, "ValueError: four"):
        (jax.grad(run) if differentiated else run)(jnp.float32(2))
    assert len(calls) == len(ends)
    time.sleep(0.1)
    assert len(calls) == len(ends) and 4 in ends


@pytest.mark.parametrize("callback", ["pure", "debug"])
def test_callbacks_that_do_not_raise(callback):
    seen = []

    def apply_fn(w, x):
        if callback == "debug":
            jax.debug.callback(lambda x: seen.extend(map(float, x)), x)
            return w * x
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return w * jax.pure_callback(lambda x: np.asarray(x) + 100, shape, x)

    output = model(apply_fn)(X)
    added = 0 if callback == "debug" else 100
    assert output.tolist() == (2 * (X + added)).tolist()
    assert sorted(seen) == (X.tolist() if callback == "debug" else [])
