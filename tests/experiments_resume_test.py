"""The experiment `resume`: what goes on from where, and what damage does."""

import json

import numpy as np
import pytest

from experiments import resume
from experiments.parts import resume_damage as damage
from experiments.parts import resume_rates as rates
from experiments.parts import resume_runs as runs
from experiments.parts.resume_rates import Times
from experiments.parts.resume_runs import Run
from tests import experiments_contract as contract


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A tiny run, on 4 devices."""
    options = "--devices", "4", "--batch-size", "16"
    return contract.run("resume", tmp_path_factory.mktemp("results"), *options)


def test_what_is_written(ran):
    contract.check(ran, {})


def test_runs_go_on(ran):
    same, zero, back = ran.found.tables["resumed"]
    assert [row["to"] for row in (same, zero)] == ["ring", "ZeRO 3"]
    assert (same["devices"], zero["devices"]) == (4, 2)
    assert same["first step that differs"] == "none"
    assert same["largest apart"] == 0.0
    assert back["to"] == "ZeRO 3 on 2, then ring"
    for row in (zero, back):
        assert row["first loss apart"] < 1e-6
        assert row["largest apart"] < 1e-4
        assert row["from"] == "ring on 4"
    # 64 x 64 + 64 x 10 parameters and two moments, in float32; names and a manifest
    assert 0 < same["bytes on disk"] - 3 * 4 * 4736 < 20_000


def test_every_damage_is_found(ran):
    rows = ran.found.tables["damage"]
    assert {row["restore"] for row in rows} == {"used step 2 instead"}
    files = {row["file"] for row in rows}
    assert {"manifest.json", "arrays/_METADATA", "arrays/manifest.ocdbt"} <= files
    assert [row["damage"] for row in rows[:3]] == [*damage.DAMAGES]
    told = {
        row["damage"]: row["says"] for row in rows if row["file"] == "arrays/_METADATA"
    }
    assert told["one bit flipped"] == "has another checksum"
    assert told["missing"] == "is missing"
    assert "bytes instead of" in told["cut in half"]


def test_what_no_restore_survives_is_said(ran, tmp_path):
    sizes = runs.Sizes(4, 2, 16)
    runs.whole(tmp_path / "run", 2, sizes)
    training = runs.training("ring", 2)
    assert damage.restore(tmp_path / "run", training, 1, 2) == ("used step 2", "")
    for step in ("00000001", "00000002"):
        damage.damage(tmp_path / "run" / step / "manifest.json", "missing")
    did, why = damage.restore(tmp_path / "run", training, 1, 2)
    assert did == "refused" and "manifest.json is missing" in why


def test_a_row_beside_the_run_that_never_stopped():
    never = Run("ring", 8, 1, [4.0, 3.0, 2.0, 1.0], 99)
    row = Run("native", 8, 3, [2.0, 1.25], 99).row(never)
    assert row["first step that differs"] == 4
    assert (row["first loss apart"], row["largest apart"]) == (0.0, 0.25)


def test_rates_are_medians():
    measured = [
        Times(10**9, write, 0.5, 2.0, 1.5, 0.01, 0.3, 0.2) for write in (1.0, 9.0, 1.2)
    ]
    write, read, both = rates.speed(measured)
    assert (write["disk_s"], write["checkpoint_s"]) == (1.2, 2.0)
    assert write["share of the disk"] == 0.6
    assert read["disk GB/s"] == 2.0
    assert both["share of the disk"] == pytest.approx(1.7 / 3.5)
    (row,) = rates.blocked(measured)
    assert row["share of the save"] == 0.005


def test_the_disk_alone(tmp_path, monkeypatch):
    """A file of 2.5 pieces counts for as long as 2.5 pieces take."""
    monkeypatch.setattr(rates, "PIECE", 1000)
    wrote = []

    def timed(function):
        function()
        wrote.append((tmp_path / "plain").stat().st_size)
        return None, 2.0

    monkeypatch.setattr(rates, "timed", timed)
    assert rates.plain_file(tmp_path, 2500) == (2.5, 2.5)
    assert wrote == [2000, 2000]
    assert [*tmp_path.iterdir()] == []


def test_plan_covers_all_designs():
    plan = runs.plan(8, tiny=False)
    assert {name for name, _ in plan} == {*runs.DESIGNS}
    assert {n for name, n in plan if name == "ZeRO 3"} == {8, 4, 2}
    assert json.dumps(plan)


def test_large_states_have_the_size_that_was_asked_for():
    _, state = rates.large(24.0)
    size = sum(np.asarray(x).nbytes for x in (*state.params, *state.opt_state[0].mu))
    assert size * 1.5 == pytest.approx(24e6, rel=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1, "batch_size": 8}, "2 devices"),
        ({"saved_at": 1}, "--saved-at got 1|--saved-at 1"),
        ({"steps": 21}, "--steps 21"),
        ({"size_mb": 0.5}, "--size-mb got 0.5"),
        ({"batch_size": 90}, "--batch-size got 90"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        resume.Config(**options).check()
