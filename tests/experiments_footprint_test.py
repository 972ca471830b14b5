"""What devices hold, in parts: moments, differences, verdicts and figures."""

import numpy as np
import pytest
from matplotlib.patches import Rectangle

from experiments.parts import footprint, footprint_claims
from experiments.parts import footprint_figures as figures
from jaxdp.replicated.views.memory import TEMPORARY, Memory, Snapshot

# Two devices; sizes are powers of two, so that a sum tells what is in it.
SNAPSHOTS = [
    Snapshot("7 backward", "gradients", "cpu:0", {"parameters": 1, "gradients": 2}),
    Snapshot("7 backward", "gradients", "cpu:1", {"gradients": 4}),
    Snapshot("7 backward", "gradients", "cpu:0", {"parameters": 8}),
    Snapshot("7 backward", "gradients", "cpu:1", {"activations": 16}),
    Snapshot("8 reduce", "received gradients", "cpu:0", {"received gradients": 32}),
    Snapshot(
        "8 reduce", "gradient", "cpu:0", {"loss": 64, "batch": 128, "mystery": 999}
    ),
    Snapshot("8 reduce", "gradient", "cpu:1", {TEMPORARY: 256}),
]


@pytest.fixture
def watched():
    memory = Memory()
    memory.snapshots = list(SNAPSHOTS)
    return memory


def small(held):
    """What is there, without zeros."""
    return {d: {k: v for k, v in parts.items() if v} for d, parts in held.items()}


def test_moments_put_together_what_was_counted_together():
    moments = footprint.moments(SNAPSHOTS)
    assert [(each.stage, small(each.held)) for each in moments] == [
        (
            "7 backward",
            {"cpu:0": {"parameters": 1, "gradients": 2}, "cpu:1": {"gradients": 4}},
        ),
        ("7 backward", {"cpu:0": {"parameters": 8}, "cpu:1": {"activations": 16}}),
        ("8 reduce", {"cpu:0": {"received gradients": 32}}),
        (
            "8 reduce",
            {
                "cpu:0": {"outputs": 64, "batch": 128, "other arrays": 999},
                "cpu:1": {TEMPORARY: 256},
            },
        ),
    ]
    assert moments[2].total("cpu:1") == 0


def test_fullest_takes_each_device_at_its_own_moment(watched):
    watched.snapshots[2:3] = []  # cpu:0 has only the first moment of the backward
    held = footprint.fullest(watched, ["cpu:0", "cpu:1"], "7 backward")
    assert small(held) == {
        "cpu:0": {"parameters": 1, "gradients": 2},
        "cpu:1": {"activations": 16},
    }
    everywhere = footprint.fullest(watched, ["cpu:1", "cpu:7"])
    assert small(everywhere) == {"cpu:1": {TEMPORARY: 256}, "cpu:7": {}}


def test_together_takes_all_devices_at_the_first_ones_moment(watched):
    watched.snapshots.append(Snapshot("8 reduce", "late", "cpu:1", {"batch": 512}))
    held = footprint.together(watched, ["cpu:0", "cpu:1"], "8 reduce")
    assert small(held)["cpu:1"] == {TEMPORARY: 256}
    other = footprint.together(watched, ["cpu:1", "cpu:0"], "8 reduce")
    assert small(other) == {"cpu:1": {"batch": 512}, "cpu:0": {}}


def test_difference_is_to_the_mean_of_the_others():
    mib = 2**20
    held = {
        "cpu:0": footprint.split({"received gradients": 30 * mib, "loss": 10 * mib}),
        "cpu:1": footprint.split({"optimizer state": 4 * mib}),
        "cpu:2": footprint.split({"received outputs": 12 * mib, "mystery": 99 * mib}),
    }
    row = footprint.difference("now", held)
    row.pop("label")
    assert row == {
        "moment": "now",
        "main_mb": 40,
        "others_mb": 8,
        "more_mb": 32,
        "more (%)": 400,
        "received gradients_mb": 30,
        "optimizer state_mb": -2,
        "gather buffer_mb": -6,
        "rest_mb": 10,
    }


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((38, 44), "holds"),
        ((38, 60), "partly"),
        ((55, 60), "partly"),
        ((12, 60), "refuted"),
    ],
    ids=["about 40", "one device more", "all more", "one device less"],
)
def test_verdict_on_what_inference_saves(shares, verdict):
    parts = footprint.split({"parameters": 100, "activations": 7})
    before = {f"cpu:{i}": parts for i in range(2)}
    after = {
        f"cpu:{i}": footprint.split({"parameters": 107 * (100 - share)})
        for i, share in enumerate(shares)
    }
    before = {
        device: {k: 100 * v for k, v in held.items()} for device, held in before.items()
    }
    rows = footprint.saved(before, after)
    assert [row["saved (%)"] for row in rows] == pytest.approx(shares)
    assert footprint_claims.no_grad(rows).verdict == verdict


@pytest.mark.parametrize(
    ("main", "other", "verdict"),
    [(2 * 4 * 6, 0, "holds"), (40, 0, "partly"), (48, 8, "refuted")],
    ids=["main device only", "another size", "elsewhere too"],
)
def test_verdict_on_the_gather_buffer(main, other, verdict):
    gathered = {
        "cpu:0": footprint.split(
            {"gathered outputs": main // 2} | {"received outputs": main - main // 2}
        ),
        "cpu:1": footprint.split({"received outputs": other}),
    }
    claim = footprint_claims.gather_buffer(gathered, 2, 3)
    assert claim.verdict == verdict
    assert claim.expected == 24


def test_verdict_on_a_main_device_that_does_not_hold_more():
    parts = footprint.split({"activations": 5, "parameters": 1})
    held = {"cpu:0": parts, "cpu:1": parts}
    rows = [footprint.difference("now", held)] * 3
    claim = footprint_claims.main_device(rows, held, 224, 16, [])
    assert claim.verdict == "refuted" and claim.measured == 0


def test_bars_are_as_long_as_what_is_held():
    mib = 2**20
    parts = {"parameters": 3 * mib, "received outputs": 5 * mib, "batch": 7 * mib}
    parts["mystery"] = 99 * mib  # not the step's
    bars = [figures.Bar("a", footprint.split(parts)), figures.Bar("b", 4.0 * mib)]
    figure = figures.bars("title", [bars[:1], bars[1:]], "note")
    (axes,) = figure.axes
    drawn = [
        (patch.get_y(), patch.get_x(), patch.get_width())
        for patch in axes.patches
        if isinstance(patch, Rectangle) and patch.get_width()
    ]
    (first, *_), *_, (second, *_) = drawn
    assert first < second
    assert drawn == [(first, 0, 3), (first, 3, 12), (second, 0, 4)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b"]
    assert [text.get_text().strip() for text in axes.texts[1:]] == ["15", "4"]


def test_lines_follow_every_device_over_the_moments(watched):
    watched.snapshots = [
        each._replace(kinds={k: v * 2**20 for k, v in each.kinds.items()})
        for each in watched.snapshots
    ]
    figure = figures.lines("title", watched, ["cpu:0", "cpu:1"], "note")
    (axes,) = figure.axes
    assert [np.asarray(line.get_ydata()).tolist() for line in axes.lines] == [
        [3, 8, 32, 192],
        [4, 16, 0, 256],
    ]
    assert list(axes.get_xticks()) == [0, 2]
    stages = [label.get_text() for label in axes.get_xticklabels()]
    assert stages == ["7 backward", "8 reduce"]
