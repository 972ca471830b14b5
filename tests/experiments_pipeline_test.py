"""The experiment `pipeline`: ticks by hand, one device's numbers, and its tiny form."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jaxdp
from experiments import pipeline
from experiments.parts import pipeline_claims as claims
from experiments.parts import pipeline_h100 as h100
from experiments.parts import pipeline_program, pipeline_runs
from experiments.parts import pipeline_tables as tables
from experiments.parts.pipeline_program import Stack
from tests import experiments_contract as contract
from tests.compilers import needs_compiler

ROWS, WIDTH = 24, 64
STACK = Stack(stages=3, blocks=1, hidden=16)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return contract.run("pipeline", tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def run():
    """Two micro-batches of 12 digits in three stages."""
    return pipeline_runs.run(STACK, 2, True, ROWS)


def test_what_is_written(ran):
    contract.check(ran, {"CB9": "holds"})
    contract.check_labels(ran.document)


def test_worked_ticks_of_four_stages(ran):
    rows = ran.document["tables"]["bubble"]
    counted = [(r["micro-batches"], r["worked"], r["all"], r["bubble"]) for r in rows]
    assert counted == [(1, 8, 32, 3 / 4), (4, 32, 56, 3 / 7)]


def test_memory_and_work_of_re_materialization(ran):
    for row in ran.document["tables"]["memory_of_a_device"]:
        assert row["stage inputs_mb"] < row["re-materialized_mb"] < row["kept_mb"]
    for row in ran.document["tables"]["work"]:
        assert row["expected"] == 7 / 6  # one block: the first of its two products
        assert row["ratio"] == pytest.approx(7 / 6, rel=0.01)


def test_gradients_are_those_of_one_device(ran):
    rows = ran.document["tables"]["agreement"]
    assert len({row["run"] for row in rows}) == 4
    for row in rows:
        assert row["loss"] == pytest.approx(row["loss alone"], rel=1e-6)
        assert row["gradients apart"] < 1e-6


def test_a_micro_batch_is_in_a_stage_one_tick_later_than_before(run):
    assert run.found.forward.tolist() == [[1, 2, 0, 0], [0, 1, 2, 0], [0, 0, 1, 2]]
    assert (run.found.backward == (run.found.forward > 0)).all()


def test_loss_in_numpy(run):
    params, batch = run.given
    rows, labels = np.asarray(batch.x).reshape(ROWS, WIDTH), batch.labels.reshape(-1)
    x = rows.astype(np.float64)
    for up, down in zip(*map(np.asarray, params), strict=True):
        moments = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
        normal = (x - moments[0]) / np.sqrt(moments[1] + 1e-5)
        x = x + np.maximum(normal @ up[0], 0) @ down[0]
    logits = x[:, :10]
    entropy = np.log(np.exp(logits).sum(axis=1)) - logits[range(ROWS), labels]
    assert run.found.loss == pytest.approx(entropy.mean(), rel=1e-5)


def test_stages_send_rows_and_numbers_on_and_gradients_back(run):
    """4 ticks each way of 12 rows; a number of 4 bytes goes with rows."""
    report = jaxdp.analyze(run.program)
    assert report.permutes == 4 * 3
    rows, numbers, loss = 4 * 12 * WIDTH * 4, 4 * 4, 16  # the loss: an all-reduce
    onward = dict.fromkeys([(0, 1), (1, 2)], rows + numbers + loss)
    assert report.link_bytes == onward | {(1, 0): rows, (2, 1): rows, (2, 0): loss}


def test_products_of_re_materialization():
    """Four blocks: 8 products forward, 16 backward, and 7 again."""
    assert tables.work_formula(4) == 31 / 24


def bubble(microbatches: int, counted: float, formula: float) -> dict[str, Any]:
    row = {"stages": 4, "micro-batches": microbatches, "bubble": counted}
    return row | {"(P-1)/(M+P-1)": formula}


@pytest.mark.parametrize(
    ("last", "again_mb", "difference", "verdict"),
    [
        (0.2, 9.0, 1e-7, "holds"),
        (0.3, 9.0, 1e-7, "partly"),  # not by the formula
        (0.2, 9.0, 1e-3, "partly"),  # other gradients
        (0.2, 11.0, 1e-7, "partly"),  # saves nothing
        (0.75, 11.0, 1e-7, "refuted"),
    ],
)
def test_claim(last, again_mb, difference, verdict):
    held = {"micro-batches": 1, "kept_mb": 10.0, "re-materialized_mb": again_mb}
    claim = claims.pipeline(
        [bubble(1, 0.75, 0.75), bubble(12, last, 0.2)],
        [held],
        [{"gradients apart": difference}],
        [],
        stages=4,
    )
    assert (claim.verdict, claim.expected, claim.measured) == (verdict, 0.2, last)


@needs_compiler("h100")
def test_a_pipeline_for_h100():
    small = Stack(stages=2, blocks=1, width=128, hidden=256, dtype=jnp.bfloat16)
    row = h100.row(small, 3, True, 96)
    assert row["bubble"] == 1 / 4
    assert 0 < row["useful_ms"] < 3 / 4 * row["passes_ms"]
    assert row["temporaries_mb"] > 0


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"stages": 9}, "--stages got 9 for 8 devices"),
        ({"stages": 1}, "--stages got 1 for 8 devices"),
        ({"rows": 500}, "--rows got 500"),
        ({"rows": 1824}, "--rows got 1824"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(given, says):
    with pytest.raises(ValueError, match=says):
        pipeline.Config(**given).check()


def test_rows_that_are_split_keep_their_labels():
    batch = pipeline_program.split(np.arange(12.0).reshape(6, 2), np.arange(6), 3)
    assert batch.labels.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert batch.x[2].tolist() == [[8, 9], [10, 11]]
