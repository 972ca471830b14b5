import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import targets
from jaxdp.targets import compile_for
from jaxdp.targets.compile import DEFAULT_OPTIONS
from tests.compilers import instructions, needs_compiler, shape, text_of

pytestmark = needs_compiler("h100")


def here(target):
    """Eight devices: of this machine, or of a target."""
    return targets.mesh(target) if target else jaxdp.data_mesh(8)


def two_axes(target):
    devices = np.asarray(here(target).devices).reshape(4, 2)
    return Mesh(devices, ("row", "column"))


def a_ring(target):
    def body(x, w):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
        return w - jaxdp.all_reduce(gradient, "data", algorithm="ring")

    step = jax.shard_map(
        body, mesh=here(target), in_specs=(P("data"), P()), out_specs=P()
    )
    return jax.jit(step, donate_argnums=1), (shape(16, 6), shape(6, 5))


def nested(target):
    """A scan, a custom derivative and a jit, inside and outside of the shard_map."""

    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), x), lambda x, c: (c * jnp.cos(x),))

    def body(x, w):
        def total(w):
            layer = jax.jit(lambda h: sine(h @ w))
            h, _ = jax.lax.scan(lambda h, _: (layer(h), None), x, None, length=3)
            return h.sum()

        return jaxdp.all_reduce(jax.grad(total)(w), "data", mean=True)

    mapped = jax.shard_map(
        body, mesh=here(target), in_specs=(P("data"), P()), out_specs=P()
    )
    return jax.jit(lambda x, w: 2 * mapped(x, w)), (shape(16, 6), shape(6, 6))


def on_two_axes(target):
    mapped = jax.shard_map(
        lambda x: jax.lax.psum(x, "row"),
        mesh=two_axes(target),
        in_specs=P("row", "column"),
        out_specs=P(None, "column"),
    )
    return mapped, (shape(8, 6),)


def partitioned(target):
    """Shardings of a jit, of trees, without a shard_map."""
    rows = NamedSharding(two_axes(target), P("row"))
    columns = NamedSharding(two_axes(target), P(None, "column"))

    def step(weights, batch):
        return {"w": weights["w"] - jnp.sum(jnp.tanh(batch["x"] @ weights["w"]))}

    shardings = {"in_shardings": ({"w": columns}, {"x": rows}), "out_shardings": None}
    return jax.jit(step, donate_argnums=0, **shardings), (
        {"w": shape(6, 4)},
        {"x": shape(8, 6)},
    )


def constrained(target):
    rows = NamedSharding(here(target), P("data"))

    def product(x):
        return jax.lax.with_sharding_constraint(x @ x.T, rows).sum(0)

    return product, (shape(16, 16),)


def arguments(target):
    """Arguments alone say where they are."""
    rows = NamedSharding(here(target), P("data"))
    return jax.jit(lambda x: x.sum(0)), (shape(16, 3, sharding=rows),)


def explicit(target):
    """Types say where arrays are."""
    mesh = jax.make_mesh((8,), ("data",), devices=list(here(target).devices))
    rows = NamedSharding(mesh, P("data"))
    return jax.jit(lambda x: (2 * x).sum(0)), (shape(16, 3, sharding=rows),)


@pytest.mark.parametrize(
    ("make", "target"),
    [
        *((make, "h100") for make in (a_ring, nested, on_two_axes, partitioned)),
        *((make, "h100") for make in (constrained, arguments, explicit)),
        pytest.param(a_ring, "tpu-v5e", marks=needs_compiler("tpu-v5e")),
        pytest.param(partitioned, "tpu-v5e", marks=needs_compiler("tpu-v5e")),
    ],
)
def test_a_moved_program_is_what_the_target_compiles(make, target):
    fn, args = make(None)
    compiled = compile_for(fn, *args, target=target)
    fn, args = make(target)
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    options = DEFAULT_OPTIONS[targets.chip(target).backend]
    expected = jitted.lower(*args).compile(compiler_options=options)
    assert instructions(compiled) == instructions(expected)
    given = jax.tree.leaves(compiled.input_shardings)
    assert {len(sharding.device_set) for sharding in given} == {8}
    aliases = [
        re.search(r"input_output_alias=.*?\) \}", text_of(program))
        for program in (compiled, expected)
    ]
    assert len({alias and alias.group() for alias in aliases}) == 1


def test_trees_and_shardings_are_kept():
    fn, args = partitioned(None)
    compiled = compile_for(fn, *args)
    (weights, batch), _ = compiled.input_shardings
    assert weights["w"].spec == P(None, "column")
    assert batch["x"].spec == P("row")
    assert weights["w"].mesh.axis_names == ("row", "column")
    assert compiled.in_avals[0][0]["w"].shape == (6, 4)
    assert [*compiled.out_info] == ["w"]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P()
        )(x),
        lambda x: jax.lax.with_sharding_constraint(x, P("data")).sum(0),
    ],
    ids=["shard_map", "constraint"],
)
def test_a_function_that_asks_for_a_mesh_gets_the_targets(ask):
    for x in (shape(16, 3), np.ones((16, 3), np.float32)):
        assert " all-reduce" in text_of(compile_for(ask, x))


@pytest.mark.parametrize("target", [None, "h100"], ids=["here", "on the target"])
def test_under_a_mesh_of_the_caller(target):
    def total(x):
        return jax.shard_map(
            lambda x: jax.lax.psum(x, "data"), in_specs=P("data"), out_specs=P()
        )(x)

    with jax.set_mesh(here(target)):
        assert " all-reduce" in text_of(compile_for(total, shape(16, 3)))


def test_a_pmap():
    average = jax.pmap(lambda x: jaxdp.all_reduce(x, "i"), axis_name="i")
    report = jaxdp.analyze(compile_for(average, shape(8, 32)))
    assert report.sent_bytes == (2 * 7 * 4 * 4,) * 8


def test_arrays_here_and_static_arguments():
    fn = jax.jit(lambda times, key, x: times * x + jax.random.key_data(key)[0],
                 static_argnums=0)  # fmt: skip
    compiled = compile_for(fn, 3, jax.random.key(0), jnp.ones((5,)), devices=1)
    assert [x.shape for x in jax.tree.leaves(compiled.in_avals)] == [(), (5,)]
    assert "constant(3)" in text_of(compiled)


def test_unused_arguments_are_kept_if_the_function_keeps_them():
    for keep_unused, parameters in ((False, 1), (True, 2)):
        fn = jax.jit(lambda x, y: 2 * x, keep_unused=keep_unused)
        compiled = compile_for(fn, shape(3), shape(7), devices=1)
        entry = text_of(compiled).split("\nENTRY")[1]
        assert entry.count(" parameter(") == parameters


def test_options_of_the_functions_own_jit_are_kept():
    fn = jax.jit(lambda x: 2 * x, compiler_options={"xla_no_such_option": True})
    with pytest.raises(Exception, match="xla_no_such_option"):
        compile_for(fn, shape(3), devices=1)


@pytest.mark.parametrize(("size", "devices"), [(8, 4), (2, 8)])
def test_a_mesh_of_another_size(size, devices):
    rows = NamedSharding(jaxdp.data_mesh(size), P("data"))
    double = jax.jit(lambda x: 2 * x, in_shardings=rows)
    expected = (
        rf"devices={devices} and <lambda>, a function for {size} device\(s\).*Pass "
        rf"devices={size}, or make .*jaxdp.targets.mesh\(target, {devices}\)"
    )
    with pytest.raises(ValueError, match=expected):
        compile_for(double, shape(16), devices=devices)


def test_what_is_no_function():
    compiled = jax.jit(jnp.tanh).lower(shape(3)).compile()
    for given in (5, text_of(compiled)):
        with pytest.raises(TypeError, match=r"It must be a function, jitted or not"):
            compile_for(given)


def test_an_error_of_the_function_is_its_own():
    def refuse(x):
        raise ValueError(f"the function refuses {x.shape}")

    with pytest.raises(ValueError, match=r"the function refuses \(3,\)"):
        compile_for(refuse, shape(3), devices=1)
