"""The experiment `amp`: what is counted, what is lost, what the verdicts rest on."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from experiments import amp
from experiments.parts import amp_claims as claims
from experiments.parts import amp_figures as figures
from experiments.parts import amp_master as master
from experiments.parts import amp_memory as memory
from experiments.parts import amp_models as models
from experiments.parts import amp_training as training
from experiments.parts import amp_underflow as underflow
from experiments.parts import digits
from jaxdp.precision import Precision

ROWS, SIZE = 3, 32


@pytest.fixture(scope="module")
def kept():
    """What tiny models keep."""
    with jax.numpy_rank_promotion("allow"):  # as when run by hand
        return memory.kept(True, SIZE, ROWS)


def of(rows, model, way):
    (row,) = (r for r in rows if r["model"].startswith(model) and r["way"] == way)
    return row


def test_products_are_counted_by_what_they_multiply():
    def forward(x, w, images, kernel):
        narrow = x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
        mixed = jax.jit(jnp.dot)(narrow, w.T.astype(jnp.float32))
        strides, padding = (2, 2), "VALID"
        return mixed, jax.lax.conv(images, kernel, strides, padding)

    given = jnp.ones((2, 5)), jnp.ones((5, 7)), jnp.ones((1, 3, 9, 9), jnp.float16)
    kernel = jnp.ones((4, 3, 3, 3), jnp.float16)  # 4 features of 3 x 3 x 3
    program = jax.make_jaxpr(forward)(*given, kernel).jaxpr
    narrow, wide = 2 * 2 * 7 * 5 + 2 * (4 * 4 * 4) * 27, 2 * 2 * 5 * 7
    found = memory.products_in_16_bits(program)
    assert found == pytest.approx(100 * narrow / (narrow + wide))


def test_what_was_there_before_is_not_kept_twice():
    def forward(x, y):
        z = x * y
        return x, z, z, 2.0, jnp.sin(z).astype(jnp.float16)

    program = jax.make_jaxpr(forward)(jnp.ones((2, 3)), jnp.ones((2, 3))).jaxpr
    shapes = [(x.shape, x.dtype) for x in memory.kept_by(program)]
    assert shapes == [((2, 3), jnp.float32), ((2, 3), jnp.float16)]


def test_two_layers_of_flax_widen_and_are_told_not_to(kept):
    for model, as_written in (("transformer", 0), ("ResNet-50", None)):
        found = [of(kept, model, way) for way in memory.WAYS]
        shares = [row["products in 16 bits (%)"] for row in found]
        assert shares[:2] == [0, 100]
        assert shares[2] == as_written if as_written == 0 else 0 < shares[2] < 100
        assert found[0]["kept in 16 bits_mb"] == 0 < found[1]["kept in 16 bits_mb"]
        assert found[1]["kept in 32 bits_mb"] < found[0]["kept in 32 bits_mb"]


def test_memory_adds_up(kept):
    for row in kept:
        parts = [row[f"{part}_mb"] for part in figures.PARTS]
        assert sum(parts) == pytest.approx(row["all_mb"])
        base = of(kept, row["model"], "f32")
        saved = 100 * (1 - row["all_mb"] / base["all_mb"])
        assert row["saved, all (%)"] == pytest.approx(saved)
    adam = of(kept, "transformer", "bf16")
    count = 4 / 2**20  # Adam's counter
    assert adam["optimizer state_mb"] == pytest.approx(
        2 * adam["parameters_mb"] + count
    )


def test_a_transformer_of_one_product_keeps_what_one_can_count():
    def loss_fn(params, batch):
        return jnp.sum((batch @ params) ** 2).astype(jnp.float32), None

    weights = jax.ShapeDtypeStruct((6, 4), jnp.float32)
    row: Any = jax.ShapeDtypeStruct((6,), jnp.float32)
    model = models.Model("product", loss_fn, weights, None, row, optax.sgd(1.0))
    found = memory.kept_by(model.forward(Precision("bf16"), 5))
    # The batch in bfloat16, and 2 x the product; float32 inputs were there before.
    assert models.size_bytes(found, 2) == 2 * (5 * 6 + 5 * 4)
    assert models.size_bytes(found) == models.size_bytes(found, 2)


def test_compression_halves_the_wire_and_16_bit_compute_does_not():
    def loss_fn(params, batch):
        return jnp.mean(batch @ params).astype(jnp.float32)

    mesh, params = jaxdp.data_mesh(3), jnp.ones((60, 10))
    batch = np.ones((3, 60), np.float32)
    made = {
        name: training.training(
            loss_fn, optax.sgd(0.1), params, batch, mesh, training.WAYS[name]
        )
        for name in ("f32", "bf16", "bf16, sent as bf16")
    }
    assert [float(each.step()) for each in made.values()] == [60, 60, 60]
    assert float(made["bf16"].step()) < 60
    rows = training.on_the_wire(made, 4 * 600)
    wide, narrow, sent = (row["sent/Φ"] for row in rows)
    assert wide == pytest.approx(2 * 2 / 3, rel=0.01) == narrow
    assert sent == pytest.approx(2 / 3, rel=0.02)
    assert {row["parameters and optimizer state_bytes"] for row in rows} == {2400}


def test_scales_of_a_scripted_series():
    precision = Precision(
        "fp16",
        loss_scale="dynamic",
        initial_scale=4.0,
        growth_interval=2,
        max_scale=8.0,
    )
    skipped = [False, False, False, False, True, True, True, True, False, False, False]
    run = underflow.Run([], [], skipped, None)
    assert underflow.rule(run, precision) == [4, 4, 8, 8, 8, 4, 2, 1, 1, 1, 2]


def test_float16_loses_the_first_layers_gradient_without_a_scale():
    problem = digits.problem(0, 0.05, 0.9)
    (batch,) = underflow.batches(problem.train, 128, 1, 0)
    rows = {r["loss scale"]: r for r in underflow.flushed(underflow.init(0), batch)}
    assert rows["2^0"]["first layer, zero (%)"] > 50
    assert (
        rows["2^0"]["first layer, zero (%)"] > rows["2^0"]["all layers, zero (%)"] > 5
    )
    assert rows["2^16"]["first layer, zero (%)"] < 1 and rows["2^16"]["finite"]
    assert not rows["2^24"]["finite"]


def test_batches_go_through_as_many_epochs_as_they_take():
    data = np.arange(10), np.arange(10)
    found = [*underflow.batches(data, 4, 5, seed=0)]
    assert [len(labels) for _, labels in found] == [4] * 5
    assert len({int(x) for _, labels in found[:2] for x in labels}) == 8
    assert not np.array_equal(found[0][1], found[2][1])


def test_small_numbers_by_hand():
    rows = master.small_numbers(jaxdp.data_mesh(1))
    _, moved, added = list(rows[0])
    assert [row[added] for row in rows] == [1000, 1000, 1000, 256]
    weights = [row[moved] for row in rows]
    np.testing.assert_allclose(weights[:3], [0.94, 0.94, 1], rtol=1e-5)
    assert weights[3] is None


KEPT = [
    {"model": model, "way": way, "saved, kept (%)": kept, "saved, all (%)": whole}
    | {"products in 16 bits (%)": share}
    for model, of_way in {
        "net": {"f32": (0, 0, 0), "bf16": (40, 35, 99), memory.AS_WRITTEN: (-4, -3, 2)},
        "gpt": {"f32": (0, 0, 0), "bf16": (60, 51, 98), memory.AS_WRITTEN: (-6, -5, 0)},
    }.items()
    for way, (kept, whole, share) in of_way.items()
]
TIMES = [
    {"way": "f32", "of f32": 1.0},
    {"way": "bf16", "of f32": 1.5},
    {"way": "fp16, scaled", "of f32": 1.25},
]
H100 = [
    {"target": "H100", "model": "net", "way": way, "temporaries_mb": temporaries}
    | {"all_mb": temporaries + 100, "predicted_ms": took}
    for way, temporaries, took in (("f32", 400, 8.0), ("bf16", 200, 5.0))
]


def test_the_claim_says_where_its_numbers_come_from():
    claim = claims.saves(KEPT, [], TIMES, "no compiler")
    assert (claim.id, claim.verdict) == ("CA8", "partly")
    assert claim.measured == "35 and 51 % of memory, -50 % of time on CPUs"
    for part in (
        "net saves 40 %",
        "gpt 60 %",
        "2 % and 0 %",
        "1.50",
        "1.25",
        "no comp",
    ):
        assert part in claim.why
    compiled = claims.saves(KEPT, H100, TIMES, "")
    there = "compiled for H100 40 % of memory, 38 % of time (predicted)"
    assert compiled.measured == f"35 and 51 % of memory; {there}"
    assert "net 50 % of temporaries, 40 % of all" in compiled.why
    assert "0.62 of the time (predicted)" in compiled.why and "not run" in compiled.why


@pytest.mark.parametrize(
    ("saved", "of_f32", "verdict"),
    [
        ((50, 60), 0.8, "holds"),
        ((50, 60), 0.81, "partly"),
        ((49, 60), 0.5, "partly"),
        ((-1, 1), 2.0, "partly"),
        ((-1, 0), 0.5, "refuted"),
    ],
    ids=str,
)
def test_verdicts_on_savings(saved, of_f32, verdict):
    rows = [
        row | {"saved, all (%)": saved[row["model"] == "gpt"]}
        if row["way"] == "bf16"
        else row
        for row in KEPT
    ]
    times = [TIMES[0], TIMES[1] | {"of f32": of_f32}, TIMES[2]]
    assert claims.saves(rows, [], times, "").verdict == verdict


def test_a_scale_that_does_not_follow_the_rule_refutes_the_claim():
    precision = Precision("fp16", loss_scale="dynamic")
    flushed = [
        {"loss scale": scale, "first layer, zero (%)": lost, "finite": True}
        for scale, lost in (("2^0", 90.0), ("2^16", 0.0))
    ]
    compared = [
        {"run": name, "loss, last tenth": loss}
        for name, loss in (
            ("f32", 0.5),
            ("bf16", 0.4),
            ("fp16", 2.3),
            ("fp16, scaled", 0.6),
        )
    ]
    scales = [65536.0, 32768.0]
    run = underflow.Run([1.0, 1.0], scales, [True, False], None)
    claim = claims.scaling(flushed, compared, run, precision)
    assert (claim.id, claim.verdict) == ("A6", "holds")
    assert claim.measured == "loss 0.6; 2.3 without a scale"
    assert "between 32,768 and 65,536" in claim.why
    stuck = run._replace(scales=[65536.0] * 2)
    assert claims.scaling(flushed, compared, stuck, precision).verdict == "refuted"
    lost = [flushed[0], flushed[1] | {"first layer, zero (%)": 90.0}]
    assert claims.scaling(lost, compared, run, precision).verdict == "refuted"
    infinite = [flushed[0], flushed[1] | {"finite": False}]
    assert claims.scaling(infinite, compared, run, precision).verdict == "refuted"


def test_figures_show_every_row(kept):
    figure = figures.memory(kept)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert sum("% less" in text or "% more" in text for text in texts) == 4
    rows = [
        {"loss scale": f"2^{i}", "first layer, zero (%)": 9 - i}
        | {"all layers, zero (%)": 5 - i, "finite": i < 2}
        for i in range(3)
    ]
    (axes,) = figures.flushed(rows).axes
    drawn = [np.shape(line.get_xydata())[0] for line in axes.lines]
    assert drawn == [3, 2, 1] * 2
    runs = {
        name: underflow.Run([2.0, 1.0], [], [], None)
        for name in ("f32", "bf16", "fp16")
    }
    scaled = underflow.Run([2.0, 1.5, 1.0], [8.0, 4.0, 4.0], [True, False, False], None)
    top, bottom = figures.training(runs | {"fp16, scaled": scaled}).axes
    assert len(top.lines) == 4
    np.testing.assert_array_equal(bottom.lines[1].get_xydata(), [[1, 8]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, "--steps got 0 and --interval 100.*at least one step"),
        ({"interval": 0}, "--interval 0"),
        ({"rows": 0}, "--rows got 0 for 4 devices.*0 rows"),
        ({"rows": 400}, "400 for 4 devices.*1600 rows.*1437.*--rows 359 or fewer"),
        ({"repeats": 1}, "--repeats got 1"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        amp.Config(platform="cpu", **options).check()
    assert math.log(10) == pytest.approx(2.30, abs=0.01)  # as the docstring says
