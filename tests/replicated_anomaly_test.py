import pathlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxdp
from jaxdp.replicated.views.anomaly import Anomaly, find_nan

KEY = "part/(1)"  # scopes of JAX have slashes and brackets of their own
LAYER = f"blocks.1.{KEY}"
ORDER = [3, 1, 0, 2]  # 10 rows: 3, 3, 3, 1
X = np.arange(1.0, 21.0, dtype=np.float32).reshape(10, 2)
Y = np.arange(10, dtype=np.float32)[:, None] / 8


def line_of(text):
    """The number of the one line that ends with a mark."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# {text}")]
    return number


class Log(nnx.Module):
    def __call__(self, x):
        return jnp.log(x)  # logs


class Scale(nnx.Module):
    def __init__(self, value):
        self.value = nnx.Param(jnp.array(value))

    def __call__(self, x):
        return x * self.value


class Root(Scale):
    def __call__(self, x):
        y = super().__call__(x) - 2.0  # 0 for x = 1 in the net below
        return jnp.where(y > 0, jnp.sqrt(y), 0.0)  # roots


class SafeRoot(Root):
    def __call__(self, x):
        y = Scale.__call__(self, x) - 2.0
        return jnp.where(y > 0, jnp.sqrt(jnp.where(y > 0, y, 1.0)), 0.0)


@jax.custom_vjp
def careless(x):
    return x * 2.0


def careless_back(x, cotangent):
    return (jnp.log(-x) * cotangent,)


careless.defvjp(lambda x: (x * 2.0, x), careless_back)


class Careless(Scale):
    def __call__(self, x):
        return super().__call__(careless(x * self.value))  # careless


class Net(nnx.Module):
    """Two blocks in a list, the second around the layer under test."""

    def __init__(self, layer):
        self.blocks: Any = nnx.List(
            [Scale(2.0), nnx.Dict({KEY: layer, "last": Scale(0.5)})]
        )
        self.mean = nnx.BatchStat(jnp.array(0.25))

    def __call__(self, x):
        x = self.blocks[0](x)
        x = self.blocks[1][KEY](x)
        return jnp.sum(self.blocks[1]["last"](x), axis=1, keepdims=True)


def from_net(layer, device_ids=ORDER, **options):
    return jaxdp.replicated.from_nnx(Net(layer), device_ids=device_ids, **options)


def squares(output, targets):
    return jnp.mean((output - targets) ** 2)


def first(*arguments: Any, **options: Any) -> Anomaly:
    found = find_nan(*arguments, **options)
    assert found is not None
    return found


def check(found, stage, device, replica, **others):
    assert (found.stage, found.device) == (stage, jax.devices()[device])
    assert found.replica == replica
    for name, value in others.items():
        assert getattr(found, name) == value


@pytest.mark.parametrize("loss_fn", [None, squares], ids=["forward", "training"])
def test_none_without_a_nan(loss_fn):
    model = from_net(Log(), output_device=5)
    targets = jax.device_put(Y, jax.devices()[7])
    assert find_nan(model, X, targets, loss_fn, kinds=("nan", "inf")) is None


@pytest.mark.parametrize("loss_fn", [None, squares], ids=["forward", "training"])
def test_in_a_parameter(loss_fn):
    model = from_net(Scale(jnp.nan))
    found = first(model, X, Y, loss_fn)
    where = f"params['blocks'][1]['{KEY}']['value']"
    check(found, "2 replicate", 3, None, where=where, kind="nan", operation="")
    assert str(found) == f"NaN first appears in stage 2 replicate, on cpu:3: {where}"


def test_in_a_buffer_and_in_a_state():
    model = from_net(Scale(1.0), [3, 1])
    state = model.train_step(squares, optax.sgd(0.1)).init()
    assert find_nan(model, X, Y, squares, state) is None
    bad = state._replace(model_state={"mean": jnp.array(jnp.inf)})
    found = first(model, X, Y, squares, bad, kinds=("nan", "inf"))
    check(found, "2 replicate", 3, None, where="model_state['mean']", kind="inf")
    bad = state._replace(params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    found = first(model, X, Y, squares, bad)
    check(found, "2 replicate", 3, None, where="params['blocks'][0]['value']")
    assert find_nan(model, X, Y, squares, state) is None  # not donated


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_in_rows_of_an_input(on_device):
    x, mask = X.copy(), X[:, :1].copy()
    mask[[7, 4], 0] = np.nan
    inputs = ({"x": x, "mask": mask},)
    if on_device:
        inputs = jax.device_put(inputs, jax.devices()[6])
    model = jaxdp.DataParallel(
        lambda w, batch: w * batch["x"] * batch["mask"], jnp.ones(()), device_ids=ORDER
    )
    found = first(model, inputs)
    check(found, "3 scatter", 1, 1, where="inputs[0]['mask'], row 4", layer="")
    text = "NaN first appears in stage 3 scatter, replica 1 on cpu:1: "
    assert str(found) == text + "inputs[0]['mask'], row 4"
    inputs[0]["mask"] = mask.copy()
    inputs[0]["mask"][4] = 1
    check(first(model, inputs), "3 scatter", 0, 2, where="inputs[0]['mask'], row 7")


def test_in_many_columns_along_another_dim():
    x = X.T.copy()
    x[1, 1:10] = np.inf
    model = jaxdp.DataParallel(
        lambda w, *, x: w * x, jnp.ones(()), device_ids=[4, 2], dim=-1
    )
    assert find_nan(model, (), x=x) is None
    found = first(model, (), x=x, kinds=("inf",))
    check(found, "3 scatter", 4, 0, kind="inf")
    assert found.where == "keywords['x'], rows 1, 2, 3, 4"
    wide = np.concatenate([x] * 4, axis=1)
    found = first(model, (), x=wide, kinds=("inf",))
    assert found.where == "keywords['x'], rows 1, 2, 3, 4, 5 and 13 more"


def test_in_a_constant_and_in_targets():
    model = jaxdp.DataParallel(
        lambda w, x, *, by: w * x * by, jnp.ones(()), device_ids=ORDER, output_device=6
    )
    found = first(model, X, by=float("nan"))
    check(found, "3 scatter", 3, None, where="keywords['by']")
    targets = {"y": X.copy()}
    targets["y"][8] = np.nan
    x = X.copy()
    x[0] = np.nan  # comes later
    found = first(model, x, targets, by=2.0)
    check(found, "1 place", 6, None, where="targets['y'], row 8")


@pytest.mark.parametrize("loss_fn", [None, squares], ids=["forward", "training"])
def test_in_the_layer_of_one_replica(loss_fn):
    x = X.copy()
    x[[5, 9]] *= -1
    found = first(from_net(Log(), output_device=5), x, Y, loss_fn)
    check(found, "4 forward", 1, 1, layer=LAYER, operation="log")
    assert found.where == "rows 3 to 5"
    line = f"{pathlib.Path(__file__)}:{line_of('logs')} (Log.__call__)"
    assert found.source == line
    assert str(found) == (
        "NaN first appears in stage 4 forward, replica 1 on cpu:1 (rows 3 to 5), "
        f"layer '{LAYER}', operation log, at {pathlib.Path(line).name}"
    )
    x[5] *= -1
    found = first(from_net(Log()), x, Y, loss_fn)
    check(found, "4 forward", 2, 3, layer=LAYER, where="row 9")


class Part(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jnp.log(nn.Dense(2, name="a", kernel_init=nn.initializers.ones)(x))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Part)()(nn.Dense(2, kernel_init=nn.initializers.ones)(x))


def test_in_a_linen_layer_under_checkpoint():
    module = Linen()
    variables = module.init(jax.random.key(0), X)
    model = jaxdp.replicated.from_linen(module, variables, device_ids=ORDER)
    x = X.copy()
    assert find_nan(model, x, Y, squares) is None
    x[6] *= -1
    for training in ((), (Y, squares)):
        found = first(model, x, *training)
        check(found, "4 forward", 0, 2, operation="log", where="rows 6 to 8")
        assert found.layer.endswith("Part_0")
        assert found.source.endswith("(Part.__call__)")


def test_of_a_layer_of_flax_the_line_that_calls_it():
    class Negative(nnx.Module):
        def __init__(self):
            self.inner = nnx.Sequential(Scale(-1.0), jnp.log)

        def __call__(self, x):
            return self.inner(x)  # calls flax

    found = first(jaxdp.replicated.from_nnx(Negative(), device_ids=[1]), X)
    check(found, "4 forward", 1, 0, layer="inner", operation="log")
    assert f"{__file__}:{line_of('calls flax')} " in found.source
    module = nnx.Sequential(Scale(-1.0), jnp.log)  # here no line but its own
    found = first(jaxdp.replicated.from_nnx(module, device_ids=[1]), X)
    assert found.source.endswith("(Sequential.__call__)")


def test_a_nan_that_is_dropped_does_not_count():
    def apply_fn(w, x):
        unused = jnp.log(-x)  # no result depends on it
        del unused
        safe = jnp.where(x > 0, jnp.log(x), 0.0)  # NaN for x < 0, and dropped
        return jnp.sqrt(w * safe - 1.0)  # the first that counts

    model = jaxdp.DataParallel(apply_fn, jnp.ones(()), device_ids=[2, 3])
    x = np.array([8.0, 9.0, -3.0, 7.0], np.float32)
    found = first(model, x)
    check(found, "4 forward", 3, 1, operation="sqrt", layer="")
    assert f":{line_of('the first that counts')} " in found.source
    assert find_nan(model, x[:2]) is None


def test_of_two_the_first():
    model = jaxdp.DataParallel(
        lambda w, x: (jnp.sqrt(x) * 1.0, jnp.log(w * x)), jnp.ones(()), device_ids=[3]
    )
    check(first(model, -X), "4 forward", 3, 0, operation="sqrt")


@pytest.mark.parametrize("how", ["jit", "checkpoint", "custom_jvp", "scan", "cond"])
def test_inside_what_calls_programs(how):
    def inner(x):
        return jnp.log(x)  # inside

    def outer(x):
        if how == "jit":
            return jax.jit(inner)(x)
        if how == "checkpoint":
            return jax.checkpoint(inner)(x)
        if how == "custom_jvp":
            function = jax.custom_jvp(inner)
            function.defjvps(lambda tangent, y, x: tangent / x)
            return function(x)
        if how == "cond":
            return jax.lax.cond(jnp.all(x < 1e9), inner, lambda x: x, x)  # cond
        return jax.lax.scan(lambda c, x: (c, inner(x)), 0.0, x)[1]

    model = jaxdp.DataParallel(
        lambda w, x: outer(w * x) + 1.0, jnp.ones(()), device_ids=[5, 2]
    )
    x = X.copy()
    x[9] = -1
    for _ in range(2):
        found = first(model, x)
        check(found, "4 forward", 2, 1, where="rows 5 to 9")
        assert found.operation == ("cond" if how == "cond" else "log")
        line = line_of("cond" if how == "cond" else "inside")
        assert f"{pathlib.Path(__file__).name}:{line} " in found.source


def test_a_constant_of_the_function():
    model = jaxdp.DataParallel(lambda w, x: w * x * jnp.nan, jnp.ones(()))
    check(first(model, X), "4 forward", 0, 0, operation="mul", where="rows 0 to 1")
    model = jaxdp.DataParallel(lambda w, x: jnp.full(3, jnp.nan), jnp.ones(()))
    check(first(model, X), "4 forward", 0, 0, operation="broadcast_in_dim")


def test_not_there_when_evaluated_once_more():
    calls = []

    def moody(x):
        calls.append(1)
        return np.full_like(x, np.nan if len(calls) == 1 else 1.0)

    def apply_fn(w, x):
        return w * jax.pure_callback(moody, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    model = jaxdp.DataParallel(apply_fn, jnp.ones(()), device_ids=[4])
    found = first(model, X)
    check(found, "4 forward", 4, 0, operation="", layer="")
    assert found.where == "rows 0 to 9, made by no single operation"


def test_in_the_loss():
    def loss_fn(output, targets):
        return jnp.mean(jnp.log(output - targets))  # loss

    y = np.zeros((10, 1), np.float32)
    model = from_net(Scale(1.0), [3, 1], output_device=5)
    assert find_nan(model, X, y, loss_fn) is None
    found = first(model, X, y + 1e3, loss_fn)
    check(found, "6 loss", 5, None, where="loss", operation="log", layer="")
    assert f":{line_of('loss')} " in found.source


def test_in_the_gradient_of_the_loss_alone():
    def loss_fn(output, targets):
        return jnp.mean(jnp.where(output > targets, jnp.sqrt(output - targets), 0.0))

    y = np.sum(X, axis=1, keepdims=True) - 1.0
    model = from_net(Scale(1.0), [3, 1], output_device=4)
    assert find_nan(model, X, y, loss_fn) is None
    y[3] += 1.0
    found = first(model, X, y, loss_fn)
    check(found, "6 loss", 4, None, where="gradient of the output of replica 0")
    assert found.operation == "mul"


def test_in_a_metric_and_in_the_weight():
    def with_metric(output, targets):
        loss = squares(output, targets)
        return loss, jaxdp.Aux(metrics={"a": jnp.log(-loss), "b": loss})

    def with_weight(output, targets):
        return jaxdp.Mean(jnp.sum(output - targets), jnp.sum(targets * 0.0))

    model = from_net(Scale(1.0), [3, 1])
    found = first(model, X, Y, with_metric)
    check(found, "6 loss", 3, None, where="metrics['a']", operation="log")
    assert find_nan(model, X, Y, with_weight) is None  # x / 0 is infinite
    found = first(model, X, Y, with_weight, kinds=("inf",))
    check(found, "6 loss", 3, None, where="loss", operation="div", kind="inf")


@pytest.mark.parametrize(
    ("layer", "operation", "mark"),
    [(Root(1.0), "mul", "roots"), (Careless(1.0), "log", "careless")],
    ids=["sqrt(0)", "custom_vjp"],
)
def test_in_the_backward_pass_alone(layer, operation, mark):
    model = from_net(layer, [1, 2], output_device=7)
    x = X.copy()
    if mark == "careless":
        x = -x
        assert find_nan(model, x, Y, squares) is None
        x[9] *= -1
    else:
        x += 5.0
        assert find_nan(model, x, Y, squares) is None
        x[9, 1] = 1.0
        assert find_nan(from_net(SafeRoot(1.0), [1, 2]), x, Y, squares) is None
    assert find_nan(model, x) is None
    found = first(model, x, Y, squares)
    check(found, "7 backward", 2, 1, layer=LAYER, operation=operation)
    assert found.where == "rows 5 to 9, gradient of params['blocks'][0]['value']"
    assert f":{line_of(mark)} " in found.source


def test_a_nan_dropped_forward_that_spoils_the_gradient():
    def apply_fn(w, x):
        return jnp.where(x > 0, jnp.sqrt(w * x), 0.0)  # spoils

    model = jaxdp.DataParallel(apply_fn, jnp.ones(()), device_ids=[6, 1])
    x = np.array([1.0, 2.0, 3.0, -4.0], np.float32)
    assert find_nan(model, x, x, squares, kinds=("nan", "inf")) is not None
    found = first(model, x, x, squares)
    check(found, "4 forward", 1, 1, operation="sqrt")
    assert found.where == "rows 2 to 3, gradient of params"
    assert f":{line_of('spoils')} " in found.source


def test_in_the_sum_of_gradients():
    def loss_fn(output, targets):
        return jnp.sum(output * targets)

    model = jaxdp.DataParallel(
        lambda params, x: x * params["w"], {"w": jnp.ones(())}, device_ids=[6, 1]
    )
    x = np.array([1.0, 2.0], np.float32)
    targets = np.array([3e38, -1e38], np.float32)  # gradients 3e38 and -2e38
    assert find_nan(model, x, targets, loss_fn, kinds=("inf",)) is None
    x[:] = [0.9, 0.8]
    small = {"w": jnp.array(0.1)}
    model = jaxdp.DataParallel(model.apply_fn, small, device_ids=[6, 1])
    targets = np.array([3e38, 2e38], np.float32)  # 2.7e38 and 1.6e38, their sum no more
    found = first(model, x, targets, loss_fn, kinds=("inf",))
    check(found, "8 reduce", 6, None, operation="add", layer="")
    assert found.where == "gradient of params['w']"
    assert find_nan(model, x, targets, loss_fn) is None


def test_in_a_gradient_divided_by_its_weight():
    def loss_fn(output, targets):
        return jaxdp.Mean(jnp.sum(output) * 0.0 + 1.0, jnp.sum(targets) * 0.0)

    model = jaxdp.DataParallel(
        lambda w, x: x * w, jnp.ones(()), device_ids=[6, 1], output_device=4
    )
    found = first(model, X, Y, loss_fn)
    check(found, "8 reduce", 6, None, operation="div", where="gradient of params")


def test_in_the_forward_rule_of_training_alone():
    @jax.custom_vjp
    def function(x):
        return x + 1.0

    function.defvjp(lambda x: (jnp.log(-x), x), lambda x, cotangent: (cotangent,))
    model = jaxdp.DataParallel(
        lambda w, x: function(w * x), jnp.ones(()), device_ids=[6, 1]
    )
    assert find_nan(model, X) is None
    found = first(model, X, Y, squares)
    check(found, "4 forward", 6, 0, operation="log", where="rows 0 to 4")


def test_infinities():
    x = X.copy()
    x[8, 0] = 0.0
    model = from_net(Log())
    assert find_nan(model, x) is None
    found = first(model, x, kinds=("nan", "inf"))
    check(found, "4 forward", 0, 2, kind="inf", operation="log", layer=LAYER)
    assert str(found).startswith("Infinity first appears in stage 4 forward, replica 2")


@pytest.mark.parametrize("kinds", ["nan", (), ("nan", "big"), None, [["nan"]]], ids=str)
def test_other_kinds_are_refused(kinds):
    model = jaxdp.DataParallel(lambda w, x: w * x, jnp.ones(()))
    with pytest.raises(ValueError, match="2 kinds of numbers, 'nan' and 'inf'"):
        find_nan(model, X, kinds=kinds)


def test_what_a_step_refuses_is_refused():
    model = jaxdp.DataParallel(lambda w, x: w * x, jnp.array(2), device_ids=[0])
    with pytest.raises(TypeError, match="int32"):
        find_nan(model, X, Y, squares)
    model = jaxdp.DataParallel(lambda w, x: w * x, jnp.ones(()), device_ids=[0])
    step = model.train_step(lambda o, t: jnp.mean(o), optax.sgd(0.1))
    state = step.init()
    step(state, X, None)
    with pytest.raises(RuntimeError, match="A train step got a state"):
        find_nan(model, X, Y, squares, state)


def test_jax_may_be_told_to_raise_at_a_nan():
    x = X.copy()
    x[0] *= -1
    with jax.debug_nans(True), jax.debug_infs(True):
        found = first(from_net(Log()), x)
        assert jax.config.values["jax_debug_nans"]
    check(found, "4 forward", 3, 0, operation="log")


def test_everything_stays_as_it_is():
    class Raises(Scale):
        def __call__(self, x):
            if len(calls) > limit:
                raise ArithmeticError("too often")
            calls.append(1)
            return jnp.log(x)

    calls, limit = [], 100
    there = [vars(kind).get("__call__") for kind in (Scale, Net, Log, Raises, nnx.Dict)]
    model = from_net(Raises(1.0))
    before = jax.tree.map(np.array, (model.params, model.model_state))
    assert find_nan(model, -X) is not None
    limit = len(calls) - 1  # the first trace of the hunt raises: programs are cached
    with pytest.raises(ArithmeticError, match="too often"):
        find_nan(model, -X)
    after = (model.params, model.model_state)
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert there == [
        vars(kind).get("__call__") for kind in (Scale, Net, Log, Raises, nnx.Dict)
    ]
    assert not jax.config.values["jax_disable_jit"]
