"""What the experiment `algorithms` prices, times and says, by hand."""

import re

import pytest

import jaxdp
from experiments import algorithms as experiment
from experiments.parts import algorithms_claims as claims
from experiments.parts import algorithms_hardware as hardware
from experiments.parts import algorithms_prices as prices
from experiments.parts import algorithms_times as times
from jaxdp import algorithms
from tests import experiments_contract as contract

NAMES = [*algorithms.SCHEDULES["all_reduce"]]
MACHINES = hardware.machines()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return contract.run("algorithms", tmp_path_factory.mktemp("results"))


def test_what_is_written(ran):
    contract.check(ran, {"CB1": "holds", "CB2": "holds"})
    contract.check_labels(ran.document)


def test_every_algorithm_is_counted_priced_and_timed(ran):
    tables = ran.document["tables"]
    for name in ("moved", "predicted", "measured"):
        found = {row["algorithm"] for row in tables[name]}
        assert found - {"native"} == {*NAMES}  # hosts of 8 are not full
    hosts = {row["hardware"] for row in tables["hardware"]}
    assert hosts == {row["hardware"] for row in tables["predicted"]} == {*MACHINES}
    assert all(row["chosen"] in NAMES for row in tables["where_the_choice_changes"])


def test_four_kinds_of_hardware_differ():
    assert len({*MACHINES.values()}) == len(MACHINES) == 4
    within = {name: each.link_between(0, 1).name for name, each in MACHINES.items()}
    beyond = {name: each.link_between(0, 8).name for name, each in MACHINES.items()}
    assert [*within.values()] == ["nvlink4", "nvlink4", "pcie3", "ethernet-10g"]
    assert [*beyond.values()] == [
        *("nvlink4", "infiniband-ndr", "ethernet-10g", "ethernet-10g")
    ]
    assert MACHINES[hardware.NVLINK].host(hardware.MOST - 1) == 0


def test_moved_by_hand():
    rows = {(row["algorithm"], row["N"]): row for row in prices.moved([3, 8])}
    assert len(rows) == 2 * len(NAMES)
    (across,) = [r for r in prices.moved([16]) if r["algorithm"] == "hierarchical"]
    assert (across["rounds"], across["busiest sends / K"]) == (2 * 7 + 2, 30 / 16)
    ring, star = rows["ring", 8], rows["star", 3]
    assert (ring["rounds"], ring["links used"]) == (14, 8)
    assert ring["busiest sends / K"] == ring["busiest receives / K"] == 7 / 4
    assert ring["all send / K"] == 14
    assert (star["busiest sends / K"], star["all send / K"]) == (2, 4)
    assert rows["recursive_doubling", 3]["rounds"] == 3


def test_times_by_hand():
    size = 2**20
    rows = {
        (row["hardware"], row["N"], row["algorithm"]): row["1 MiB_us"]
        for row in prices.predicted(MACHINES, [8, 16], [size])
    }
    alone = rows[hardware.ETHERNET, 8, "ring"]
    assert alone == pytest.approx(14 * (50 + size / 8 / 1.25e3))  # us, bytes per us
    assert rows[hardware.ETHERNET, 8, "native"] == pytest.approx(alone)
    inside = rows[hardware.NVLINK, 16, "ring"]
    assert inside == pytest.approx(30 * (10 + size / 16 / 450e3))
    # The slowest link holds up all: one pair leaves a host in each round.
    between = rows[hardware.INFINIBAND, 16, "ring"]
    assert between == pytest.approx(30 * (15 + size / 16 / 50e3))
    across = rows[hardware.INFINIBAND, 16, "hierarchical"]
    both = 14 * (10 + size / 8 / 450e3), 2 * (15 + size / 16 / 50e3)
    assert across == pytest.approx(sum(both))
    assert (hardware.NVLINK, 16, "hierarchical") not in rows


def test_changes_begin_at_the_smallest_size_and_are_those_of_the_choice():
    rows = prices.changes(MACHINES, [6])
    for hosts, machine in MACHINES.items():
        here = [row for row in rows if row["hardware"] == hosts]
        assert here[0]["from_bytes"] == 1024
        for row in here:
            at = jaxdp.choose_algorithm(row["from_bytes"], 6, machine)
            assert at.algorithm == row["chosen"]
        for row, last in zip(here[1:], here, strict=False):
            below = jaxdp.choose_algorithm(int(0.98 * row["from_bytes"]), 6, machine)
            assert below.algorithm == last["chosen"] != row["chosen"]


def test_choices_in_words():
    words = {row["hardware"]: row["chosen"] for row in prices.chosen(MACHINES, [6])}
    assert words[hardware.NVLINK] == "recursive_doubling; from 9.83 MiB ring"


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (8, "8 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1010 * 1024, "1010 KiB"),
        (2**26, "64 MiB"),
        (2**30, "1 GiB"),
    ],
)
def test_sizes_in_words(size_bytes, text):
    assert prices.written(size_bytes) == text


def test_agreement_compares_with_the_quickest_that_was_measured():
    chosen = jaxdp.choose_algorithm(1024, 4).algorithm
    (other,) = [name for name in ("star", "ring") if name != chosen][:1]
    took = {name: 9.0 for name in NAMES} | {"native": 1.0, other: 2.0, chosen: 3.0}
    rows = [
        {"N": 4, "size_bytes": 1024, "algorithm": n, "median_ms": t, "label": "here"}
        for n, t in took.items()
    ]
    (row,) = times.agreement(rows)
    assert (row["chosen"], row["quickest"]) == (chosen, other)
    assert row["chosen / quickest"] == 1.5
    assert row["quickest / native"] == 2
    assert row["ring / quickest"] == took["ring"] / 2


@pytest.mark.parametrize(
    ("algorithm", "column", "wrong"),
    [
        ("ring", "busiest sends / K", "CB1"),
        ("star", "busiest sends / K", "CB2"),
        ("star", "all send / K", "CB2"),
    ],
)
def test_claims_are_refuted_if_one_count_is_wrong(algorithm, column, wrong):
    moved = prices.moved([2, 8])
    predicted = prices.predicted(MACHINES, [2, 8], [prices.LARGEST])

    def verdicts(rows):
        found = claims.ring(rows), claims.root(rows, predicted)
        return {claim.id: claim.verdict for claim in found}

    assert verdicts(moved) == {"CB1": "holds", "CB2": "holds"}
    bad = [
        {**row, column: row[column] + 0.125} if row["algorithm"] == algorithm else row
        for row in moved
    ]
    assert verdicts(bad) == {"CB1": "holds", "CB2": "holds", wrong: "refuted"}


def test_the_claim_about_time_is_refuted_if_it_is_not_about_n():
    moved = prices.moved([2, 8])
    predicted = prices.predicted(MACHINES, [2, 8], [prices.LARGEST])
    slow = [
        {**row, "1 GiB_us": 0.9 * row["1 GiB_us"]}
        if row["algorithm"] == "star"
        else row
        for row in predicted
    ]
    assert claims.root(moved, slow).verdict == "refuted"
    assert re.search(r"10 Gbit/s", claims.root(moved, slow).why)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, "--devices got 1.*--devices 2 or more"),
        ({"size_mb": 0.0}, r"--size-mb got 0\.0.*at least 0\.001 MiB"),
        ({"size_mb": float("nan")}, "--size-mb got nan"),
        ({"repeats": 1}, "--repeats got 1.*at least 2"),
    ],
    ids=["devices", "size", "no size", "repeats"],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        experiment.Config(**options).check()
