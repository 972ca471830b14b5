"""Memory of a program: XLA's figures, what is held by kind, and where it is placed."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import targets
from jaxdp.program import placed, placed_by_kind
from jaxdp.program.hlo import parse
from jaxdp.program.memory import Memory, memory_of
from jaxdp.program.memory.held import KINDS, UNATTRIBUTED
from jaxdp.program.memory.live import live_at_peak
from tests.compilers import needs_compiler
from tests.contract import waves
from tests.programs import data_mesh

# 20 + 5 + 25 = 50 parameters of 4 bytes; 16 rows on 8 devices, 32 bytes on each.
PARAMS = {"w1": waves(4, 5), "b": waves(5, start=0.2), "w2": waves(5, 5, start=0.4)}
ROWS = waves(16, 4)
PHI = 200


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["w1"] + params["b"][None])
    return jnp.mean((hidden @ params["w2"]) ** 2)


def training(design, devices=8, loss_fn=loss_fn, **options):
    mesh = jaxdp.data_mesh(devices)
    return jaxdp.data_parallel(loss_fn, optax.adam(0.1), mesh, design, **options)


@functools.cache
def step_of(design):
    """A training, and its compiled step."""
    train = training(design, devices=4)
    return train, train.lower(train.init(PARAMS), ROWS).compile()


class TestMemory:
    """What XLA reports."""

    def test_donated_arguments_count_once(self):
        """AN-6: 232 + 224 + temp - 200; 24 of the results are a table of 3 buffers."""
        mesh = data_mesh()
        whole, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

        def step(params, x):
            gradients = jax.grad(loss_fn)(params, x)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)

        program = jax.jit(
            step, donate_argnums=0, in_shardings=(whole, rows), out_shardings=whole
        )
        memory = jaxdp.analyze(program.lower(PARAMS, ROWS).compile()).memory
        assert memory is not None
        assert memory.argument_bytes == 200 + 32
        assert memory.output_bytes == 200 + 3 * 8
        assert memory.aliased_bytes == 200
        assert memory.temporary_bytes > 0
        assert memory.peak_bytes == 232 + 224 + memory.temporary_bytes - 200

    @staticmethod
    def memory_of_stats(**sizes):
        named = {f"{name}_size_in_bytes": size for name, size in sizes.items()}
        stats = types.SimpleNamespace(**named)
        return memory_of(types.SimpleNamespace(memory_analysis=lambda: stats))  # pyright: ignore[reportArgumentType]

    def test_all_figures(self):
        sizes = {"argument": 7, "output": 5, "temp": 3, "alias": 2}
        memory = self.memory_of_stats(
            **sizes, generated_code=11, host_temp=1000, host_argument=1000
        )
        assert memory == Memory(7, 5, 3, 2, code_bytes=11)
        assert memory is not None and memory.peak_bytes == 7 + 5 + 3 - 2

    @pytest.mark.parametrize("code", [-1, None], ids=["minus-one", "none"])
    def test_what_is_not_said_of_aliases_and_code_is_nothing(self, code):
        memory = self.memory_of_stats(argument=7, output=5, temp=0, generated_code=code)
        assert memory == Memory(7, 5, 0, 0)

    @pytest.mark.parametrize("missing", ["argument", "output", "temp"])
    @pytest.mark.parametrize("size", [-1, None], ids=["minus-one", "none"])
    def test_a_figure_that_is_not_said_makes_no_total(self, missing, size):
        sizes = {"argument": 7, "output": 5, "temp": 3, "alias": 2} | {missing: size}
        assert self.memory_of_stats(**sizes) is None

    def test_no_figures(self):
        nothing = types.SimpleNamespace(memory_analysis=lambda: None)
        assert memory_of(nothing) is None  # pyright: ignore[reportArgumentType]


class TestHeld:
    """What a device holds at the peak."""

    @pytest.mark.parametrize(
        ("design", "optimizer_bytes"),
        [
            # Adam: two moments like the parameters, and a count of 4 bytes.
            pytest.param(jaxdp.RingAllReduce(), 2 * PHI + 4, id="ring"),
            pytest.param(jaxdp.GatherToRoot(), 2 * PHI + 4, id="root"),
            # Two servers have 10, 3 and 13 of the 20, 5 and 25 elements, padded; and
            # 4 workers' refused pushes.
            pytest.param(
                jaxdp.ParameterServer(2), 2 * 4 * (10 + 3 + 13) + 4 + 16, id="servers"
            ),
        ],
    )
    def test_arguments_are_exact(self, design, optimizer_bytes):
        train, program = step_of(design)
        report = jaxdp.analyze(program)
        holdings = report.held(train)
        assert holdings["parameters"] == PHI
        assert holdings["optimizer state"] == optimizer_bytes
        assert holdings["batch"] == 64
        assert holdings["model state"] == 0
        assert ("params['w2']", 100) in holdings.parts["parameters"].leaves
        assert ("step", 4) in holdings.parts["other"].leaves
        known = PHI + optimizer_bytes + 64 + 4
        assert report.memory is not None
        assert report.memory.argument_bytes == known

    @pytest.mark.parametrize(
        "design",
        [jaxdp.RingAllReduce(), jaxdp.NativeAllReduce(), jaxdp.GatherToRoot()],
        ids=["ring", "native", "root"],
    )
    def test_kinds_add_up_to_the_peak(self, design):
        train, program = step_of(design)
        report = jaxdp.analyze(program)
        holdings = report.held(train)
        assert tuple(holdings.parts) == KINDS
        for part in holdings.parts.values():
            assert part.nbytes == sum(size for _, size in part.leaves)
        assert report.memory is not None and holdings.unattributed_bytes is not None
        excess = max(0, -holdings.unattributed_bytes)
        assert holdings.total_bytes == report.memory.peak_bytes + excess

    def test_other_state(self):
        """Statistics, gradients in flight, and what a compression has not sent."""

        def loss(params, x, model_state):
            mean = model_state["mean"] * 0.9 + 0.1 * x.mean(axis=0)
            aux = jaxdp.Aux(model_state={"mean": mean})
            return loss_fn(params, x - mean[None]), aux

        design = jaxdp.ParameterServer(max_staleness=1)
        train = training(design, 2, loss, model_state="mean")
        state = train.init(PARAMS, model_state={"mean": np.zeros(4, np.float32)})
        holdings = jaxdp.analyze(train.lower(state, ROWS).compile()).held(train)
        assert holdings["model state"] == 16
        in_flight = [
            size
            for name, size in holdings.parts["gradients"].leaves
            if "in_flight" in name
        ]
        assert sum(in_flight) >= 2 * PHI  # on their way, and on the server

    def test_it_prints(self):
        train, program = step_of(jaxdp.RingAllReduce())
        text = str(jaxdp.analyze(program).held(train)).splitlines()
        assert text[0].split()[:5] == ["parameters", "200", "B", "params['w2']", "100,"]
        assert text[1].startswith("optimizer state ")
        assert text[-1].split()[0] == "all"

    def test_text_has_no_figures_of_xla(self):
        train, program = step_of(jaxdp.RingAllReduce())
        holdings = jaxdp.analyze(program.as_text()).held(train)
        assert holdings.memory is None and holdings.unattributed_bytes is None
        assert holdings["parameters"] == PHI
        assert holdings.live_bytes == jaxdp.analyze(program).held(train).live_bytes

    def test_no_training_is_refused(self):
        report = jaxdp.analyze(step_of(jaxdp.RingAllReduce())[1])
        with pytest.raises(TypeError, match=r"report\.held got train=int"):
            report.held(3)
        with pytest.raises(ValueError, match=r"RingAllReduce.*NativeAllReduce"):
            report.held(training(jaxdp.NativeAllReduce()))


LAYERS = {f"w{i}": jax.ShapeDtypeStruct((256, 256), np.float32) for i in range(4)}
WIDE = jax.ShapeDtypeStruct((8 * 128, 256), np.float32)
K = 4 * 256 * 256 * 4  # bytes of the parameters


def layered(params, x):
    for name in sorted(params):
        x = jax.nn.relu(x @ params[name])
    return jnp.mean(x**2)


def convolved(params, x):
    dims = ("NHWC", "HWIO", "NHWC")
    for name in sorted(params):
        y = jax.lax.conv_general_dilated(
            x, params[name], (1, 1), "SAME", dimension_numbers=dims
        )
        mean = y.mean((0, 1, 2), keepdims=True)
        spread = jax.lax.rsqrt(((y - mean) ** 2).mean((0, 1, 2), keepdims=True) + 1e-5)
        x = x + jax.nn.relu((y - mean) * spread)  # a residual block
    return jnp.mean(x**2)


KERNELS = {f"w{i}": jax.ShapeDtypeStruct((3, 3, 32, 32), np.float32) for i in range(3)}
IMAGES = jax.ShapeDtypeStruct((8 * 8, 24, 24, 32), np.float32)


def attended(params, tokens):
    x = params["embedding"][tokens]  # [rows, length, features]
    for layer in params["layers"]:
        normal = (x - x.mean(-1, keepdims=True)) / (x.std(-1, keepdims=True) + 1e-5)
        query, key, value = jnp.einsum("btd,dkhe->kbthe", normal, layer["qkv"])
        scores = jax.nn.softmax(jnp.einsum("bthe,bshe->bhts", query, key))
        mixed = jnp.einsum("bhts,bshe->bthe", scores, value)
        x = x + jnp.einsum("bthe,hed->btd", mixed, layer["out"])
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    logits = jax.nn.log_softmax(x @ params["embedding"].T)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], -1))


def _shape(*dims):
    return jax.ShapeDtypeStruct(dims, np.float32)


BLOCK = {
    "qkv": _shape(128, 3, 4, 32),
    "out": _shape(4, 32, 128),
    "up": _shape(128, 512),
    "down": _shape(512, 128),
}
TRANSFORMER = {"embedding": _shape(512, 128), "layers": [BLOCK]}
TOKENS = jax.ShapeDtypeStruct((16, 64), np.int32)
MODELS = {
    "mlp": (layered, LAYERS, WIDE),
    "convolutions": (convolved, KERNELS, IMAGES),
    "transformer": (attended, TRANSFORMER, TOKENS),
}
SMALL = 0.15  # of the temporaries, either way


def holdings_of(model, design, mesh=None):
    loss, params, batch = MODELS[model]
    train = training(design, loss_fn=loss)
    trainer = train.step.__self__  # pyright: ignore[reportFunctionMemberAccess]
    program = trainer.on(mesh or trainer.mesh).lower_abstract(params, batch).compile()
    return jaxdp.analyze(program).held(train)


def assert_small(holdings):
    """What is not attributed."""
    assert holdings.memory is not None
    rest, all_ = holdings.unattributed_bytes, holdings.memory.temporary_bytes
    assert rest is not None and abs(rest) < SMALL * all_


@pytest.mark.parametrize("model", MODELS)
def test_nearly_all_temporaries_are_attributed(model):
    holdings = holdings_of(model, jaxdp.RingAllReduce())
    assert_small(holdings)
    others = dict(holdings.parts["other"].leaves)
    assert holdings["other"] - others.get(UNATTRIBUTED, 0) < 1024
    # The first model needs less for its products than for its bucket.
    assert holdings["activations"] or holdings["buckets"] > K


@pytest.mark.parametrize(
    ("design", "least"),
    [
        pytest.param(jaxdp.RingAllReduce(), K, id="ring"),
        pytest.param(jaxdp.NativeAllReduce(), K, id="native"),
        # The root has a buffer for what each of the other devices sends.
        pytest.param(jaxdp.GatherToRoot(), 7 * K, id="root"),
    ],
)
def test_buckets_and_gradients_of_a_design(design, least):
    holdings = holdings_of("mlp", design)
    assert holdings["gradients"] + holdings["buckets"] >= K
    assert holdings["buckets"] + holdings["gradients"] >= least
    assert holdings["parameters"] == K
    assert holdings["optimizer state"] == 2 * K + 4


@needs_compiler("h100")
@pytest.mark.parametrize("model", MODELS)
def test_nearly_all_temporaries_on_h100_are_attributed(model):
    holdings = holdings_of(model, jaxdp.RingAllReduce(), targets.mesh("h100", 8))
    assert_small(holdings)
    assert holdings["activations"] > 0


SCHEDULE = """HloModule step, is_scheduled=true

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[8] get-tuple-element(%s), index=1
  %big = f32[100] broadcast(%i), dimensions={}
  %part = f32[8] slice(%big), slice={[0:8]}
  %sum = f32[8] add(%v, %part)
  %next = s32[] add(%i, %i)
  ROOT %out = (s32[], f32[8]) tuple(%next, %sum)
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %s = (s32[], f32[8]) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (x: f32[8], n: s32[]) -> f32[8] {
  %x = f32[8] parameter(0)
  %n = s32[] parameter(1)
  %a = f32[40] broadcast(%n), dimensions={}
  %again = f32[40] bitcast(%a)
  %b = f32[40] negate(%again)
  %c = f32[20] slice(%b), slice={[0:20]}
  %copy = f32[8] copy(%x)
  %state = (s32[], f32[8]) tuple(%n, %copy)
  %loop = (s32[], f32[8]) while(%state), condition=%condition, body=%body
  %end = f32[8] get-tuple-element(%loop), index=1
  %tail = f32[8] slice(%c), slice={[0:8]}
  ROOT %result = f32[8] add(%end, %tail)
}
"""


def test_values_alive_counted_by_hand():
    """In the loop: 100 and 8 inside; c and the copy outside. b takes the place of a."""
    alive = {value.name: value.nbytes for value in live_at_peak(parse(SCHEDULE))}
    assert alive == {"c": 80, "copy": 32, "big": 400, "part": 32}


def test_a_fusion_takes_the_place_of_what_dies_in_it():
    text = SCHEDULE.replace("f32[40]", "f32[400]")
    alive = {value.name: value.nbytes for value in live_at_peak(parse(text))}
    assert alive == {"b": 1600, "c": 80}


def test_a_result_is_held_by_the_caller_wherever_it_stands():
    text = """HloModule step, is_scheduled=true

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8] parameter(0)
  ROOT %result = f32[8] negate(%x)
  %after = f32[2] slice(%result), slice={[0:2]}
}
"""
    alive = {value.name: value.nbytes for value in live_at_peak(parse(text))}
    assert alive == {"after": 8}


SCOPED = """HloModule jit__step, is_scheduled=true

ENTRY %main (w: f32[4,4], m: f32[4,4], x: f32[2,4], n: s32[]) -> f32[4,4] {
  %w = f32[4,4] parameter(0), metadata={op_name="state.params[\\'w\\']"}
  %m = f32[4,4] parameter(1), metadata={op_name="state.opt_state[0].mu[\\'w\\']"}
  %x = f32[2,4] parameter(2), metadata={op_name="batch"}
  %n = s32[] parameter(3), metadata={op_name="state.step"}
  %again = f32[4,4]{0,1} copy(%w)
  %y = f32[2,4] dot(%x, %again), metadata={STEP/loss/jvp()/dot"}
  %dy = f32[2,4] dot(%y, %y), metadata={STEP/loss/transpose(jvp())/dot"}
  %dw = f32[4,4] dot(%x, %dy), metadata={STEP/loss/transpose(jvp())/dot"}
  %odd = f32[3] custom-call(%dy), metadata={STEP/loss/transpose(jvp())/dot"}
  %flat = f32[19] custom-call(%dw, %odd), metadata={STEP/exchange/bucket_1/pad"}
  %step = f32[16] custom-call(%flat, %m), metadata={STEP/exchange/update/add"}
  %strange = f32[5] custom-call(), metadata={STEP/iota"}
  ROOT %end = f32[4,4] custom-call(%again, %y, %dy, %dw, %odd, %flat, %step, %strange)
}
""".replace("STEP", 'op_name="jit(_step)/shard_map')


def test_kinds_counted_by_hand():
    holdings = jaxdp.analyze(SCOPED).held(training(jaxdp.RingAllReduce()))
    assert {kind: holdings[kind] for kind in KINDS} == {
        "parameters": 64 + 64,  # and a copy in another layout
        "optimizer state": 64,
        "model state": 0,
        "batch": 32,
        "gradients": 64 + 12,  # of the size of a parameter; read by the exchange
        "activations": 32 + 32,
        "buckets": 76,
        "update": 64,
        "other": 4 + 20,
    }
    assert holdings.parts["parameters"].leaves == (
        ("params['w']", 64),
        ("copy of params['w'] f32[4,4]", 64),
    )
    assert holdings.parts["buckets"].leaves == (("bucket_1 f32[19]", 76),)
    assert "state.opt_state" not in str(holdings)


class TestPlaced:
    """What every device really holds."""

    def test_shards_and_copies(self):
        mesh = data_mesh()
        x = jnp.arange(16.0)
        sharded = jax.device_put(x, NamedSharding(mesh, P("data")))
        copied = jax.device_put(x, NamedSharding(mesh, P()))
        alone = jax.device_put(x, jax.devices()[3])
        on_host = np.zeros(100)
        expected = {device: 8 + 64 for device in jax.devices()}
        expected[jax.devices()[3]] += 64
        tree = {"a": sharded, "b": [copied, copied], "c": alone, "d": on_host}
        assert placed(tree) == expected

    def test_a_key_takes_its_data(self):
        assert placed(jax.random.key(0)) == {jax.devices()[0]: 8}

    def test_the_first_device_of_data_parallel_holds_more(self):
        """AN-6: parameters and Adam's state are on device 0 alone."""
        model = jaxdp.DataParallel(lambda p, x: x @ p["w1"], {"w1": PARAMS["w1"]})
        step = model.train_step(
            lambda out, y: jnp.mean((out - y) ** 2), optax.adam(0.1)
        )
        held = placed(step.init())
        assert held == {jax.devices()[0]: 80 + 2 * 80 + 4}

    @pytest.mark.parametrize("root", [0, 2])
    def test_gather_to_root_uses_the_state_of_its_root(self, root):
        train = training(jaxdp.GatherToRoot(root), devices=4)
        found = placed_by_kind(train.init(PARAMS))
        assert [*found] == jax.devices()[:4]
        for rank, placement in enumerate(found.values()):
            assert placement.held == {
                "parameters": 200,
                "optimizer state": 404,
                "model state": 0,
                "other": 4,
            }
            unused = 0 if rank == root else 404
            assert placement.used["optimizer state"] == 404 - unused
            assert placement.used["parameters"] == 200

    def test_servers_use_their_part(self):
        train = training(jaxdp.ParameterServer(2), devices=4)
        found = placed_by_kind(train.init(PARAMS)).values()
        # Of 20, 5 and 25 elements 10, 3 and 13; the count; 4 refused pushes.
        part = 2 * 4 * 26 + 4 + 16
        assert [p.held["optimizer state"] for p in found] == [part] * 4
        assert [p.used["optimizer state"] for p in found] == [part, part, 0, 0]

    def test_where_workers_update_all_use_theirs(self):
        train = training(jaxdp.ParameterServer(update_on="worker"), devices=4)
        found = placed_by_kind(train.init(PARAMS)).values()
        assert all(p.used == p.held for p in found)

    def test_local_copies_are_one_each(self):
        train = training(jaxdp.LocalSGD(2), devices=4)
        found = placed_by_kind(train.init(PARAMS, rng=jax.random.key(1))).values()
        assert [p.held["parameters"] for p in found] == [200] * 4
        assert [p.used["other"] for p in found] == [4 + 8] * 4

    def test_what_is_no_state_is_refused(self):
        with pytest.raises(TypeError, match="placed_by_kind got a dict"):
            placed_by_kind({"params": 1})  # pyright: ignore[reportArgumentType]
