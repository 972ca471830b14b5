import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import targets
from jaxdp.targets import compile as compiling
from jaxdp.targets import compile_for, plugin
from tests.compilers import count, instructions, needs_compiler, shape, text_of

ROWS = 16
PARAMS = {"w": jnp.ones((6, 4)), "b": jnp.ones((4,))}
BATCH = {
    "x": jax.ShapeDtypeStruct((ROWS, 6), jnp.float32),
    "y": jax.ShapeDtypeStruct((ROWS, 4), jnp.float32),
}
# Its two leaves and the loss would be combined if the platform's options were lost.
A_BUCKET_EACH = jaxdp.NativeAllReduce(bucket_cap_mb=1e-6)


def loss_fn(params, batch):
    return jnp.mean((batch["x"] @ params["w"] + params["b"][None] - batch["y"]) ** 2)


def training(mesh, design=None, loss_fn=loss_fn):
    design = design or jaxdp.RingAllReduce()
    return jaxdp.data_parallel(loss_fn, optax.adam(0.1), mesh, design)


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=needs_compiler(t)) for t in targets.NAMES]
)
def test_every_target_compiles(target):
    mesh = jaxdp.data_mesh(2)
    total = jax.shard_map(
        lambda x: jax.lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    compiled = compile_for(total, shape(2, 128), target=target, devices=2)
    assert count(compiled, "all-reduce") == 1
    (sharding,) = {*jax.tree.leaves(compiled.input_shardings)}
    (kind,) = {device.device_kind for device in sharding.device_set}
    assert kind == targets.chip(target).kind
    assert len(sharding.device_set) == 2


@needs_compiler("h100")
def test_a_step_is_what_a_training_on_the_target_compiles_to():
    here = training(jaxdp.data_mesh(1))
    there = training(targets.mesh("h100", 8))
    state = jax.eval_shape(here.init, PARAMS)
    options = compiling.DEFAULT_OPTIONS["cuda"]
    expected = there.lower(state, BATCH).compile(compiler_options=options)
    compiled = compile_for(here.step, PARAMS, BATCH, target="h100")
    assert instructions(compiled) == instructions(expected)
    assert count(compiled, "collective-permute") == 14
    assert "input_output_alias" in text_of(compiled).splitlines()[0]


@needs_compiler("h100")
def test_a_step_of_a_state_is_that_of_its_parameters():
    train = training(jaxdp.data_mesh(4))
    state = train.init(PARAMS)
    arrays = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), BATCH)
    of_state = compile_for(train.step, state, arrays, target="h100")
    assert of_state is compile_for(train.step, PARAMS, BATCH, target="h100")


@needs_compiler("h100")
@pytest.mark.parametrize(
    ("design", "all_reduces"),
    [(jaxdp.NativeAllReduce(), 1), (A_BUCKET_EACH, 3)],
    ids=["combined", "not combined"],
)
def test_a_step_keeps_the_options_of_its_design_on_the_target(design, all_reduces):
    train = training(jaxdp.data_mesh(1), design)
    compiled = compile_for(train.step, PARAMS, BATCH, target="h100")
    assert count(compiled, "all-reduce") == all_reduces


@needs_compiler("h100")
@pytest.mark.parametrize(
    ("function", "permutes"), [("init", 0), ("params", 0), ("flush", 14)]
)
def test_other_programs_of_a_training(function, permutes):
    design = jaxdp.ParameterServer(servers=2, max_staleness=1)
    train = training(jaxdp.data_mesh(2), design)
    compiled = compile_for(getattr(train, function), PARAMS, target="h100")
    assert count(compiled, "collective-permute") == permutes


@needs_compiler("h100")
def test_a_training_on_two_axes_keeps_the_second():
    devices = np.array(jax.devices()).reshape(2, 4)
    train = training(
        Mesh(devices, ("worker", "device")), jaxdp.ParameterServer(servers=1)
    )
    compiled = compile_for(train.step, PARAMS, BATCH, target="h100", devices=16)
    meshes = {s.mesh for s in jax.tree.leaves(compiled.input_shardings)}
    assert {tuple(mesh.shape.items()) for mesh in meshes} == {
        (("worker", 4), ("device", 4))
    }


@needs_compiler("h100")
def test_an_axis_may_have_any_name():
    train = training(jaxdp.data_mesh(2, "replica"))
    compiled = compile_for(train.step, PARAMS, BATCH, target="h100", devices=4)
    assert count(compiled, "collective-permute") == 6


@needs_compiler("h100")
def test_equal_programs_are_compiled_once():
    mesh = jaxdp.data_mesh(4)

    def compiled(target="h100", **more):
        total = jax.shard_map(
            lambda x: 3 * jax.lax.psum(x, "data"),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
        return compile_for(total, shape(4, 7), target=target, devices=4, **more)

    first = compiled()
    misses = compiling._compiled.cache_info().misses
    assert compiled() is first
    assert compiling._compiled.cache_info().misses == misses
    others = [
        compiled(hosts=2),
        compiled(compiler_options={"xla_embed_ir_in_executable": True}),
        compiled("h200"),
    ]
    assert len({id(each) for each in (first, *others)}) == 4


class WithTriton(jaxdp.NativeAllReduce):
    def compiler_options(self, platform):
        return {"xla_gpu_enable_triton_gemm": True} if platform == "gpu" else {}


@needs_compiler("h100")
@pytest.mark.parametrize(
    ("design", "expected"), [(jaxdp.NativeAllReduce(), True), (WithTriton(), False)]
)
def test_options_of_a_design_go_before_the_defaults(design, expected):
    train = training(jaxdp.data_mesh(1), design)
    params = {"w": shape(128, 128), "b": shape(128)}
    batch = {"x": shape(1024, 128), "y": shape(1024, 128)}
    program = text_of(compile_for(train.step, params, batch))
    assert ("__cublas" in program) == expected


@needs_compiler("h100")
def test_other_names_of_arguments_are_another_program():
    def compiled(name):
        return compile_for(
            lambda tree: tree[name] * 2, {name: shape(3)}, target="h100", devices=1
        )

    assert [*compiled("left").in_avals[0][0]] == ["left"]
    assert [*compiled("right").in_avals[0][0]] == ["right"]


@pytest.mark.parametrize(
    ("target", "hosts"),
    [
        pytest.param("h100", 2, marks=needs_compiler("h100")),
        pytest.param("tpu-v5e", 4, marks=needs_compiler("tpu-v5e")),
    ],
)
def test_devices_stand_host_by_host(target, hosts):
    mesh = targets.mesh(target, 16, hosts)
    expected = [i // (16 // hosts) for i in range(16)]
    assert [device.process_index for device in mesh.devices] == expected


@needs_compiler("tpu-v5e")
@pytest.mark.parametrize(
    ("devices", "far"), [(1, [0, 0]), (2, [0, 1]), (8, [1, 3]), (256, [15, 15])]
)
def test_tpus_stand_in_a_square_torus(devices, far):
    mesh = targets.mesh("tpu-v5e", devices)
    coordinates = np.array([device.coords[:2] for device in mesh.devices])
    assert coordinates.max(0).tolist() == far


@needs_compiler("h100")
def test_64_gpus_in_8_hosts():
    train = training(jaxdp.data_mesh(1), jaxdp.NativeAllReduce())
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype), BATCH
    )
    compiled = compile_for(
        train.step, PARAMS, batch, target="h100", devices=64, hosts=8
    )
    assert jaxdp.analyze(compiled).devices == 64


@needs_compiler("h100")
def test_errors_of_the_compiler_arrive():
    with pytest.raises(Exception, match="xla_there_is_no_such_option"):
        compile_for(
            *(jnp.tanh, shape(4)),
            target="h100",
            devices=1,
            compiler_options={"xla_there_is_no_such_option": True},
        )


@pytest.mark.parametrize(
    ("target", "remedy"), [("H100", "Did you mean 'h100'"), ("abacus", "Choose one")]
)
def test_unknown_target(target, remedy):
    expected = rf"target='{target}'. It must be one of h100, h200, .*tpu-v6e. {remedy}"
    with pytest.raises(ValueError, match=expected):
        compile_for(jnp.tanh, shape(4), target=target)


@pytest.mark.parametrize(("devices", "hosts", "use"), [(6, 4, 8), (3, 2, 4)])
def test_devices_that_do_not_divide_into_hosts(devices, hosts, use):
    expected = (
        rf"compile_for got devices={devices} and hosts={hosts}.* {devices} is no "
        rf"multiple of {hosts}. Use devices={use}"
    )
    with pytest.raises(ValueError, match=expected):
        compile_for(jnp.tanh, shape(4), devices=devices, hosts=hosts)


@pytest.mark.parametrize(("devices", "hosts"), [(0, 2), (3, -1)])
def test_numbers_below_one(devices, hosts):
    expected = (
        rf"targets\.mesh got .*Use devices={devices or 1} and hosts={max(hosts, 1)}"
    )
    with pytest.raises(ValueError, match=expected):
        targets.mesh("h100", devices, hosts)


@pytest.mark.parametrize("devices", [6, 512])
def test_a_torus_that_does_not_exist(devices):
    expected = rf"targets\.mesh got devices={devices} for TPU v5e.* 256 chips"
    with pytest.raises(ValueError, match=expected):
        targets.mesh("tpu-v5e", devices)


@pytest.mark.parametrize(
    ("target", "module"), [("a100", "jax_plugins.xla_cuda12"), ("tpu-v6e", "libtpu")]
)
def test_without_the_compiler(monkeypatch, target, module):
    monkeypatch.setattr(plugin, "_installed", lambda name: False)
    expected = rf"no module '{module}'.*pip install 'jax-data-parallel\[compile\]'"
    with pytest.raises(ModuleNotFoundError, match=expected):
        compile_for(jnp.tanh, shape(4), target=target)
    assert module in targets.missing(target)


def test_a_module_of_a_missing_package_is_not_installed():
    assert not plugin._installed("no_such_package.module")


def test_a_compiler_of_another_version(monkeypatch):
    versions = {"jaxlib": "0.12.3", "jax-cuda12-plugin": "0.11.2"}
    monkeypatch.setattr(plugin, "_installed", lambda name: True)
    monkeypatch.setattr(plugin.importlib.metadata, "version", versions.__getitem__)
    expected = (
        r"jax-cuda12-plugin is 0.11.2 and jaxlib is 0.12.3.*"
        rf"pip install 'jax\[cuda12-local\]=={jax.__version__}'"
    )
    with pytest.raises(ModuleNotFoundError, match=expected):
        compile_for(jnp.tanh, shape(4))


@needs_compiler("h100")
def test_refused_functions_of_a_training():
    train = training(jaxdp.data_mesh(1))
    with pytest.raises(TypeError, match=r"train.buckets, which is no program"):
        compile_for(train.buckets, PARAMS)
    with pytest.raises(TypeError, match=r"train.step and 1 argument\(s\). It needs 2"):
        compile_for(train.step, PARAMS)
    with pytest.raises(TypeError, match=r"train.init and 2 argument\(s\). It needs 1"):
        compile_for(train.init, PARAMS, BATCH)
    with pytest.raises(ValueError, match=r"flush of RingAllReduce, .*max_staleness=0"):
        compile_for(train.flush, PARAMS)


@needs_compiler("h100")
def test_a_design_for_more_devices_than_the_target_has():
    train = training(jaxdp.data_mesh(8), jaxdp.ParameterServer(servers=8))
    with pytest.raises(ValueError, match=r"servers=8 .* on 4 ranks"):
        compile_for(train.step, PARAMS, BATCH, devices=4)


@needs_compiler("h100")
def test_two_axes_that_do_not_divide_the_devices():
    devices = np.array(jax.devices()[:6]).reshape(2, 3)
    train = training(
        Mesh(devices, ("worker", "device")), jaxdp.ParameterServer(servers=1)
    )
    with pytest.raises(ValueError, match=r"multiple of 3: 8 is none. Use devices=6"):
        compile_for(train.step, PARAMS, BATCH, devices=8)


@needs_compiler("h100")
def test_callbacks_are_explained():
    def chatty(params, batch):
        jax.debug.print("{}", params["b"])
        return loss_fn(params, batch)

    train = training(jaxdp.data_mesh(1), loss_fn=chatty)
    moved = jax.shard_map(
        lambda x: (jax.debug.print("{}", x), x)[1],
        mesh=jaxdp.data_mesh(8),
        in_specs=P("data"),
        out_specs=P("data"),
    )
    for fn, args in ((train.step, (PARAMS, BATCH)), (moved, (shape(8),))):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            compile_for(fn, *args)
        assert "Leave out jax.debug.print" in "".join(caught.value.__notes__)


@needs_compiler("h100")
def test_products_are_cublas_unless_asked_otherwise():
    option = "xla_gpu_enable_triton_gemm"
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)

    def uses_cublas(own=None, **more):
        product = jax.jit(lambda x: x @ x, compiler_options=own)
        return "__cublas" in text_of(compile_for(product, x, devices=1, **more))

    assert uses_cublas()
    assert not uses_cublas(compiler_options={option: True})
    assert not uses_cublas(own={option: True})
