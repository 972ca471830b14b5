"""The designs that `compare` trains: all on a small network, and what each costs."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from experiments.harness.timing import Timing
from experiments.parts import compare_designs as designs
from experiments.parts import compare_figures as figures
from experiments.parts import lockstep

DEVICES, LEAVES = 8, 2
# By hand for N = 8, momentum included: busiest and all in Φ, rounds, kept in Φ.
EXPECTED = {
    "gather to root": (7, 14, 2, 2),
    "1 server": (7, 14, 2, 2),
    "8 servers": (1.75, 14, 2, 1 + 1 / 8),
    "ring": (1.75, 14, 14, 2),
    "doubling": (3, 24, 3, 2),
    "halving-doubling": (1.75, 14, 6, 2),
    "native": (1.75, 14, 14, 2),
    "local SGD": (1.75, 14, 14, 2),
    "Zero(1)": (1.75, 14, 14, 1 + 1 / 8),
    "Zero(2)": (1.75, 14, 14, 1 + 1 / 8),
    "Zero(3)": (2.625, 21, 21, 2 / 8),
}


@pytest.fixture(scope="module")
def trained():
    """All designs after eight steps in lockstep, and what was seen."""
    random = np.random.default_rng(0)
    params = {
        "w": jnp.asarray(random.normal(size=(8, 8)), jnp.float32),
        # The backward pass reads only this one again.
        "v": jnp.asarray(random.normal(size=(8, 1024)), jnp.float32) / 32,
    }
    rows = random.normal(size=(9, 16, 8)).astype(np.float32)

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2)

    given = loss_fn, optax.sgd(0.1, momentum=0.9), params, rows[0]
    mesh = jaxdp.data_mesh(DEVICES)
    trainers = {lockstep.ALONE: lockstep.single(*given)}
    for name, design in designs.designs(DEVICES).items():
        trainers[name] = lockstep.parallel(*given, mesh, design)
    history = lockstep.train(trainers, rows[1:])
    return trainers, history, 4 * (8 * 8 + 8 * 1024)


def test_every_design_is_there():
    assert [*designs.designs(DEVICES)] == [*EXPECTED]
    assert set(designs.designs(DEVICES, tiny=True)) < set(EXPECTED)
    assert "1 servers" not in designs.designs(1)


def test_costs_are_as_expected(trained):
    trainers, _, phi = trained
    times = dict.fromkeys(trainers, Timing(3.0, 2.0, 4.0, "by hand"))
    tables = designs.costs(trainers, times, phi)
    alone, *rows = tables["designs"]
    assert (alone["busiest (Φ)"], alone["rounds"]) == (0, 0)
    for row, sent in zip(rows, tables["sent_in_a_step"][1:], strict=True):
        busiest, total, rounds, kept = EXPECTED[row["design"]]
        assert row["busiest (Φ)"] == pytest.approx(busiest, rel=0.01), row
        assert row["all (Φ)"] == pytest.approx(total, rel=0.01), row
        assert row["rounds"] == rounds, row
        assert row["kept_mb"] * 2**20 / phi == pytest.approx(kept, rel=0.01), row
        assert row["step_ms"] == 3.0 and "by hand" in row["label"]
        assert sent["busiest_bytes"] == round(row["busiest (Φ)"] * phi)
        assert sent["Φ_bytes"] == phi
    others = {row["design"]: row["least_bytes"] for row in tables["sent_in_a_step"]}
    assert others["gather to root"] == pytest.approx(phi, rel=0.01)  # to the root


def test_all_copies_are_compared_and_equal(trained):
    _, history, _ = trained
    assert set(history.differing.values()) == {0}
    every = LEAVES * (DEVICES - 1) * 8  # steps
    assert history.compared == {lockstep.ALONE: 0} | {
        name: every // 8 if name == designs.LOCAL else every for name in EXPECTED
    }


def test_other_bits_are_seen():
    copies = [[np.array([x], np.float32) for x in (0.0, 0.0, -0.0)]]
    assert lockstep._same_bits(copies) == [True, False]


def test_all_but_local_sgd_stay_close_to_one_device(trained):
    _, history, _ = trained
    apart = {name: max(values) for name, values in history.differences.items()}
    local = apart.pop(designs.LOCAL)
    assert max(apart.values()) < min(1e-6, local / 100)


def test_figures_have_every_design(trained):
    trainers, history, phi = trained
    times = dict.fromkeys(trainers, Timing(3.0, 2.0, 4.0, "by hand"))
    costs = designs.costs(trainers, times, phi)["designs"]
    panels = figures.costs("Costs", costs).axes
    assert [axes.get_title(loc="left") for axes in panels] == [
        panel.title for panel in figures.PANELS
    ]
    assert [text.get_text() for text in panels[0].get_yticklabels()] == [*EXPECTED]
    bars = [bar.get_window_extent().width for bar in panels[2].patches]
    rounds = [rounds for _, _, rounds, _ in EXPECTED.values()]
    np.testing.assert_allclose(np.divide(bars, bars[0]), np.divide(rounds, rounds[0]))
    lines = figures.differences("Apart", history).axes[0].get_lines()
    labels = [line.get_label() for line in lines]
    assert labels == [*EXPECTED, "bound, first 20 steps"]
