"""What the experiment `traffic` says designs send: by hand, and by enumeration."""

import re
from collections import Counter
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

import jaxdp
from experiments import traffic
from experiments.harness import devices
from experiments.parts import traffic_claims as claims
from experiments.parts import traffic_counts as counts
from experiments.parts import traffic_designs as designs
from experiments.parts import traffic_formulas as formulas
from experiments.parts import traffic_port as port
from experiments.parts import traffic_tables as tables
from experiments.parts import traffic_times as times
from jaxdp import targets
from tests.compilers import needs_compiler

PHI = 4 * (250 * 107 + 107)


def ring_moves(n):
    """Both phases: N - 1 rounds each, a chunk to the right."""
    return [
        (r, (r + 1) % n, Fraction(1, n)) for _ in range(2 * (n - 1)) for r in range(n)
    ]


def server_moves(n, servers, first_worker=0):
    """Push from every worker, pull by everybody; nobody sends to itself."""
    part = Fraction(1, servers)
    push = [
        (w, s, part) for w in range(first_worker, n) for s in range(servers) if w != s
    ]
    pull = [(s, d, part) for s in range(servers) for d in range(n) if s != d]
    return push + pull


def doubling_moves(n):
    """Everybody with its partner; those beyond a power of two before and after."""
    power = max(2**k for k in range(10) if 2**k <= n)
    moves = [(r, r - power, Fraction(1)) for r in range(power, n)]
    distance = 1
    while distance < power:
        moves += [(r, r ^ distance, Fraction(1)) for r in range(power)]
        distance *= 2
    return moves + [(r - power, r, Fraction(1)) for r in range(power, n)]


def part_moves(n):
    """A part to each owner, then N - 1 rounds of a ring."""
    there = [(a, b, Fraction(1, n)) for a in range(n) for b in range(n) if a != b]
    back = [(r, (r + 1) % n, Fraction(1, n)) for _ in range(n - 1) for r in range(n)]
    return there + back


SIZES = (1, 2, 3, 4, 5, 7, 8, 16)
EXCHANGES = {  # share, moves, fewest devices
    "ring": (formulas.ring, ring_moves, 1),
    "star": (formulas.star, lambda n: server_moves(n, 1), 1),
    "2 servers": (lambda n: formulas.servers(n, 2), lambda n: server_moves(n, 2), 2),
    "4 servers": (lambda n: formulas.servers(n, 4), lambda n: server_moves(n, 4), 4),
    "1 apart": (lambda n: formulas.dedicated(n, 1), lambda n: server_moves(n, 1, 1), 2),
    "3 apart": (lambda n: formulas.dedicated(n, 3), lambda n: server_moves(n, 3, 3), 4),
    "doubling": (formulas.doubling, doubling_moves, 1),
    "parts": (formulas.parts, part_moves, 1),
}


@pytest.mark.parametrize(
    ("name", "n"),
    [(name, n) for name in EXCHANGES for n in SIZES if n >= EXCHANGES[name][2]],
)
def test_shares_are_those_of_an_enumeration(name, n):
    share, moves, _ = EXCHANGES[name]
    sent, received, links = Counter(), Counter(), Counter()
    for source, target, amount in moves(n):
        sent[source] += amount
        received[target] += amount
        links[source, target] += amount
    links = {link: amount for link, amount in links.items() if link[0] != link[1]}
    every = range(n)
    for moved in (sent, received):
        if n > 1:
            assert share(n).most == max(moved[d] for d in every)
            assert share(n).least == min(moved[d] for d in every)
    assert share(n).link == max(links.values(), default=0)
    assert share(n).total == sum(links.values())


@pytest.mark.parametrize(
    ("share", "rounds"),
    [
        (formulas.ring(4), 6),
        (formulas.star(4), 2),
        (formulas.doubling(8), 3),
        (formulas.doubling(3), 3),
        (formulas.doubling(6), 4),
        (formulas.parts(4), 4),
        (formulas.parts(1), 0),
    ],
)
def test_rounds(share, rounds):
    assert share.rounds == rounds


def test_messages_by_hand():
    leaves = (107, 26750)
    assert formulas.whole(leaves) == (PHI, 4, 0)
    assert formulas.chunked(leaves, 8) == (PHI, 4, 4 * 6)  # 26,858 = 8 x 3,357 + 2
    assert formulas.chunked(leaves, 8, beside=0) == (PHI, 0, 4 * 7)
    assert formulas.chunked((), 8) == (0, 4, 4 * 7)
    assert formulas.merged(leaves, 8, (107, 26750, 1)) == (PHI, 4, 4 * (5 + 2 + 7))
    # Four servers: 107 = 4 x 27 - 1, 26,750 = 4 x 6,688 - 2; loss, weight and 8 flags.
    assert formulas.served(leaves, 4, workers=8) == (PHI, 4 * 4 * 10, 4 * 3)
    assert formulas.halved(leaves, 4) == (PHI // 2, 0, 2 * 3)
    # Parts of 27 and 6,688 integers: 1 and 27 blocks of 256, on each of 4 ranks.
    assert formulas.quartered(leaves, 4) == (PHI // 4, 2 * 4 * 28, 3)


def test_sizes_are_divided_by_all_or_by_none():
    uneven, even = (counts.leaves(name) for name in ("uneven", "even"))
    for n in traffic.COUNTS[1:]:
        assert sum(uneven) % n
        assert not any(leaf % n for leaf in even)
    assert counts.phi("uneven") == PHI
    assert counts.phi("even") == 108_288


def star_counts(n, message, extra=0):
    """A star's counts, with some bytes more from the last device to the first."""
    links = Counter()
    for d in range(1, n):
        links[d, 0] += message
        links[0, d] += message
    links[n - 1, 0] += extra
    sent = tuple(sum(links[d, o] for o in range(n)) for d in range(n))
    received = tuple(sum(links[o, d] for o in range(n)) for d in range(n))
    return counts.Counted(sent, received, dict(links), 2)


def test_one_byte_more_is_not_exact():
    way = designs.WAYS[designs.STAR]
    good = counts.row(way, "uneven", 4, star_counts(4, PHI + 4))
    assert good["exact"] and good["planned"]
    assert (good["gradients_bytes"], good["beside_bytes"]) == (3 * PHI, 12)
    assert good["counted_bytes"] == 3 * (PHI + 4)
    assert good["link, counted_bytes"] == PHI + 4
    assert good["all links, formula_bytes"] == 6 * (PHI + 4)
    assert claims.gradients(good) == 3
    bad = counts.row(way, "uneven", 4, star_counts(4, PHI + 4, extra=1))
    assert not bad["exact"] and not bad["planned"]
    received = star_counts(4, PHI + 4)
    more = tuple(x + 1 for x in received.received)
    assert not counts.row(way, "uneven", 4, received._replace(received=more))["exact"]
    swapped = star_counts(4, PHI + 4)
    turned = {(3 - a, 3 - b): x for (a, b), x in swapped.links.items()}
    other = counts.row(way, "uneven", 4, swapped._replace(links=turned))
    assert other["exact"] and not other["planned"]  # another root


def test_steps_on_three_host_devices_send_what_formulas_say():
    for way in designs.WAYS.values():
        if way.least <= 3:
            row = counts.row(
                way, "uneven", 3, counts.in_program(way.name, "uneven", 3, None)
            )
            assert row["exact"], row
            assert row["planned"] in (True, None), row


@needs_compiler("h100")
@pytest.mark.parametrize(
    ("name", "sent"),
    [
        (designs.RING, 4 * 4 * 8953),  # 26,858 numbers in 3 chunks, 4 rounds
        (designs.NATIVE, 4 * 4 * 8953),
        ("ring, bf16", 2 * 4 * 8953 + 4 * 4),  # parts of 36 and 8,917; a loss
        ("ring, int8", 4 * (8953 + 2 * 36) + 4 * 4),  # and 36 scales
    ],
)
def test_steps_for_h100_by_hand(name, sent):
    counted = counts.in_program(name, "uneven", 3, "h100")
    assert set(counted.sent) == set(counted.received) == {sent}


def test_trace_is_read_by_device_without_the_host():
    def record(source, target, nbytes):
        return SimpleNamespace(source=source, target=target, nbytes=nbytes)

    records = [
        record("host", "cpu:0", 1),
        record("cpu:0", "cpu:1", 2),
        record("cpu:0", "cpu:1", 4),
        record("cpu:1", "cpu:0", 8),
        record("cpu:1", "cpu:1", 0),
    ]
    trace = SimpleNamespace(records=records)
    found = port.read(trace, ["cpu:1", "cpu:0"])  # type: ignore[arg-type]
    assert found.sent == (8, 6) and found.received == (6, 8)
    assert found.links == {(0, 1): 8, (1, 0): 6}


def test_data_parallel_moves_a_star():
    row = counts.row(port.way("uneven"), "uneven", 3, port.count("uneven", 3))
    assert row["exact"]
    assert row["counted_bytes"] == 2 * PHI + 2 * 2 * 107 * 4  # outputs of 2 rows each
    assert row["rounds, formula"] is None


def test_times_by_hand():
    rows = {(r["gradients"], r["N"]): r for r in times.rows([1, 2, 4])}
    assert set(rows) == {
        (g, n) for g in ("ResNet-50", "2,500 parameters") for n in (2, 4)
    }
    row = rows["ResNet-50", 4]
    size = 25_557_032 * 4
    np.testing.assert_allclose(row["ring_ms"], 6 * (0.05 + size / 4 / 1.25e6))
    np.testing.assert_allclose(row["1 server_ms"], 6 * (0.05 + size / 1.25e6))
    np.testing.assert_allclose(row["doubling_ms"], 2 * (0.05 + size / 1.25e6))
    assert rows["ResNet-50", 2]["4 servers_ms"] is None


@pytest.fixture(scope="module")
def rows():
    """What right programs would have sent, of the designs that claims are about."""
    made = []
    for n in (3, 4, 8):
        for name in (designs.RING, designs.ONE_SERVER, designs.SHARED, designs.APART):
            way = designs.WAYS[name]
            if n >= way.least:
                case = designs.Case(n, counts.leaves("uneven"))
                made.append(
                    counts.row(way, "uneven", n, counts.as_scheduled(way, case))
                )
    return made


def test_claims_hold_where_all_is_exact(rows):
    predicted = times.rows([2, 4, 8])
    found = [
        claims.ring(rows, "here"),
        claims.server(rows, predicted, "here"),
        claims.shares(rows, "here"),
    ]
    assert [claim.verdict for claim in found] == ["holds"] * 3
    assert found[0].expected == found[0].measured == 1.75
    assert found[2].expected == found[2].measured == 0.5
    assert found[1].expected == 8
    assert 7.9 < float(found[1].measured) < 8
    assert "0.3571 of what one server does" in found[2].why  # (8 + 2) / 4 of 7


@pytest.mark.parametrize("wrong", ["exact", "planned", "rounds, counted"])
def test_claims_are_refuted_if_one_row_is_wrong(rows, wrong):
    predicted = times.rows([2, 4, 8])
    bad = [row | {wrong: 0} if row["N"] == 8 else row for row in rows]
    assert claims.ring(bad, "").verdict == "refuted"
    assert claims.server(bad, predicted, "").verdict == "refuted"
    assert claims.shares(bad, "").verdict == "refuted"


def test_claim_of_time_is_refuted_if_it_is_not_about_n(rows):
    slow = [{**row, times.RATIO: 0.8 * row["N"]} for row in times.rows([4, 8])]
    assert claims.server(rows, slow, "").verdict == "refuted"


def test_without_the_compiler_it_says_so_and_takes_the_devices_at_hand(
    monkeypatch, capsys
):
    monkeypatch.setattr(targets, "missing", lambda target: f"No compiler for {target}.")
    assert devices.compiler(counts.TARGET) is None
    said = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "No compiler for h100. Steps are compiled for the devices at hand" in said
    monkeypatch.setattr(counts, "in_program", lambda *key: key)
    found = traffic.in_programs([2], ["even"], None)
    assert {key[3] for key in found.values()} == {None}
    assert {key[2] for key in found} == {2}
    assert len(found) == sum(way.least <= 2 for way in designs.WAYS.values())


def test_slow_programs_are_compiled_for_one_gradient_only(monkeypatch):
    monkeypatch.setattr(counts, "in_program", lambda *key: key)
    found = traffic.in_programs([16, 64], ["uneven", "even"], "h100")
    names = {(name, chunks) for name, chunks, n in found if n == 64}
    assert ("ring, int8", "uneven") in names
    assert ("ring, int8", "even") not in names
    assert (designs.RING, "even") in names
    assert ("ring, int8", "even", 16) in found


def test_fractions_become_numbers_that_json_has(rows):
    (row,) = tables.columns(rows[:1], ["N", "gradients_bytes", "counted_bytes"], "x")
    assert isinstance(row["gradients_bytes"], float)
    assert row["label"].startswith("x; Φ = 107,428 bytes")


def test_measures_take_what_is_received_into_account():
    counted = counts.Counted((5, 1), (2, 4), {(0, 1): 4, (1, 0): 2}, 1)
    assert counted.measure("most") == {5, 4}
    assert counted.measure("least") == {1, 2}
    assert counted.measure("link") == {4}
    assert counted.measure("total") == {6}


@pytest.mark.parametrize("given", [{"most": 3}, {"devices": 2}], ids=str)
def test_options_that_do_not_fit(given):
    with pytest.raises(
        ValueError, match=r"--devices got \d and --most \d+.*at least 4"
    ):
        traffic.Config(**given).check()


def test_every_design_of_the_library_with_one_program_is_there():
    kinds = {type(way.design) for way in designs.WAYS.values()}
    assert kinds == {
        jaxdp.GatherToRoot,
        jaxdp.RingAllReduce,
        jaxdp.AllReduce,
        jaxdp.NativeAllReduce,
        jaxdp.ParameterServer,
        jaxdp.LocalSGD,
    }
