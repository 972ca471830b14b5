"""What the experiment `ddp` reads from programs and processes, by hand-made numbers."""

import importlib.util

import jax
import numpy as np
import pytest

import jaxdp
from experiments import ddp
from experiments.parts import ddp_accumulation, ddp_buckets, ddp_rivals
from tests.helpers import needs_torch

SIZES = ddp_buckets.Sizes(layers=3, width=8, rows=2)  # 288 bytes of gradients a layer
ONE_LAYER = 1.01 * SIZES.layer_mb


@pytest.fixture(scope="module")
def steps():
    mesh = jaxdp.data_mesh(4)
    return {
        overlap: ddp_buckets.step(mesh, SIZES, ONE_LAYER, overlap)
        for overlap in (True, False)
    }


def test_sizes():
    assert SIZES.layer_mb * 2**20 == 4 * (8 * 8 + 8)
    assert SIZES.backward_matmuls == 5


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "none"])
def test_as_many_rings_as_buckets(steps, overlap):
    planned = ddp_buckets.planned(steps[overlap])
    assert [row["bucket_bytes"] for row in planned] == [4 + 32, 288, 288, 256]
    assert planned[1]["leaves"] == "params['layer2']['w'], params['layer1']['b']"
    row = ddp_buckets.compiled(steps[overlap], 4)
    assert row["buckets planned"] == row["rings compiled"] == 4
    assert row["permutes"] == row["expected permutes"] == 4 * 6
    # 6 rounds of a quarter: 9, 72, 72 and 64 elements, 9 padded to 12.
    assert row["each device sends_bytes"] == 6 * (3 + 18 + 18 + 16) * 4
    assert row["overlap"] is overlap


def test_buckets_wait_for_more_and_more_of_the_backward_pass(steps):
    """The bias of the last layer for none; each layer adds dw, and dx below it.

    dw2, dx2 for w2 and b1; dx2, dw1, dx1 for w1 and b0; dx2, dx1, dw0 for w0.
    """
    assert ddp_buckets.waiting(steps[True], SIZES) == [0, 2, 3, 3]
    assert ddp_buckets.waiting(steps[False], SIZES) == [5] * 4


def test_micro_batches_divide_the_bytes_of_a_row_and_keep_the_gradient():
    table = ddp_accumulation.rows(jaxdp.data_mesh(2), SIZES)
    assert [row["micro-batches k"] for row in table] == [1, 2, 4, 8]
    assert [row["rows of a step"] for row in table] == [4, 8, 16, 32]
    assert {row["rings"] for row in table} == {1}
    # Two rounds of a half of 3 x 72 gradients and a loss, 217 padded to 218.
    sent = [218 * 4 / rows for rows in (4, 8, 16, 32)]
    assert [row["sent per row_bytes"] for row in table] == sent
    assert max(row["gradient's relative difference"] for row in table) < 1e-5
    assert ddp_buckets.loss_fn(*ddp_buckets.make(SIZES, 2)) > 0.1  # not learnt before


def test_bytes_of_the_busiest_device():
    table = ddp_rivals.compare(jaxdp.data_mesh(4), batch_size=8, repeats=2)
    rows = {row["step"]: row for row in table}
    phi = 4 * 38_282
    ring, star = rows["RingAllReduce"], rows["GatherToRoot"]
    assert ring["busiest sends_bytes"] == 2 * 3 * 4 * -(-(38_282 + 1) // 4)
    assert star["busiest sends_bytes"] == 3 * (phi + 4)
    # Parameters out; the gradients of 6 rows' logits too. Gradients and logits in.
    port = rows["DataParallel"]
    assert port["busiest sends_bytes"] == 3 * phi + 6 * 10 * 4
    assert port["busiest receives_bytes"] == 3 * phi + 6 * 10 * 4
    assert port["of DataParallel's time"] == 1
    assert ddp_rivals.claim(table, 4).verdict == "partly"


def test_ddp_saves_all_but_an_nth_of_the_communication():
    found = {
        row["communication of a DP step"]: row["DDP is faster by"]
        for row in ddp_rivals.shares(4)
    }
    np.testing.assert_allclose([found[0.2], found[0.4]], [0.15, 0.3])
    claimed = [row["as claimed"] for row in ddp_rivals.shares(4)]
    assert claimed == [False, True, True, True, False, False]


def test_claim_is_refuted_if_ddp_loads_a_device_more():
    def row(step, sent, part):
        return {"step": step, "busiest sends_bytes": sent, ddp_rivals.OF_PORT: part}

    slower = [row("DataParallel", 6, 1.0), row("RingAllReduce", 7, 1.2)]
    claim = ddp_rivals.claim(slower, 4)
    assert claim.verdict == "refuted"
    faster = [row("DataParallel", 6, 1.0), row("RingAllReduce", 3, 0.8)]
    claim = ddp_rivals.claim(faster, 4)
    assert claim.verdict == "partly"
    assert str(claim.measured).startswith("20 % faster")
    assert "2.0 times the bytes" in claim.why and "20 to 40 %" in claim.why


def test_options_that_do_not_fit():
    with pytest.raises(ValueError, match=r"--devices got 1, --layers 8.*at least 2"):
        ddp.Config(devices=1).check()
    with pytest.raises(ValueError, match=r"--layers 0.*--layers 8"):
        ddp.Config(layers=0).check()
    assert ddp.Config(tiny=True).sizes == ddp.TINY


def test_pytorch_is_left_out_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert ddp.beside_pytorch(ddp.Config()) == {}
    assert "PyTorch is not installed" in capsys.readouterr().out


@pytest.mark.torch
@needs_torch
def test_same_parameters_as_pytorch():
    from experiments.parts import ddp_torch

    (row,) = ddp_torch.parity(2)
    assert row["our buckets"] > 2
    assert row["parameters moved by"] > 0.1
    assert row["largest difference"] < 1e-5
    assert jax.device_count() == 8
