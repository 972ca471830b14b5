"""What the experiment `bandwidth` makes of times and bytes, by hand-made numbers."""

import re

import numpy as np
import pytest

from experiments import bandwidth, network
from experiments.harness import command
from experiments.parts import bandwidth_claims as claims
from experiments.parts import bandwidth_figures as figures
from experiments.parts import bandwidth_mlp as mlp
from experiments.parts import bandwidth_training as training
from experiments.parts import bandwidth_turns as turns
from experiments.parts import bandwidth_ways as ways

RATE = 50e6  # bytes a second
MIB = 2**20


@pytest.mark.parametrize("devices", range(2, 9))
def test_bounds_in_closed_form(devices):
    def bound(name):
        return ways.bound_s(name, devices, 6.5625, RATE) * RATE  # 840 divides it

    phi, n = 6.5625 * MIB, devices
    assert phi % (4 * 840) == 0
    expected = {
        ways.RING: 2 * (n - 1) / n * phi,
        ways.PSUM: 2 * (n - 1) / n * phi,
        ways.TORCH: 2 * (n - 1) / n * phi,
        ways.STAR: 2 * (n - 1) * phi,
        ways.servers(n): 2 * (n - 1) / n * phi,
        ways.PERMUTE: phi,
        ways.DOUBLING: phi * {2: 1, 3: 3, 4: 2, 5: 4, 6: 4, 7: 4, 8: 3}[n],
    }
    for name, total in expected.items():
        np.testing.assert_allclose(bound(name), total, err_msg=name)
    if n > 2:
        np.testing.assert_allclose(bound(ways.servers(2)), (n - 1) * phi)


def test_bounds_of_the_example():
    """4 hosts, 16 MiB, 400 Mbit/s."""
    ms = {name: 1e3 * ways.bound_s(name, 4, 16, RATE) for name in ways.names(4, True)}
    assert {name: round(value) for name, value in ms.items()} == {
        "star": 2013,
        "2 servers": 1007,
        "4 servers": 503,
        "recursive doubling": 671,
        "ring": 503,
        "native psum": 503,
        "torch all_reduce": 503,
        "bare ppermute": 336,
    }
    assert ways.TORCH not in ways.names(4, False)
    assert ways.names(2, True).count("2 servers") == 1


def test_headers():
    np.testing.assert_allclose(ways.overhead(1500), 1514 / 1448)
    np.testing.assert_allclose(ways.overhead(9000), 9014 / 8948)


def test_medians_stand_beside_bounds():
    case = turns.Case(ways.RING, 4, 16.0)
    assert (case.calls, turns.Case(ways.RING, 4, 0.25).calls) == (1, 16)
    blocks = [turns.Block(s, [], []) for s in (0.9, 0.5, 0.6, 0.7, 0.8)]
    row = turns.timed(case, blocks, RATE)
    assert (row["low_ms"], row["time_ms"], row["high_ms"]) == (600, 700, 800)
    np.testing.assert_allclose(row["ratio"], 0.7 / (1.5 * 16 * MIB / RATE))


def test_bytes_are_medians_by_host():
    case = turns.Case(ways.STAR, 2, 1.0)
    blocks = [turns.Block(1.0, [100.0 + i, 7.0], [20.0, 30.0 + i]) for i in (0, 5, 90)]
    first, second = turns.carried(case, [100, 50], blocks)
    assert (first["host"], first["sent_bytes"], first["received_bytes"]) == (0, 105, 20)
    assert (second["sent_bytes"], second["received_bytes"]) == (7, 35)
    assert first["sent / program"] == 1.05
    assert turns.carried(case, [], blocks)[0]["program_bytes"] is None


def test_a_step_hides_what_it_takes_less_than_its_parts():
    block = training.Block
    seconds = {
        block(False, training.COMPUTE, False): [0.4, 0.5, 0.6],
        block(False, training.RING, False): [0.9, 0.8, 0.7],
        block(False, training.RING, True): [0.7, 0.7, 0.7],
        block(True, training.COMPUTE, False): [0.2, 0.2, 0.2],
        block(True, training.TORCH, False): [0.6, 0.6, 0.6],
        block(True, training.TORCH, True): [0.5, 0.5, 0.5],
    }
    ours, theirs = training.rows(seconds, 2, mlp.Sizes(2, 8, 4), 1.0)
    assert (ours["design"], theirs["design"]) == (training.RING, training.TORCH)
    np.testing.assert_allclose(ours["hidden_ms"], 400)  # of 500 + 700, in 800
    np.testing.assert_allclose(ours["hidden / shorter"], 0.8)
    np.testing.assert_allclose(ours["step / longer"], 8 / 7)
    np.testing.assert_allclose(ours["compute / step"], 5 / 8)
    np.testing.assert_allclose(theirs["hidden_ms"], 100)
    np.testing.assert_allclose(theirs["hidden / shorter"], 0.5)
    assert "3 blocks of 3 steps" in ours["label"] and "4 rows a host" in ours["label"]


class FakeGroups:
    """Processes of two hosts, whose losses are given by way."""

    count, torch = 2, True

    def __init__(self, **losses):
        self.losses = losses

    def ask(self, torch, ranks=None, **asked):
        name = "torch" if torch else asked["way"]
        return [[0.001 * asked["sizes"].rows, loss] for loss in self.losses[name]]


def trained(monkeypatch, **losses):
    monkeypatch.setattr(training, "Groups", lambda *a: FakeGroups(**losses))
    return training.Training(None, 2, mlp.Sizes(2, 8, 4), 1.0, ())  # type: ignore


def test_first_losses_must_agree(monkeypatch):
    made = trained(
        monkeypatch, compute=[1.0, 3.0], right=[2.0, 2.0], torch=[1.0, 3.0], no=[2, 3]
    )
    made.check(training.Block(False, training.COMPUTE, False))
    made.check(training.Block(False, "right", False))
    made.check(training.Block(True, training.TORCH, False))
    made.check(training.Block(False, "no", True))  # another loss: it is idle
    with pytest.raises(RuntimeError, match=r"no starts from.*\[2, 3\].*\[2\.0, 2\.0\]"):
        made.check(training.Block(False, "no", False))


def test_rows_make_computation_as_long_as_communication(monkeypatch):
    made = trained(monkeypatch, compute=[1, 1], RingAllReduce=[1, 1])

    def seconds(block, steps=3):
        if block == training.Block(False, training.NATIVE, True):
            return 0.501
        assert block == training.Block(False, training.COMPUTE, False)
        return 0.1 + 0.001 * made.sizes.rows

    monkeypatch.setattr(made, "seconds", seconds)
    made.balance()
    # 64 rows take 164 ms, so 195.5 take 501 ms: 192, in eights. Those take 292 ms.
    assert made.sizes.rows == 328  # 192 * 501 / 292 = 329.4


def test_networks_are_alike_and_rows_differ():
    sizes = mlp.Sizes(3, 16, 5)
    assert sizes.size_mb * MIB == 3 * 16 * 16 * 4
    assert [w.shape for w in mlp.params(sizes)] == [(16, 16)] * 3
    np.testing.assert_array_equal(mlp.params(sizes)[2], mlp.params(sizes)[2])
    assert mlp.batch(sizes, 0)[0].shape == (5, 16)
    assert (mlp.batch(sizes, 0)[0] != mlp.batch(sizes, 1)[0]).all()


def times(ratios, size_mb=16.0):
    """Rows of a star and a ring by N; rings take 100 ms."""
    return [
        {
            "algorithm": way,
            "devices": n,
            "size_mb": size_mb,
            "time_ms": 100.0 * factor,
            "bound_ms": 90.0 * factor,
        }
        for n, ratio in ratios.items()
        for way, factor in ((ways.STAR, ratio), (ways.RING, 1))
    ]


def traffic(star=(6, 2, 2, 2), ring=(3, 3, 3, 3)):
    return [
        {
            "algorithm": way,
            "host": host,
            "sent_bytes": sent * 2**23,
            "program_bytes": sent * 2**23 if way == ways.STAR else None,
        }
        for way, links in ((ways.STAR, star), (ways.RING, ring))
        for host, sent in enumerate(links)
    ]


@pytest.mark.parametrize(
    ("ratios", "star", "repeats", "verdict"),
    [
        ({2: 1.0, 4: 3.7, 8: 8.7}, (6, 2, 2, 2), 5, "holds"),
        ({4: 3.7, 8: 7.1}, (6, 2, 2, 2), 5, "partly"),
        ({4: 4.5}, (6, 2, 2, 2), 5, "partly"),
        ({4: 4.0}, (6, 2, 2, 2), 4, "partly"),
        ({4: 4.0}, (9, 9, 2, 2), 5, "refuted"),
    ],
    ids=["about N", "less at 8", "more", "few repeats", "more bytes"],
)
def test_a_server_takes_about_n_times_longer(ratios, star, repeats, verdict):
    rows = times(ratios) + times({4: 99.0}, size_mb=64.0)
    claim = claims.servers(rows, traffic(star), 4, 16.0, repeats)
    assert (claim.id, claim.verdict) == ("CB2", verdict)
    assert claim.measured == ratios[4]
    assert f"{sum(star) / 2:.2f} Φ on all 4 links" in claim.why
    assert f"{ratios[4]:.2f} at N = 4" in claim.why


def test_two_hosts_decide_nothing():
    claim = claims.servers(times({2: 2.0}), traffic((1, 1), (1, 1)), 2, 16.0, 9)
    assert claim.verdict == "partly"
    assert "do not decide" in claim.why


@pytest.mark.parametrize(
    ("late", "repeats", "verdict"), [(0.9, 5, "partly"), (0.6, 5, "refuted")]
)
def test_asynchrony_raises_the_share_of_computation(late, repeats, verdict):
    shares = {training.STAR: 0.2, training.RING: 0.5, training.STAGED: 0.7}
    rows = [
        {"design": name, "compute / step": share}
        for name, share in (shares | {training.DELAYED: late}).items()
    ]
    claim = claims.asynchrony(rows, repeats)
    assert (claim.id, claim.verdict) == ("CB4", verdict)
    assert (claim.expected, claim.measured) == ("above 0.70", late)


def test_figures_show_every_way_and_host():
    by_n = times({2: 1.0, 4: 4.0}) + [
        {**row, "algorithm": ways.servers(row["devices"])}
        for row in times({2: 1.0, 4: 4.0})
        if row["algorithm"] == ways.RING
    ]
    axes = figures.against_hosts(by_n, "400mbit", 16.0).axes[0]
    _, labels = axes.get_legend_handles_labels()
    assert labels == ["star", "2 servers", "N servers", "ring"]
    by_size = times({4: 4.0}) + times({4: 4.0}, size_mb=64.0)
    axes = figures.against_size(by_size, "400mbit", 4).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["16", "64"]
    axes = figures.traffic(traffic(), 16.0).axes[0]
    assert [bar.get_height() for bar in axes.patches] == [3, 1, 1, 1] + [1.5] * 4  # type: ignore
    assert len(axes.lines) == 4  # programs' bytes, where they are known
    step = training._row("a design", 800.0, 500.0, 700.0, "")
    axes = figures.training([step]).axes[0]
    assert sorted(bar.get_width() for bar in axes.patches) == [500, 700, 800]  # type: ignore
    assert [text.get_text().strip() for text in axes.texts][
        -1
    ] == "hides 80% of the shorter"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--hosts 1", r"--hosts got 1.*2 hosts or more.*--hosts 4"),
        ("--most-hosts 99", r"--most-hosts 99.*16 pairs"),
        ("--size-mb 0.1", r"--size-mb got 0\.1.*Below 0\.25 MiB"),
        ("--mtu 100", r"--mtu 100.*576 bytes"),
        ("--rate fast", "'fast'.*400mbit"),
        ("--repeats 1", r"--repeats got 1.*at least 2"),
    ],
)
def test_options_that_do_not_fit(capsys, options, message):
    assert command.run(bandwidth, [*options.split(), "--platform", "cpu"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_says_what_is_missing_and_stops(capsys, monkeypatch):
    monkeypatch.setattr(network, "missing", lambda: "No tc. Install iproute2.")
    assert command.run(bandwidth, ["--tiny", "--platform", "cpu"]) == 2
    assert capsys.readouterr().err == "No tc. Install iproute2.\n"


def test_what_is_measured():
    config = bandwidth.Config(size_mb=16.0)
    assert config.sizes_mb == [0.25, 1, 4, 16, 64]
    assert config.counts == [2, 3, 5, 6, 7, 8]
    assert bandwidth.Config(size_mb=1.0).sizes_mb == [0.25, 1, 4]
    tiny = bandwidth.Config(tiny=True).scaled()
    assert (tiny.hosts, tiny.sizes_mb, tiny.counts) == (2, [1], [])
