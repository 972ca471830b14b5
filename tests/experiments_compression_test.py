"""The experiment `compression`: what is trained, what is counted, and the formulas."""

import math

import jax
import numpy as np
import optax
import pytest

import jaxdp
from experiments import compression
from experiments.parts import compression_figures as figures
from experiments.parts import compression_runs as runs
from experiments.parts import compression_tables as tables
from experiments.parts import compression_tasks as tasks
from experiments.parts.compression_traffic import formula_bytes
from jaxdp.compression import Int8, PowerSGD, TopK
from tests import experiments_contract as contract

NONE = runs.UNCOMPRESSED


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A tiny run."""
    return contract.run("compression", tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def found(ran):
    """What a tiny run found."""
    return ran.found


def test_what_is_written(ran):
    contract.check(ran, {})


def test_bytes_are_those_of_the_formula(found):
    """But for the loss, a few bytes more, and padding."""
    rows = found.tables["bytes_per_step_and_device"]
    assert [(row["data"], row["compression"]) for row in rows] == [
        (data, name) for data in ("digits", "text") for name in compression.TINY
    ]
    for row in rows:
        assert 0 < row["sent_bytes"] - row["formula_bytes"] < 500
        assert row["formula_bytes"] > 5000
    digits, thin = rows[0], rows[1]
    assert digits["times less"] == 1
    assert thin["times less"] == digits["sent_bytes"] / thin["sent_bytes"] > 10


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # 10 x 20 + 5 numbers; N = 5, so that 2 (N - 1) / N = 1.6
        (NONE, 1.6 * 4 * 205),
        ("Bf16", 1.6 * 2 * 205),
        ("Fp16", 1.6 * 2 * 205),
        ("Int8", 1.6 * (205 + 2 * 205 / 256)),
        ("Int8 stochastic", 1.6 * (205 + 2 * 205 / 256)),
        ("TopK 5 %", 4 * 8 * (10 + 1)),  # gathered from 4 others
        ("TopK 1 %", 4 * 8 * (2 + 1)),
        ("PowerSGD 4", 1.6 * 4 * (4 * 30 + 5)),
        ("PowerSGD 2", 1.6 * 4 * (2 * 30 + 5)),
        ("PowerSGD 4, Bf16", 1.6 * 2 * (4 * 30 + 5)),
    ],
)
def test_formulas(name, expected):
    given = runs.COMPRESSIONS[name], [(10, 20), (5,)], 5
    assert math.isclose(formula_bytes(*given), expected)


def test_formulas_of_other_options():
    shapes = [(3, 3, 16, 32)]  # 144 x 32
    thin = PowerSGD(2, inner=Int8(block=64))
    expected = 2 * (144 + 32) * (1 + 2 / 64)
    assert math.isclose(formula_bytes(thin, shapes, 2), expected)
    assert formula_bytes(PowerSGD(1000), shapes, 2) == 4 * 144 * 32  # travels whole
    assert formula_bytes(TopK(1e-9), shapes, 3) == 2 * 8


def test_a_run_is_that_of_plain_optax():
    task = tasks.digits_task(4, seed=1)
    run = runs.train(task, jaxdp.data_mesh(2), None, lambda: None)
    params, state = task.params, task.optimizer.init(task.params)
    losses = []
    for batch in task.batches:
        loss, gradient = jax.value_and_grad(task.loss_fn)(params, batch)
        losses.append(loss)
        updates, state = task.optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(run.losses, losses, rtol=1e-4)
    loss, accuracy = task.test(params)
    assert math.isclose(run.test_loss, loss, rel_tol=1e-4)
    assert abs(run.accuracy - accuracy) < 0.01
    assert run.last_loss == run.losses[-1]


def test_losses_stand_beside_those_without_compression(found):
    rows = found.tables["what_runs_reached"]
    for row in rows:
        (whole,) = [
            r for r in rows if (r["data"], r["compression"]) == (row["data"], NONE)
        ]
        above = 100 * (row["test loss"] / whole["test loss"] - 1)
        column = "test loss above uncompressed (%)"
        assert math.isclose(row[column], above, abs_tol=1e-9)
        assert 0 <= row["test accuracy"] <= 1


def test_curves_are_means_of_parts():
    losses = [float(step) for step in range(85)]
    run = runs.Run(losses, 0.0, 0.0, 1, None)  # pyright: ignore[reportArgumentType]
    points = tables.curve(run)
    assert len(points) == tables.PARTS
    assert points[0] == (2, 0.5)
    assert points[-1][0] == 85
    assert run.last_loss == np.mean(losses[-8:])


def test_what_is_trained():
    task = tasks.text_task(2, width=80, seed=0)
    assert sum(map(math.prod, task.shapes)) == 179_008
    assert [batch.shape for batch in task.batches] == [(48, 33)] * 2
    digits = tasks.digits_task(30, seed=0)
    assert sum(map(math.prod, digits.shapes)) == 38_282
    assert len(digits.batches) == 30  # of several epochs
    assert not np.array_equal(digits.batches[0][1], digits.batches[11][1])


def test_every_compression_has_a_style_and_text_has_few():
    assert set(figures.STYLES) == set(runs.COMPRESSIONS)
    chosen = compression.choose(compression.Config())
    assert chosen["digits"] == tuple(runs.COMPRESSIONS)
    assert set(chosen["text"]) < set(runs.COMPRESSIONS)
    every = compression.choose(compression.Config(all_on_text=True))
    assert every["text"] == chosen["digits"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 5}, r"--devices got 5\. .* 128 and 48 rows"),
        ({"devices": 1}, r"at least 2"),
        ({"width": 30}, r"--width 30\. .* 4 heads"),
        ({"text_steps": 0}, r"--text-steps 0"),
    ],
)
def test_options_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        compression.Config(**options).check()
