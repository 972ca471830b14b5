"""The experiment `uneven`: what it compares, and what it makes of padding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from chex import assert_trees_all_equal

import jaxdp
from experiments import uneven
from experiments.parts import uneven_mistakes as mistakes
from experiments.parts import uneven_net as net
from experiments.parts import uneven_runs as runs
from tests import experiments_contract as contract


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A tiny run, on 4 and 2 devices."""
    options = "--devices", "4", "--batch-size", "16"
    return contract.run("uneven", tmp_path_factory.mktemp("results"), *options)


@pytest.fixture(scope="module")
def found(ran):
    """What a tiny run found."""
    return ran.found


def test_what_is_written(ran):
    contract.check(ran, {"A7": "refuted"})


def test_every_row_is_used_once_in_one_program(found):
    rows = found.tables["uneven_data_sets"]
    assert [(row["rows"], row["devices"], row["batches"]) for row in rows] == [
        (length, devices, batches)
        for devices in (2, 4)
        for length, batches in ((1, 1), (3, 1), (66, 5))
    ]
    for row in rows:
        assert row["rows used"] == row["rows"]
        assert row["copies masked"] == 16 * row["batches"] - row["rows"]
        assert row["compilations"] == 1


def test_gradients_are_those_of_one_device(found):
    for row in found.tables["uneven_data_sets"]:
        assert 0.05 < row["largest gradient"] < 5  # so that 1e-6 says something
        assert row["gradient apart"] <= 1e-6
        for column in ("loss apart", "statistics apart", "mean loss apart"):
            assert row[column] < 1e-5
        assert row["accuracy apart"] < 1e-6 and row["mean accuracy apart"] < 1e-6
        assert row["parameters apart"] < 1e-5
        assert 0 < row["mean loss"] < 4


def test_padding_that_counts_shows(found):
    wrong = {row["padding"]: row for row in found.tables["masks_left_out"]}
    columns = [f"{count} real rows of 16" for count in (12, 5, 3)]
    for row in wrong.values():
        assert list(row) == ["padding", *columns]
    assert all(wrong[mistakes.RIGHT][column] < 1e-6 for column in columns)
    assert all(wrong["zeros, all rows count"][column] > 0.1 for column in columns)


def test_metrics_count_rows_or_copies(found):
    rows = {row["metrics"]: row for row in found.tables["metrics_of_66_rows"]}
    assert {name: row["rows counted"] for name, row in rows.items()} == {
        mistakes.RIGHT: 66,
        "copies counted": 80,
        "mean of batch means": 66,
    }
    right = rows[mistakes.RIGHT]["accuracy"] * 66
    assert right == pytest.approx(round(right), abs=1e-4)


def test_the_claim_is_refuted_only_if_all_is_well(found):
    (claim,) = found.claims
    rows = found.tables["uneven_data_sets"]
    assert (claim.id, claim.verdict) == ("A7", "refuted")
    assert claim.measured == max(row["gradient apart"] for row in rows)
    assert "1, 3 and 66 rows were trained on 2 and 4 devices, 16 rows" in claim.why
    wrong = [{"padding": mistakes.RIGHT, "a": 1e-7}, {"padding": "?", "a": 0.25}]
    for change in ({"gradient apart": 2e-6}, {"rows used": 65}, {"compilations": 2}):
        changed = [*rows[:-1], rows[-1] | change]
        claim = uneven.claim_round_down(changed, wrong, uneven.Config())
        assert claim.verdict == "holds"
        assert "off by 25.0% to 25% of" in claim.why


def test_range_of_differences_leaves_out_what_is_no_difference():
    rows = [
        {"padding": "zeros", "a": 0.05, "b": mistakes.NO_NUMBER},
        {"padding": "copies", "a": 5e-7, "b": 3.0},
        {"padding": mistakes.RIGHT, "a": 0.01, "b": 9.0},
    ]
    assert uneven.off(rows) == "5.0% to 300%"


def test_figures_show_every_number(found):
    differences, wrong = found.figures.values()
    rows = found.tables["uneven_data_sets"]
    (axes,) = differences.axes
    drawn = [y for line in axes.lines[:2] for y in line.get_ydata()]
    assert drawn == [row["gradient apart"] for row in rows]
    (axes,) = wrong.axes
    drawn = {float(line.get_xdata()[0]) for line in axes.lines}
    for row in found.tables["masks_left_out"]:
        assert {value for value in row.values() if isinstance(value, float)} <= drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1, "batch_size": 4}, "--devices got 1 and --epochs 2.*at least 2"),
        ({"epochs": 0}, "--epochs 0"),
        ({"batch_size": 60}, "--batch-size got 60 for 8 devices.*--batch-size 64"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        uneven.Config(**options).check()


def test_ways_to_weigh_rows():
    values, mask = jnp.array([1.0, 2.0, 4.0]), jnp.array([True, True, False])
    assert mistakes.unmasked(values, mask) == jaxdp.Mean(7, 3)
    assert mistakes.mean_of_means(values, mask) == jaxdp.Mean(1.5, 1)
    assert mistakes.mean_of_means(values, mask & False) == jaxdp.Mean(0, 1)


def test_zeroed_batches_have_zeros_where_they_had_copies():
    padded = net.padded(3, 8, jaxdp.data_mesh(2))
    images, labels = mistakes.zeroed(padded).batch
    given, known = net.data()
    np.testing.assert_array_equal(images[:3], given[:3])
    np.testing.assert_array_equal(labels, [*known[:3], 0, 0, 0, 0, 0])
    assert not np.any(images[3:]) and np.any(padded.batch[0][3:])


def test_recording_changes_nothing_but_keeps_the_gradient():
    params = {"w": jnp.array([1.0, 2.0])}
    plain = optax.sgd(0.1, momentum=0.9)
    recording = net.recording(plain)
    state, kept = plain.init(params), recording.init(params)
    for scale in (1.0, -3.0):
        gradient = {"w": scale * jnp.array([5.0, 7.0])}
        updates, state = plain.update(gradient, state, params)
        recorded, kept = recording.update(gradient, kept, params)
        assert_trees_all_equal(recorded, updates)
        assert_trees_all_equal(jax.tree.leaves(kept)[-1], gradient["w"])


def test_differences_take_the_largest_entry_of_any_leaf():
    tree = {"a": np.array([1.0, -5.0]), "b": np.array([[2.0]])}
    other = {"a": np.array([1.5, -5.0]), "b": np.array([[-1.0]])}
    assert net.largest(tree) == 5
    assert net.difference(tree, other) == 3


def test_compilations_are_counted_by_name():
    def wanted_here(x):
        return x + 1

    def another(x):
        return x + 2

    with runs.compilations_of("wanted_here") as names:
        jitted = jax.jit(wanted_here)
        for rows in (2, 2, 3):
            jitted(np.ones(rows))
        jax.jit(another)(np.ones(2))
    assert len(names) == 2
    jax.jit(wanted_here)(np.ones(4))
    assert len(names) == 2
