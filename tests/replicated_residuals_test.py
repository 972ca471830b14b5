"""A backward program gets activations, and nothing that is there already."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.replicated import programs
from jaxdp.replicated.residuals import Full, Input, Kept

W = np.arange(1.0, 13.0, dtype=np.float32).reshape(3, 4) / 7
V = np.arange(1.0, 9.0, dtype=np.float32).reshape(4, 2) / 5
X = np.sin(np.arange(15.0, dtype=np.float32)).reshape(5, 3)


def network(params, x):
    hidden = jax.nn.relu(x @ params["w"])
    return hidden @ params["v"]


def saved_by(apply_fn, params, x):
    device = jax.devices()[0]
    whole = jax.device_put((params, None, (x,), {}), device)
    call, arrays = programs.flatten(apply_fn, whole, (device,))
    active = tuple(i < len(arrays) - 1 for i in range(len(arrays)))
    made, saved = programs.forward(call, active, arrays)
    return arrays, made, saved


def gradients(arrays, made, saved):
    ones = [jnp.ones_like(leaf) for leaf in jax.tree.leaves(made.output)]
    return programs.backward(saved, saved.needed(arrays), ones)


def test_neither_parameters_nor_zeros_are_kept():
    arrays, made, saved = saved_by(network, {"w": W, "v": V}, X)
    assert arrays[0].shape == V.shape  # leaves are sorted by name
    pointers = {array.unsafe_buffer_pointer() for array in saved.needed(arrays)}
    assert pointers <= {array.unsafe_buffer_pointer() for array in arrays}
    assert any(isinstance(origin, Input) for origin in saved.origins)
    for array in saved.kept:
        assert array.shape == (5, 4)  # the hidden layer, or where it is positive
        assert np.any(np.asarray(array) != 0)
    dv, dw = gradients(arrays, made, saved)
    hidden = np.maximum(X @ W, 0)
    np.testing.assert_allclose(dv, hidden.sum(axis=0)[:, None].repeat(2, 1), rtol=1e-6)
    np.testing.assert_allclose(dw, X.T @ ((X @ W > 0) * V.sum(axis=1)), rtol=1e-6)


@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["plain", "inside jit"])
def test_one_number_everywhere_is_made_again(outer):
    scaled = outer(lambda w, x: w * jnp.full(x.shape, 2.5))
    arrays, made, saved = saved_by(scaled, np.float32(3), X)
    assert saved.kept == []
    full = [origin for origin in saved.origins if isinstance(origin, Full)]
    assert all(origin.value in (2.5, 3.0) for origin in full)
    (dw,) = gradients(arrays, made, saved)
    assert float(dw) == 2.5 * X.size


def test_what_is_needed_twice_is_kept_once():
    def twice(w, x):
        wave = jnp.sin(x)  # both gradients need it
        return wave * w + wave * (w * w)

    arrays, made, saved = saved_by(twice, np.float32(0.7), X)
    kept = [np.asarray(array).tobytes() for array in saved.kept]
    assert len(set(kept)) == len(kept)
    used = [origin.index for origin in saved.origins if isinstance(origin, Kept)]
    assert set(used) == set(range(len(kept)))
    (dw,) = gradients(arrays, made, saved)
    expected = np.sum(np.sin(X)) * (1 + 2 * 0.7)
    np.testing.assert_allclose(dw, expected, rtol=1e-5)


@pytest.mark.parametrize("jitted", [False, True], ids=["plain", "inside jit"])
def test_inputs_are_known_through_inner_programs(jitted):
    inner = jax.jit(network) if jitted else network
    arrays, made, saved = saved_by(
        lambda params, x: inner(params, inner(params, x) @ W[:2, :3]),
        {"w": W, "v": V},
        X,
    )
    sizes = {array.shape for array in saved.kept}
    assert W.shape not in sizes and V.shape not in sizes
    model = jaxdp.DataParallel(network, {"w": W, "v": V}, device_ids=[2, 0])
    plain = jax.grad(lambda params: jnp.sum(network(params, X)))(model.params)
    through = jax.grad(lambda params: jnp.sum(model.apply(params, X)))(model.params)
    for ours, theirs in zip(*map(jax.tree.leaves, (through, plain)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert len(gradients(arrays, made, saved)) == 2
