"""What the experiment `scaling` makes of compiled steps, by hand-made numbers."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from experiments import scaling
from experiments.harness import devices
from experiments.parts import scaling_claims as claims
from experiments.parts import scaling_hardware as hardware
from experiments.parts import scaling_steps as steps
from experiments.parts import scaling_tables as tables
from experiments.parts.scaling_steps import Priced
from jaxdp import targets
from jaxdp.prediction import CompiledStep, Model, compiled_step, predict
from jaxdp.program.sized import SizedCollective
from tests.compilers import needs_compiler

MILLION = 1_000_000


@pytest.fixture(scope="module")
def model():
    """One linear layer of 96 x 64 in float32."""

    def loss_fn(params, batch):
        return jnp.mean((batch @ params) ** 2)

    shape = jax.ShapeDtypeStruct
    params, batch = shape((96, 64), np.float32), shape((4, 96), np.float32)
    return Model(loss_fn, optax.sgd(0.1), params, batch, name="linear")


def test_v100_computes_16_bits_as_float16():
    machine = hardware.machines()[hardware.PCIE]
    assert machine.flops_of("bf16") == machine.flops_of("f16") == 112e12 / 2
    assert targets.hardware("v100").flops_of("bf16") == 14e12 / 2


def test_machines_are_those_described():
    found = hardware.machines()
    assert list(found) == list(hardware.DESCRIBED)
    assert found["10G, 1 a host"].devices_per_host == 1
    assert found["10G, 8 a host"].network.bytes_per_s == 1.25e9
    assert found["100G, 8 a host"].network.bytes_per_s == 12.5e9
    assert found[hardware.NVLINK].network.name == "infiniband-ndr"


def test_data_parallel_is_a_star_that_hides_nothing():
    machine = hardware.machines()["10G, 1 a host"]
    one, two, four = steps.data_parallel(MILLION, 0.01, machine, (1, 2, 4))
    assert one == (1, 10, 0, 0)
    once_ms = 0.05 + 4 * MILLION / 1.25e6  # 50 µs, and 4 MB at 1.25 GB/s
    np.testing.assert_allclose(two, (2, 10, 2 * once_ms, 2 * once_ms))
    np.testing.assert_allclose(four, (4, 10, 6 * once_ms, 6 * once_ms))
    np.testing.assert_allclose(four.step_ms, 10 + 6 * once_ms)


def test_data_parallel_crosses_the_network_beyond_a_host():
    machine = hardware.machines()[hardware.PCIE]
    eight, sixteen = steps.data_parallel(MILLION, 0.0, machine, (8, 16))
    inside_ms = 0.015 + 4 * MILLION / 15.75e6
    outside_ms = 0.05 + 4 * MILLION / 1.25e6
    np.testing.assert_allclose(eight.step_ms, 14 * inside_ms)
    np.testing.assert_allclose(sixteen.step_ms, 14 * inside_ms + 16 * outside_ms)


def native_step(exposed_s):
    """A replayed step on 8 devices: 10 ms of computation, 4 ms of communication."""
    times = {"compute_s": 0.01, "communication_s": 0.004, "exposed_s": exposed_s}
    times |= {"step_s": 0.01 + exposed_s, "exposed_fraction": exposed_s / 0.004}
    report = SimpleNamespace(timeline=lambda machine: SimpleNamespace(**times))
    sent = (SizedCollective(None, "all-reduce", MILLION, 4, count=2),)
    return CompiledStep(None, None, report, sent, 8, 4)  # type: ignore[arg-type]


def test_a_design_hides_the_share_that_was_hidden():
    machine = hardware.machines()["100G, 1 a host"]
    one, two, eight = steps.designed(native_step(0.001), machine, (1, 2, 8))
    assert (one.step_ms, one.communication_ms) == (10, 0)
    np.testing.assert_allclose(eight, (8, 10, 4, 1))
    twice_ms = 2 * 2 * (0.03 + 2 * MILLION / 12.5e6)  # 2 messages of 2 rounds
    np.testing.assert_allclose(two, (2, 10, twice_ms, twice_ms / 4))


def test_hosts():
    assert [hardware.hosted(name) for name in hardware.machines()] == [8, 8, 8, 8, 1, 1]


def test_a_design_hides_no_more_than_there_is_to_compute():
    machine = hardware.machines()["10G, 1 a host"]
    (far,) = steps.designed(native_step(0.0), machine, (1024,))
    assert far.communication_ms > 100
    np.testing.assert_allclose(far.exposed_ms, far.communication_ms - 10)


@needs_compiler("h100")
@pytest.mark.parametrize(
    "design",
    [jaxdp.RingAllReduce(), jaxdp.NativeAllReduce(bucket_cap_mb=25.0)],
    ids=["ring", "native"],
)
def test_prices_are_those_of_predict(model, design):
    step = compiled_step(design, model, 4, "h100")
    machine = targets.hardware("h100", network_name="ethernet-10g", devices_per_host=4)
    found = steps.designed(step, machine, (4, 8, 32))
    given = {"hardware": machine, "compile_up_to": 4}
    rows = predict(design, model, (4, 8, 32), **given).rows
    for mine, row in zip(found, rows, strict=True):
        assert mine.devices == row.devices
        np.testing.assert_allclose(mine.step_ms, 1e3 * row.step_s, rtol=1e-12)
        np.testing.assert_allclose(mine.exposed_ms, 1e3 * row.exposed_s, rtol=1e-12)


def test_without_the_compiler_steps_are_compiled_at_hand(monkeypatch, capsys, model):
    monkeypatch.setattr(targets, "missing", lambda target: f"No compiler for {target}.")
    assert devices.compiler(steps.TARGET) is None
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "No compiler for h100. Steps are compiled for the devices at hand" in said
    step = compiled_step(jaxdp.RingAllReduce(), model, 2, None)
    machine = hardware.machines()["10G, 1 a host"]
    two, four = steps.designed(step, machine, (2, 4))
    sent = -(-(96 * 64 + 1) // 4) * 4 / 1.25e6  # a quarter of weights and loss
    np.testing.assert_allclose(four.communication_ms, 6 * (0.05 + sent), rtol=1e-3)
    assert 0 < two.exposed_ms <= two.communication_ms < four.communication_ms


def curve(name, model, alone_ms, once_ms, saved=0.5):
    """Steps whose DP takes `once_ms` for a transfer; DDP saves a part of that."""
    dp = [Priced(n, alone_ms, *[2 * (n - 1) * once_ms] * 2) for n in (1, 2, 4, 8)]
    ddp = [s._replace(exposed_ms=(1 - saved) * s.exposed_ms) for s in dp]
    made = {tables.DP: dp, tables.DDP: ddp, tables.NATIVE: ddp}
    return tables.Curve(name, model, 4, alone_ms, made)


def test_throughput_of_dp_is_bounded_by_its_link():
    given = curve("x", "small", alone_ms=12, once_ms=2)
    assert given.bound == 3
    np.testing.assert_allclose(given.times(tables.DP), [1, 24 / 16, 2, 96 / 40])
    assert given.best == 8
    assert curve("x", "large", alone_ms=12, once_ms=24).best == 1
    (row,) = tables.stops([given])
    assert (row["best N"], row["N = 4"], row["at most"]) == (8, 2, 3)
    rows = tables.throughput([given])
    assert rows[2]["DP"] == round(1e3 * 4 * 4 / 24)
    assert rows[2]["DP, %"] == 50


def test_gain_is_the_part_of_the_step_that_is_saved():
    given = curve(hardware.NVLINK, "small", alone_ms=12, once_ms=2)
    np.testing.assert_allclose(tables.gain(given, 2), 100 * 2 / 16)
    rows = tables.faster([given, given._replace(hardware="10G, 8 a host")])
    assert len(rows) == 1
    assert rows[0]["DP exists"]


PARAMETERS = {"small": 1, "large": 2 * claims.LARGE}


@pytest.mark.parametrize(
    ("alone_ms", "once_ms", "saved", "verdict"),
    [
        (10, 1, 1.0, "partly"),  # from 17 to 58 %
        (100, 1, -0.1, "refuted"),
    ],
)
def test_verdict_of_faster(alone_ms, once_ms, saved, verdict):
    given = curve(hardware.PCIE, "small", alone_ms, once_ms, saved)
    elsewhere = curve("10G, 1 a host", "small", 1, 100, 1.0)
    assert claims.faster([given, elsewhere]).verdict == verdict


def test_faster_holds_if_all_is_between_15_and_30_percent():
    given = curve(hardware.PCIE, "small", 10, 1, 1.0)
    steps_ = {n: [*s] for n, s in given.steps.items()}
    steps_[tables.DDP] = [
        s._replace(exposed_ms=0.8 * s.step_ms - s.compute_ms) for s in steps_["DP"]
    ]
    claim = claims.faster([given._replace(steps=steps_)])
    assert claim.verdict == "holds"
    assert claim.measured == "20.0 to 20.0 %, predicted"


@pytest.mark.parametrize(
    ("curves", "verdict"),
    [
        ([curve(hardware.PCIE, "large", 1, 1)], "holds"),
        ([curve(hardware.PCIE, "small", 10, 1), curve("y", "small", 1, 1)], "partly"),
        (
            [
                curve(hardware.PCIE, "small", 10, 1),
                curve(hardware.NVLINK, "small", 1, 1),
            ],
            "partly",
        ),
        ([curve(hardware.PCIE, "large", 10, 1)], "refuted"),
    ],
    ids=["falls", "falls elsewhere", "falls on one", "never falls"],
)
def test_verdict_of_saturation(curves, verdict):
    claim = claims.saturates(curves, PARAMETERS)
    assert claim.verdict == verdict
    best = sorted({c.best for c in curves if c.hardware in hardware.HOSTS})
    assert claim.measured == (best[0] if len(best) == 1 else f"{best[0]} to {best[-1]}")


@pytest.mark.parametrize(
    "given", [{"devices": 4}, {"images": 0}, {"sequences": -1}], ids=str
)
def test_options_that_do_not_fit(given):
    with pytest.raises(
        ValueError, match=r"--devices got \d.*--sequences -?\d.*host of 8"
    ):
        scaling.Config(**given).check()
