"""Which optimizers and aggregates may run on parts of a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdp import aggregation
from jaxdp.separable import mixing_of_aggregate, mixing_of_optimizer

PARAMS = {
    "a": np.ones((5, 3), "f"),
    "b": np.ones(3, "f"),
    "s": np.float32(1),
    "n": None,
    "e": np.zeros((0, 4), "f"),
}


def of_matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def of_large(params):
    return jax.tree.map(lambda leaf: leaf.size > 8, params)


SEPARABLE = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(1e-3),
    "decay-of-matrices": optax.adamw(1e-3, mask=of_matrices),
    "schedule": optax.sgd(optax.cosine_decay_schedule(0.1, 10)),
    "clip-values": optax.clip(1.0),
    "zero-nans": optax.zero_nans(),
    "hyperparameters": optax.inject_hyperparams(optax.sgd)(1e-3),
    "several-steps": optax.MultiSteps(optax.sgd(1e-3), 2),
    "masked": optax.masked(optax.sgd(0.1), of_matrices),
}
MIXING = {
    "global-norm": optax.clip_by_global_norm(1.0),
    "large-norm": optax.chain(optax.zero_nans(), optax.clip_by_global_norm(1e6)),
    "lamb": optax.lamb(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "if-all-finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "noise": optax.add_noise(0.1, 0.5, 0),
    "unit-norms": optax.adaptive_grad_clip(0.1),
}


@pytest.mark.parametrize("optimizer", SEPARABLE.values(), ids=SEPARABLE.keys())
def test_elementwise_optimizers_run_on_parts(optimizer):
    assert mixing_of_optimizer(optimizer, PARAMS, 4) is None


@pytest.mark.parametrize("optimizer", MIXING.values(), ids=MIXING.keys())
def test_optimizers_that_mix_elements_do_not(optimizer):
    why = mixing_of_optimizer(optimizer, PARAMS, 4)
    assert why is not None and "depends on others" in why


def test_what_python_decides_by_shape_is_noticed():
    """Matrices of 15 elements decay, their parts of 4 would not."""
    optimizer = optax.adamw(1e-3, mask=of_large)
    assert "depends on the shapes" in (mixing_of_optimizer(optimizer, PARAMS, 4) or "")


def test_what_cannot_be_tried_is_named():
    def update(updates, state, params=None):
        return jax.lax.pmean(updates, "data"), state

    optimizer = optax.GradientTransformation(lambda params: (), update)
    why = mixing_of_optimizer(optimizer, PARAMS, 2)
    assert why is not None and "raised NameError" in why


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_narrow_parameters_can_be_tried(dtype):
    params = {"x": jnp.ones((3, 4), dtype)}
    assert mixing_of_optimizer(optax.adam(1e-3), params, 3) is None


def test_aggregates():
    given = PARAMS, 5, 2
    for aggregate in (aggregation.median, aggregation.trimmed_mean(2)):
        assert mixing_of_aggregate(aggregate, *given) is None
    why = mixing_of_aggregate(aggregation.clipped_mean(1.0), *given)
    assert why is not None and "depends on others" in why
