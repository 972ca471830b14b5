"""What the port refuses, and that each message names the place and the numbers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from jaxdp.replicated import gather, parallel_apply, replicate, scatter
from tests.replicated_helpers import foreign, numbered, put, refuses
from tests.torch_reference.installed import require_torch

FOUR = [0, 1, 2, 3]
X = numbered(10)


def product(w, x, *others, **named):
    del others, named
    return w * x


def model(
    apply_fn: Any = product, params: Any = 2.0, device_ids: Any = FOUR, **options: Any
) -> jaxdp.DataParallel:
    return jaxdp.DataParallel(apply_fn, params, device_ids=device_ids, **options)


DEVICES = {
    "twice": (ValueError, [0, 2, 0], ["[0, 2, 0]", "3 ids and 2 devices", "0"]),
    "twice-as-device": (ValueError, [2, "device 2"], ["[2, 2]", "2 ids and 1 dev"]),
    "unknown": (ValueError, [1, 99], ["device_ids[1]=99", "8 devices", "6, 7]"]),
    "negative": (ValueError, [-1], ["device_ids[0]=-1", "8 devices"]),
    "bool": (TypeError, [0, True], ["device_ids[1]=True", "integer"]),
    "float": (TypeError, [0, 1.0], ["device_ids[1]=1.0", "integer"]),
    "text": (TypeError, ["0"], ["device_ids[0]='0'", "integer"]),
    "none-inside": (TypeError, [None], ["device_ids[0]=None", "integer"]),
    "empty": (ValueError, [], ["device_ids=[]", "at least 1 device"]),
    "one-id": (TypeError, 3, ["device_ids=3", "sequence of ids"]),
    "one-float": (TypeError, 1.5, ["device_ids=1.5", "sequence of ids"]),
    "one-device": (TypeError, "device 0", ["device_ids=", "sequence of ids"]),
    "one-text": (TypeError, "01", ["device_ids='01'", "sequence of ids"]),
    "no-order": (TypeError, {1, 0}, ["device_ids={0, 1}", "order of the slices"]),
}
CALLERS = {
    "scatter": lambda ids: scatter(X, ids),
    "replicate": lambda ids: replicate(X, ids),
    "DataParallel": lambda ids: model(device_ids=ids),
}


def as_device(given):
    """`device 2` as the device."""
    if isinstance(given, list):
        return [as_device(each) for each in given]
    is_device = isinstance(given, str) and given.startswith("device ")
    return jax.devices()[int(given[7:])] if is_device else given


@pytest.mark.parametrize("caller", CALLERS)
@pytest.mark.parametrize("case", DEVICES)
def test_device_ids(case, caller):
    kind, ids, parts = DEVICES[case]
    with refuses(kind, f"{caller} got", *parts):
        CALLERS[caller](as_device(ids))


@pytest.mark.parametrize(
    ("kind", "given", "parts"),
    [
        (ValueError, 8, ["output_device=8", "8 devices", "[0, 1, 2, 3, 4, 5, 6, 7]"]),
        (ValueError, -1, ["output_device=-1"]),
        (TypeError, False, ["output_device=False", "integer"]),
        (TypeError, "1", ["output_device='1'", "integer"]),
        (TypeError, [1], ["output_device=[1]", "integer"]),
    ],
)
def test_output_device(kind, given, parts):
    with refuses(kind, "DataParallel got", *parts):
        model(output_device=given)
    with refuses(kind, "gather got", *parts):
        gather([put([1, 2], 0)], given)


@pytest.mark.parametrize("dim", [None, 0.0, True, "0"], ids=repr)
def test_dim_is_an_integer(dim):
    with refuses(TypeError, f"scatter got dim={dim!r}", "integer"):
        scatter(X, FOUR, dim)
    with refuses(TypeError, f"gather got dim={dim!r}", "integer"):
        gather([put([1, 2], 0)], 0, dim)
    with refuses(TypeError, f"DataParallel got dim={dim!r}", "integer"):
        model(dim=dim)


PIL = foreign("PIL.Image.Image", "__array_interface__")
TORCH = foreign("torch.Tensor", "__array__")
OTHER = foreign("cupy.ndarray", "__cuda_array_interface__")
OBJECTS = np.array([1, None] * 5, dtype=object)
STRANGERS = {
    "pil": ((X, PIL), ["inputs[1] is a PIL.Image.Image", "asarray(image)[None]"]),
    "torch": (({"a": [TORCH]},), ["inputs[0]['a'][0] is a torch.Tensor", "numpy("]),
    "other": ((X, (OTHER, X)), ["inputs[1][0] is a cupy.ndarray", "numpy.asarray("]),
    "objects": ((X, OBJECTS), ["inputs[1] is an array of dtype object", "numbers"]),
    "text": ((X.astype(str),), ["inputs[0] is an array of dtype <U", "numbers"]),
    "dates": ((X.astype("M8[D]"),), ["inputs[0]", "datetime64[D]", "numbers"]),
    "records": ((np.zeros(10, "f,i"),), ["inputs[0] is an array of dtype [('f0'"]),
    "all": ((PIL, X, TORCH), ["inputs[0] is a PIL", "inputs[2] is a torch"]),
    "list": ((X, [1, 2, 3]), ["lists of numbers: inputs[1] (3 entries)", "tuple"]),
    "deep-list": (({"a": ([[1.5, 2], [3, True]],)},), ["inputs[0]['a'][0] (2 ent"]),
}


@pytest.mark.parametrize("case", STRANGERS)
def test_data_that_no_device_takes(case):
    inputs, parts = STRANGERS[case]
    with refuses(TypeError, "DataParallel got", *parts):
        model()(*inputs)
    with refuses(TypeError, "scatter got", *(p.replace("inputs", "x") for p in parts)):
        scatter(inputs, FOUR)


@pytest.mark.torch
def test_tensors_of_torch():
    require_torch()
    import torch

    with refuses(TypeError, "inputs[1] is a torch.Tensor", "tensor.numpy(force=True)"):
        model()(X, torch.ones(10))
    tensor = torch.arange(10.0, requires_grad=True)
    assert model()(tensor.numpy(force=True))[9] == 18


def test_keyword_inputs_are_named():
    with refuses(TypeError, "keywords['labels'] (2 entries)"):
        model()(X, labels=[1, 2])
    with refuses(ValueError, "inputs[0] (10,), keywords['mask'] (9,)"):
        model()(X, mask=X[:9])


def test_lists_that_hold_no_numbers_are_constants():
    assert model()(X, [1, "a"], [], (1, 2)).tolist() == (2 * X).tolist()


SHAPES = {
    "none": ((), 0, ["no array among the 0 leaves", "at least one"]),
    "constants": ((3, "a", None), 0, ["no array among the 2 leaves"]),
    "one-key": ((jax.random.key(0),), 0, ["no array among the 1 leaves"]),
    "lengths": (
        (X, {"y": numbered(9, 2)}, X),
        0,
        ["dim=0", "[0] (10,)", "[1]['y'] (9, 2)", "[2] (10,)", "2 different numbers"],
    ),
    "lengths-along-1": (
        (numbered(4, 3), numbered(4, 5)),
        1,
        ["dim=1", "[0] (4, 3)", "[1] (4, 5)", "2 different numbers"],
    ),
    "dim": (
        (numbered(3, 4), X),
        1,
        ["dim=1", "[1] of shape (10,) (allows -1 to 0)"],
    ),
    "negative-dim": ((numbered(3, 4),), -3, ["dim=-3", "(3, 4) (allows -2 to 1)"]),
    "scalar-array": ((X, jnp.float32(1)), 0, ["[1] of shape () (allows none)"]),
    "numpy-scalar": ((X, np.float32(1)), 0, ["[1] of shape ()", "a Python number"]),
    "no-rows": ((numbered(0, 3),), 0, ["0 rows", "dim=0", "(0, 3)", "Skip"]),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_that_cannot_be_split(case):
    inputs, dim, parts = SHAPES[case]
    with refuses(ValueError, "DataParallel got", *parts):
        model(dim=dim)(*inputs)
    with refuses(ValueError, "scatter got", *parts):
        scatter(inputs, FOUR, dim)


TRACED = {
    "inputs": (lambda run, x: run(x), ["DataParallel got inputs[0] without"]),
    "deep": (lambda run, x: run(X, {"a": x}), ["DataParallel got inputs[1]['a'] w"]),
    "params": (lambda run, x: run.apply(x, X), ["DataParallel got params without"]),
    "built-inside": (lambda _, x: model(params=x)(X), ["DataParallel got params w"]),
    "scatter": (lambda _, x: scatter(x, FOUR), ["scatter got x without"]),
    "replicate": (lambda _, x: replicate([x], FOUR), ["replicate got params[0] w"]),
    "gather": (lambda _, x: gather([X, x], 0), ["gather got outputs[1] without"]),
    "parallel_apply": (
        lambda _, x: parallel_apply(jnp.sin, [x], [()]),
        ["parallel_apply got replicas[0]"],
    ),
}
TRANSFORMS = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "jit-of-grad": lambda f: jax.jit(
        jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(f(x)))))
    ),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("case", TRACED)
def test_it_cannot_be_compiled_into_one_program(case, transform):
    run, parts = TRACED[case]
    x = numbered(10, 10) if transform == "vmap" else X
    with refuses(ValueError, *parts, "jax.jit", "jax.vmap", "jax.grad"):
        TRANSFORMS[transform](functools.partial(run, model()))(x)


def test_a_model_needs_a_function():
    with refuses(TypeError, "apply_fn of type dict", "from_nnx"):
        jaxdp.DataParallel({"w": X}, product)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("leaf", "parts"),
    [
        ("relu", ["['act']", "str"]),
        (TORCH, ["['act']", "torch.Tensor"]),
        (OBJECTS, ["['act']", "object"]),
    ],
    ids=["text", "torch", "objects"],
)
def test_parameters_are_numbers(leaf, parts):
    params = {"w": 2.0, "act": leaf}
    with refuses(TypeError, "DataParallel got", "params", *parts):
        model(params=params)
    with refuses(TypeError, "DataParallel got", "model_state", *parts):
        model(params=2.0, model_state=params)
    with refuses(TypeError, "DataParallel got", "params", *parts):
        model().apply(params, X)


def test_outputs_to_gather():
    with refuses(ValueError, "gather got 0 outputs", "at least 1"):
        gather([], 0)
    sharded = jaxdp.shard_batch(numbered(4), jaxdp.data_mesh(2))
    with refuses(ValueError, "gather", "replica 0", "2 devices", "cpu:0", "cpu:1"):
        gather([sharded, put([1, 2], 1, "f")], 0)
    with refuses(ValueError, "gather", "replica 1", "2 devices", "cpu:1", "cpu:2"):
        gather([[X, put([1], 0)], [put([1], 1), put([1], 2)]], 0)
    with refuses(ValueError, "gather", "replica 0", "0 devices"):
        gather([X], 0)


def test_replicas_and_inputs_that_do_not_belong_together():
    replicas, inputs = replicate(2.0 * X[:1], [1, 2]), scatter(X, [2, 1])
    with refuses(ValueError, "parallel_apply", "replica 0", "2 devices", "cpu:1, cpu:"):
        parallel_apply(product, replicas, [(part,) for part in inputs])
    with refuses(ValueError, "1 replicas, 2 inputs and 2 keywords", "[:len(inputs)]"):
        parallel_apply(product, replicas[:1], [(part,) for part in inputs])
    with refuses(ValueError, "2 replicas, 2 inputs and 1 keywords"):
        parallel_apply(product, replicas, [(part,) for part in inputs], [{}])
    sharded = jaxdp.shard_batch(numbered(4), jaxdp.data_mesh(2))
    with refuses(ValueError, "parallel_apply", "replica 0", "2 devices"):
        parallel_apply(product, [put([1], 0)], [(sharded,)])
