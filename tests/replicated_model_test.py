"""`DataParallel` called and differentiated: one device's numbers, on the right devices.

The reference is `apply_fn` itself on the whole batch, on one device.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.replicated.observe import observed_by
from tests.contract import waves
from tests.helpers import assert_bit_equal
from tests.replicated_helpers import compilations, ids_of, numbered, put

LAYOUTS = {
    "in-order": {"device_ids": [0, 1, 2, 3]},
    "shuffled": {"device_ids": [3, 1, 0, 2], "output_device": 5},
    "output-inside": {"device_ids": [3, 1, 0, 2], "output_device": 0},
    "all": {},
}
over_layouts = pytest.mark.parametrize(
    ("layout", "rows"),
    [("in-order", 16), ("shuffled", 10), ("output-inside", 9), ("all", 3)],
)
PARAMS = {"w": waves(3, 2), "deep": [waves(2, start=0.4), None], "power": np.int32(2)}


def root_and_output(layout):
    root = LAYOUTS[layout].get("device_ids", [0])[0]
    return root, LAYOUTS[layout].get("output_device", root)


def dense(params, x):
    return jnp.tanh(x @ params["w"] + params["deep"][0][None]) ** params["power"]


def two_inputs(params, x, y):
    return {"sum": dense(params, x) + y["y"], "pair": (y["y"], None)}


def keywords(params, x, *, scale, train=False):
    output = dense(params, x) * scale[:, None]
    return output, (-output if train else output)


def with_integers(params, batch):
    x, labels = batch
    output = dense(params, x)
    return {"output": output, "labels": labels + 1, "is_large": output > 0.25}


CASES: dict[str, Any] = {
    "array": (dense, lambda r: (waves(r, 3),), lambda r: {}),
    "tree": (
        two_inputs,
        lambda r: (waves(r, 3), {"y": waves(r, 2, start=0.2), "none": None}),
        lambda r: {},
    ),
    "keywords": (
        keywords,
        lambda r: (waves(r, 3),),
        lambda r: {"scale": waves(r, start=0.6), "train": True},
    ),
    "all-keywords": (
        keywords,
        lambda r: (),
        lambda r: {"x": waves(r, 3), "scale": waves(r, start=0.6)},
    ),
    "integers": (
        with_integers,
        lambda r: ((waves(r, 3), np.arange(r, dtype="i")),),
        lambda r: {},
    ),
}
over_cases = pytest.mark.parametrize("case", CASES)


@jax.jit
def total(output):
    """A number in which every entry of the output has a weight of its own."""
    smooth = [x for x in jax.tree.leaves(output) if x.dtype == jnp.float32]
    return sum(jnp.sum(x**2 * waves(*x.shape, start=i)) for i, x in enumerate(smooth))


def assert_close(actual, expected):
    """Same structure and dtypes; products of few small numbers differ in last bits."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for ours, one in zip(*map(jax.tree.leaves, (actual, expected)), strict=True):
        assert (ours.dtype, ours.shape) == (one.dtype, one.shape)
        if ours.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(ours, one, rtol=1e-5, atol=1e-5)


@over_cases
@over_layouts
def test_output_is_that_of_one_device(layout, rows, case):
    """ST-7, CA9: any number of rows, any output device."""
    apply_fn, inputs, named = CASES[case]
    model = jaxdp.DataParallel(apply_fn, PARAMS, **LAYOUTS[layout])
    output = model(*inputs(rows), **named(rows))
    assert_close(output, apply_fn(PARAMS, *inputs(rows), **named(rows)))
    root, output_device = root_and_output(layout)
    assert set(jax.tree.leaves(ids_of(output))) == {output_device}
    assert set(jax.tree.leaves(ids_of(model.params))) == {root}


@pytest.mark.parametrize("case", ["tree", "keywords", "integers"])
@over_layouts
def test_gradient_is_that_of_one_device(layout, rows, case):
    apply_fn, inputs, named = CASES[case]
    model = jaxdp.DataParallel(apply_fn, PARAMS, **LAYOUTS[layout])
    arguments = inputs(rows), named(rows)

    def ours(params):
        return total(model.apply(params, *arguments[0], **arguments[1]))

    def one(params):
        return total(apply_fn(params, *arguments[0], **arguments[1]))

    gradient = jax.grad(ours, allow_int=True)(model.params)
    params = jax.tree.map(jnp.asarray, PARAMS)
    assert_close(gradient, jax.grad(one, allow_int=True)(params))
    smooth = [gradient["w"], gradient["deep"][0]]
    assert ids_of(smooth) == [root_and_output(layout)[0]] * 2


def sines(w, x):
    return jnp.sin(w["a"] * x) * w["b"] + w["unused"] * 0


WAVES = {"a": np.float32(0.7), "b": np.float32(1.3), "unused": np.float32(0.1)}


def loss_by(apply_fn):
    return lambda w, x: total({"output": apply_fn(w, x)})


@pytest.mark.parametrize(
    ("argnums", "rows"),
    [(0, 10), (1, 10), ((0, 1), 3)],
    ids=["params", "inputs", "both"],
)
def test_gradients_by_params_and_inputs(argnums, rows):
    model = jaxdp.DataParallel(sines, WAVES, **LAYOUTS["shuffled"])
    w, x = jax.tree.map(jnp.asarray, (WAVES, waves(rows)))
    expected = jax.grad(loss_by(sines), argnums)(w, x)
    gradient = jax.grad(loss_by(model.apply), argnums)(model.params, put(x, 6))
    assert_close(gradient, expected)
    params_then_inputs = ids_of(gradient if argnums == (0, 1) else (gradient,) * 2)
    if argnums != 1:
        assert set(params_then_inputs[0].values()) == {3}
    if argnums != 0:
        assert params_then_inputs[1] == 6


@pytest.mark.parametrize("argnums", [0, 1], ids=["params", "inputs"])
def test_second_order(argnums):
    model = jaxdp.DataParallel(sines, WAVES, device_ids=[3, 1], output_device=5)
    w, x = jax.tree.map(jnp.asarray, (WAVES, waves(3)))

    def penalty(loss):
        def squares(w, x):
            gradients = jax.tree.leaves(jax.grad(loss, argnums)(w, x))
            return sum(jnp.sum(gradient**2) for gradient in gradients)

        return squares

    gradient = jax.grad(penalty(loss_by(model.apply)))(model.params, x)
    assert_close(gradient, jax.grad(penalty(loss_by(sines)))(w, x))
    assert set(jax.tree.leaves(ids_of(gradient))) == {3}


def test_value_gradient_and_aux():
    model = jaxdp.DataParallel(sines, WAVES, **LAYOUTS["shuffled"])

    def loss(w):
        output = model.apply(w, waves(10))
        return total(output), {"output": output}

    (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(model.params)
    w = jax.tree.map(jnp.asarray, WAVES)
    expected = jax.value_and_grad(loss_by(sines))(w, waves(10))
    assert_close((value, gradient), expected)
    assert_close(aux["output"], sines(w, waves(10)))
    assert ids_of((value, aux)) == (5, {"output": 5})


@pytest.mark.parametrize("home", [3, 6], ids=["on-the-root", "elsewhere"])
def test_a_model_can_be_made_inside_grad(home):
    def loss(w):
        return total(jaxdp.DataParallel(sines, w, **LAYOUTS["shuffled"])(waves(10)))

    w = jax.tree.map(lambda leaf: put(leaf, home), WAVES)
    gradient = jax.grad(loss)(w)
    expected = jax.grad(lambda w: total(sines(w, waves(10))))
    assert_close(gradient, expected(jax.tree.map(jnp.asarray, WAVES)))
    assert set(jax.tree.leaves(ids_of(gradient))) == {home}


def test_no_gradient_of_what_is_not_used():
    params = {"a": numbered(2), "b": {"c": numbered(3), "d": np.float32(5)}}
    model = jaxdp.DataParallel(
        lambda w, x: (x * w["b"]["d"], x * w["a"][0]), params, **LAYOUTS["shuffled"]
    )
    gradient = jax.grad(lambda w: jnp.sum(model.apply(w, numbered(10))[0]))(
        model.params
    )
    assert_bit_equal(
        gradient,
        {"a": np.zeros(2, "f"), "b": {"c": np.zeros(3, "f"), "d": np.float32(55)}},
    )
    assert set(jax.tree.leaves(ids_of(gradient))) == {3}
    constant = jax.grad(lambda w: jnp.sum(model.apply(w, numbered(10))[1][:0]))
    assert not np.any(constant(model.params)["b"]["d"])


def test_gradient_of_16_bit_params_is_rounded_once():
    """256 + 1 is no bfloat16: summed one by one, the three small ones would be lost."""
    model = jaxdp.DataParallel(
        lambda w, x: w * x, jnp.bfloat16(0), device_ids=[0, 1, 2, 3, 4]
    )
    x = jnp.asarray([256, 1, 1, 1, 1], "bfloat16")
    gradient = jax.grad(lambda w: jnp.sum(model.apply(w, x).astype("f")))(model.params)
    assert gradient.dtype == "bfloat16" and gradient == 260


@pytest.mark.parametrize(
    ("rows", "expected"), [(10, [6, 15, 24, 10]), (9, [6, 15, 24]), (3, [1, 2, 3])]
)
def test_scalars_of_replicas_are_stacked(rows, expected):
    """ST-7: one number for each replica that has rows."""
    model = jaxdp.DataParallel(
        lambda w, x: w * jnp.sum(x), np.float32(1), **LAYOUTS["shuffled"]
    )
    output = model(numbered(rows))
    assert output.tolist() == expected and ids_of(output) == 5
    weights = 10.0 ** np.arange(len(expected), dtype="f")
    gradient = jax.grad(lambda w: jnp.sum(model.apply(w, numbered(rows)) * weights))
    assert gradient(model.params) == np.dot(weights, expected)


def test_squeeze_with_one_row_for_each_replica():
    """ST-7: scalars are stacked to rows; wider rows lose theirs, as in PyTorch."""
    model = jaxdp.DataParallel(lambda w, x: jnp.squeeze(x), (), **LAYOUTS["shuffled"])
    assert model(numbered(4, 1)).tolist() == [1, 2, 3, 4]
    assert model(numbered(4, 1, 2)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert model(numbered(8, 1, 2)).shape == (8, 2)


@pytest.mark.parametrize("dim", [1, -1])
def test_another_dim(dim):
    model = jaxdp.DataParallel(
        lambda w, x: w * x, np.float32(3), dim=dim, **LAYOUTS["shuffled"]
    )
    x, weights = numbered(2, 10), numbered(2, 10, start=50)
    assert_bit_equal(model(x), 3 * x)
    gradient = jax.grad(lambda w: jnp.sum(model.apply(w, x) * weights))(model.params)
    assert gradient == np.sum(x * weights)


def test_constants_of_other_type_or_sign_are_others():
    def apply_fn(w, x, constant):
        is_negative = isinstance(constant, float) and np.signbit(constant)
        return x * 0 + {int: 1, bool: 2, float: 4}[type(constant)] + 8 * is_negative

    model = jaxdp.DataParallel(apply_fn, (), device_ids=[0, 1])
    for _ in range(2):
        outputs = [float(model(numbered(2), c)[0]) for c in (0, False, 0.0, -0.0)]
        assert outputs == [1, 2, 4, 12]
        outputs = [float(model(numbered(2), constant=c)[1]) for c in (True, 1.0, 1)]
        assert outputs == [2, 4, 1]


def test_constants_without_a_hash():
    model = jaxdp.DataParallel(lambda w, x, chosen: x * len(chosen), ())
    small, large = {1}, {1, 2, 3}
    assert [float(model(numbered(1), c)[0]) for c in (small, large)] == [1, 3]
    with compilations() as names:
        assert model(numbered(1), large).tolist() == [3]
    assert names == []
    assert model(numbered(1), {4, 5}).tolist() == [2]


def test_functions_are_constants():
    model = jaxdp.DataParallel(lambda w, x, f: f(w * x), np.float32(2))
    assert_close(model(waves(9), jnp.sin), jnp.sin(2 * waves(9)))
    assert_close(model(waves(9), f=jnp.cos), jnp.cos(2 * waves(9)))


def test_replicas_draw_with_keys_of_their_own():
    def apply_fn(w, x, key):
        return w * jax.random.uniform(key, x.shape)

    model = jaxdp.DataParallel(apply_fn, np.float32(1), device_ids=[0, 1, 2, 3])
    key = jax.random.key(3)
    output = model(numbered(8), key)
    assert len(set(output.tolist())) == 8
    assert_bit_equal(model(numbered(8), key), output)
    gradient = jax.grad(lambda w: jnp.sum(model.apply(w, numbered(8), key)))
    np.testing.assert_allclose(gradient(model.params), np.sum(output), rtol=1e-6)


@pytest.mark.parametrize("place", ["python", "numpy", "elsewhere"])
def test_parameters_go_to_the_root(place):
    value = {
        "python": lambda: {"w": 3.0, "n": 2},
        "numpy": lambda: {"w": np.float32(3), "n": np.int32(2)},
        "elsewhere": lambda: {"w": put(3, 6, "f"), "n": put(2, 1, "i")},
    }[place]()
    model = jaxdp.DataParallel(
        lambda w, x: w["w"] * x * w["n"],
        {"w": 1.0, "n": 1},
        **LAYOUTS["shuffled"],
    )
    assert ids_of(model.params) == {"w": 3, "n": 3}
    assert model.apply(value, numbered(10)).tolist() == (6 * numbered(10)).tolist()
    model = jaxdp.DataParallel(model.apply_fn, value, **LAYOUTS["shuffled"])
    assert ids_of(model.params) == {"w": 3, "n": 3}
    assert model(numbered(10)).tolist() == (6 * numbered(10)).tolist()


def test_arrays_of_the_caller_survive():
    params, x = {"w": put(numbered(3), 3)}, put(numbered(10, 3), 3)
    model = jaxdp.DataParallel(
        lambda w, x: x * w["w"][None], params, **LAYOUTS["shuffled"]
    )
    jax.grad(lambda w, x: jnp.sum(model.apply(w, x)), (0, 1))(params, x)
    model(x)
    assert_bit_equal((params["w"], x), (numbered(3), numbered(10, 3)))


def test_the_model_keeps_parameters_that_the_caller_changes():
    memory = np.zeros(64 + 16, "f")
    start = (-memory.ctypes.data % 64) // 4  # aligned: JAX could share it
    w = memory[start : start + 16]
    w[:] = 1
    model = jaxdp.DataParallel(lambda w, x: x * w[None], w, model_state=None)
    w[:] = 2
    assert_bit_equal(model(np.ones((9, 16), "f")), np.ones((9, 16), "f"))


def test_model_state_is_the_roots():
    def apply_fn(w, x, model_state):
        return w * x * model_state, model_state + jnp.sum(x)

    model = jaxdp.DataParallel(
        apply_fn, np.float32(2), model_state=np.float32(10), **LAYOUTS["shuffled"]
    )
    x = numbered(10)
    assert model(x).tolist() == (20 * x).tolist()
    output, state = model.apply(model.params, x, model_state=put(100, 6, "f"))
    assert output.tolist() == (200 * x).tolist()
    assert (float(state), ids_of(state)) == (106, 3)
    assert float(model.model_state) == 10
    output, state = model.apply(3.0, x, model_state=1.0)
    assert (output.tolist(), float(state)) == ((3 * x).tolist(), 7)


def test_model_state_must_be_returned():
    model = jaxdp.DataParallel(
        lambda w, x, model_state: x, (), model_state=np.float32(1)
    )
    with pytest.raises(TypeError, match=r"with a model_state.*\(output, model_state\)"):
        model(numbered(3))


def fresh(apply_fn):
    """The same function, not compiled by another test."""
    return lambda *inputs: apply_fn(*inputs)


def test_inference_runs_no_backward_program():
    """A5: and nothing is compiled twice over 100 calls of two shapes."""
    model = jaxdp.DataParallel(fresh(dense), PARAMS, **LAYOUTS["shuffled"])
    batches = [put(waves(16, 3), 3), put(waves(10, 3), 3)]
    with compilations() as names:
        expected = [np.asarray(model(x)) for x in batches]
    # 4 rows on 4 devices; 3 rows on 3 of them, 1 row on the last
    assert names.count("predict") == 4 + 4
    assert set(names) <= {"predict", "slices", "join"}
    with compilations() as names:
        for call in range(100):
            output = model(batches[call % 2])
    assert names == []
    assert_bit_equal(output, expected[1])


class Watcher:
    """Keeps the gradients that replicas made."""

    def __init__(self):
        self.gradients = []

    def see(self, event):
        if event.stage == "7 backward" and "gradients" in event.made:
            self.gradients.append([x.shape for x in event.made["gradients"]])

    def settle(self):
        pass


def test_only_gradients_that_are_asked_for_are_computed():
    model = jaxdp.DataParallel(dense, PARAMS, **LAYOUTS["shuffled"])
    watcher = Watcher()
    with observed_by(watcher):
        jax.grad(lambda x: total(model(x)))(waves(10, 3))
        jax.grad(lambda w: total(model.apply({**model.params, "w": w}, waves(3, 3))))(
            model.params["w"]
        )
    assert watcher.gradients == [[(1, 3)]] + [[(3, 3)]] * 3 + [[(3, 2)]] * 3


def test_training_compiles_forward_and_backward_once():
    model = jaxdp.DataParallel(fresh(dense), PARAMS, **LAYOUTS["shuffled"])
    x = put(waves(10, 3), 3)
    smooth = {"w": model.params["w"], "deep": model.params["deep"]}

    def loss(smooth):
        return total(model.apply({**smooth, "power": model.params["power"]}, x))

    with compilations() as names:
        jax.grad(loss)(smooth)
    kinds = [names.count(kind) for kind in ("forward", "backward", "predict")]
    assert kinds == [4, 4, 0]
    with compilations() as names:
        for _ in range(5):
            jax.grad(loss)(smooth)
    assert names == []
