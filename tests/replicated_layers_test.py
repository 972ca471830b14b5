import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxdp
from jaxdp.replicated.views.hooks import hooked
from jaxdp.replicated.views.layers import layers

ORDER = [3, 1, 0, 2]
ROWS = [3, 3, 3, 1]  # 10 rows on 4 devices


class Scale(nnx.Module):
    def __init__(self, value):
        self.value = nnx.Param(jnp.array(value))

    def __call__(self, x):
        return x * self.value


class Both(Scale):  # calls the method it overrides
    def __call__(self, x):
        y = super().__call__(x)
        return y, {"int": y.astype(jnp.int16)}


class Block(nnx.Module):
    def __init__(self, value):
        self.first = Scale(value)
        self.table = nnx.Dict({"a/b": Both(value + 1.0)})

    def __call__(self, x):
        return self.table["a/b"](self.first(self.first(x)))[0]


class Net(nnx.Module):
    def __init__(self):
        self.blocks = nnx.List([Block(2.0), Block(3.0)])
        self.unused = Scale(9.0)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def of_block(i):
    """What one block reports, by hand."""
    first, both = f"blocks.{i}.first", f"blocks.{i}.table.a/b"
    return [
        (first, "Scale"),
        (first, "Scale"),
        (both, "Both"),
        (f"blocks.{i}", "Block"),
    ]


def test_nnx_layers_are_on_their_replicas_devices():
    x = np.arange(20, dtype=np.float32).reshape(10, 2)
    model = jaxdp.replicated.from_nnx(Net(), device_ids=ORDER, output_device=5)
    found = layers(model, x)
    expected = [*of_block(0), *of_block(1), ("Net", "Net")]
    for replica, (device, rows) in enumerate(zip(ORDER, ROWS, strict=True)):
        own = [layer for layer in found if layer.replica == replica]
        assert [(layer.path, layer.kind) for layer in own] == expected
        assert {layer.device for layer in own} == {jax.devices()[device]}
        several = own[2]
        assert several.shape == ((rows, 2), (rows, 2))
        assert several.dtype == ("float32", "int16")
        assert several.nbytes == rows * 2 * (4 + 2)
        assert {layer.shape for layer in own if layer.kind != "Both"} == {(rows, 2)}
        assert {layer.nbytes for layer in own if layer.kind != "Both"} == {rows * 8}
    assert [layer.replica for layer in found] == [0] * 9 + [1] * 9 + [2] * 9 + [3] * 9


class Inner(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.Dense(5, name="wide")(x))


class Heir(Inner):
    @nn.compact
    def __call__(self, x):
        return super().__call__(x)


class Outer(nn.Module):
    def setup(self):
        self.parts = [Inner(), Heir()]
        self.again = nn.remat(Inner)()

    def __call__(self, x):
        return self.helper(self.again(self.parts[1](self.parts[0](x))))

    def helper(self, x):  # a method, but no call of a module
        return x


def test_linen_layers_are_on_their_replicas_devices():
    module, x = Outer(), jnp.arange(20.0).reshape(10, 2)
    variables = module.init(jax.random.key(0), x)
    model = jaxdp.replicated.from_linen(module, variables, device_ids=ORDER)
    found = layers(model, x)
    expected = []
    for part, kind in (("parts_0", "Inner"), ("parts_1", "Heir"), ("again", "Inner")):
        expected += [(f"{part}.wide", "Dense"), (f"{part}.Dense_0", "Dense")]
        expected += [(part, kind)]
    expected += [("Outer", "Outer")]
    for replica, (device, rows) in enumerate(zip(ORDER, ROWS, strict=True)):
        own = [layer for layer in found if layer.replica == replica]
        assert [(layer.path, layer.kind) for layer in own] == expected
        for layer in own:
            inside = layer.path.startswith("again")  # under jax.checkpoint
            assert layer.device == (None if inside else jax.devices()[device])
            assert layer.shape == (rows, 5 if layer.path.endswith("wide") else 4)


class Step(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        return carry + nn.Dense(2, name="dense")(x), x


JITTED = ("jitted.wide", "jitted.Dense_0", "jitted")


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x):
        scanned = nn.scan(
            Step, variable_broadcast="params", split_rngs={"params": False}, in_axes=1
        )
        zero = jnp.zeros((x.shape[0], 2))
        return nn.jit(Inner)(name="jitted")(scanned(name="step")(zero, x)[0])


def test_layers_inside_jit_and_scan_are_called_for_every_round():
    module, x = Loop(), jnp.arange(24.0).reshape(4, 3, 2)
    variables = module.init(jax.random.key(0), x)
    model = jaxdp.replicated.from_linen(module, variables, device_ids=[6, 4])
    for _ in range(2):  # a cached program would call nothing
        found = layers(model, x)
        assert [(layer.path, layer.device) for layer in found] == [
            (path, jax.devices()[device])
            for device in (6, 4)
            for path in [*["step.dense", "step"] * 3, *JITTED, "Loop"]
        ]


def test_what_a_layer_makes_from_nothing_is_on_its_device():
    class Zeros(nnx.Module):
        def __call__(self, x):
            return jnp.zeros(x.shape[0])

    model = jaxdp.replicated.from_nnx(Zeros(), device_ids=[2, 5])
    found = layers(model, np.ones(3))
    assert [(each.device, each.shape) for each in found] == [
        (jax.devices()[2], (2,)),
        (jax.devices()[5], (1,)),
    ]


def test_zero_length_scan_falls_back_to_a_compiled_one():
    class Nothing(nnx.Module):
        def __init__(self):
            self.scale = Scale(2.0)

        def __call__(self, x):
            x = self.scale(x)
            y, _ = jax.lax.scan(lambda c, z: (c + z, z), x, jnp.zeros((0, *x.shape)))
            return y

    model = jaxdp.replicated.from_nnx(Nothing(), device_ids=[1])
    found = layers(model, np.ones((2, 3), np.float32))
    assert [(each.path, each.device, each.shape) for each in found] == [
        (path, jax.devices()[1], (2, 3)) for path in ("scale", "Nothing")
    ]


def test_any_apply_fn_and_modules_made_in_it():
    class Maker(nnx.Module):
        def __call__(self, x):
            return Block(5.0)(x)

    class Around(nnx.Module):
        def __init__(self):
            self.maker = Maker()

        def __call__(self, x):
            return self.maker(x)

    around = Around()
    model = jaxdp.DataParallel(
        lambda w, x, *, k: around(nn.Dense(2).apply({"params": w}, x)) * k,
        {"kernel": jnp.ones((2, 2)), "bias": jnp.zeros(2)},
        device_ids=[1, 0],
    )
    found = layers(model, np.ones((4, 2), np.float32), k=np.ones((4, 1), np.float32))
    inside = [f"maker.Block.{name}" for name in ("first", "first", "table.a/b")]
    paths = ["Dense", *inside, "maker.Block", "maker", "Around"]
    assert [(each.replica, each.path) for each in found] == [
        (replica, path) for replica in (0, 1) for path in paths
    ]


def test_no_modules_no_layers():
    model = jaxdp.DataParallel(lambda w, x: w * x, jnp.array(2.0), device_ids=[0, 1])
    assert layers(model, np.arange(4.0, dtype=np.float32)) == []


def methods():
    kinds, waiting = {}, [nnx.Module]
    while waiting:
        kind = waiting.pop()
        kinds[kind] = vars(kind).get("__call__")
        waiting += kind.__subclasses__()
    return kinds


def test_model_module_and_classes_stay_as_they_are():
    class Counting(nnx.Module):
        def __init__(self):
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.norm(x)

    module = Counting()
    model = jaxdp.replicated.from_nnx(module, device_ids=[0, 1])
    before = jax.tree.map(np.array, (nnx.state(module), model.params))
    state = jax.tree.map(np.array, model.model_state)
    there = methods()
    layers(model, np.arange(8, dtype=np.float32).reshape(4, 2))
    assert methods() == there
    after = jax.tree.map(np.array, (nnx.state(module), model.params))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    jax.tree.map(np.testing.assert_array_equal, state, model.model_state)


def test_a_module_of_a_closure_is_not_changed():
    norm = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
    model = jaxdp.DataParallel(lambda w, x: norm(x) * w, jnp.ones(()), device_ids=[0])
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    with pytest.raises(Exception, match="Cannot mutate"):
        model(x)
    with pytest.raises(Exception, match="Cannot mutate"):
        layers(model, x)
    np.testing.assert_array_equal(norm.mean[...], [0, 0])


def test_captured_arrays_are_refused_as_by_the_model():
    there = jax.device_put(jnp.ones(()), jax.devices()[7])
    model = jaxdp.DataParallel(lambda w, x: w * x + there, jnp.ones(()), device_ids=[0])
    with pytest.raises(ValueError, match="captured there of shape"):
        layers(model, np.ones((4, 2), np.float32))


def not_one(x):
    if x.shape[0] == 1:
        raise ArithmeticError("one row is too few")
    return x


class Bad(nnx.Module):
    def __call__(self, x):
        return not_one(x)


class BadLinen(nn.Module):
    def __call__(self, x):
        return not_one(x)


@pytest.mark.parametrize("kind", ["nnx", "linen"])
def test_hooks_are_gone_after_an_error(kind):
    model = (
        jaxdp.replicated.from_nnx(Bad(), device_ids=ORDER)
        if kind == "nnx"
        else jaxdp.replicated.from_linen(BadLinen(), {"params": {}}, device_ids=ORDER)
    )
    there, seen, x = methods(), [], np.ones((10, 2), np.float32)
    with pytest.raises(ArithmeticError, match="Replica 3 on cpu:2, row 9 raised"):
        layers(model, x)
    assert methods() == there

    def hook(module, path, run):
        seen.append(path)
        return run()

    with pytest.raises(ArithmeticError), hooked(hook):
        model.apply_fn({}, x[:1])
    assert methods() == there
    model.apply_fn({}, x)
    assert seen == [type(Bad() if kind == "nnx" else BadLinen()).__name__]


def test_hooks_of_one_thread_leave_the_calls_of_another_alone():
    import threading

    seen, results, module = [], [], Scale(3.0)

    def hook(module, path, run):
        seen.append(path)
        return run()

    with hooked(hook):
        other = threading.Thread(target=lambda: results.append(module(2.0)))
        other.start()
        other.join()
        assert not seen
        results.append(module(5.0))
    assert seen == ["Scale"]
    assert [float(result) for result in results] == [6.0, 15.0]
