"""Frames say what `holdings` and `jaxdp.cost` say, and sentences what frames show."""

import dataclasses
import itertools
import json
import math

import pytest

from jaxdp import algorithms, draw
from jaxdp.cost import cost, time_s
from jaxdp.draw import catalogue, panels
from jaxdp.draw.frames import frames, record
from jaxdp.draw.places import along, places, shortened
from jaxdp.draw.sentences import doing, true_now
from jaxdp.draw.units import bytes_text, seconds_text
from jaxdp.schedule import holdings
from jaxdp.targets import hardware

MIB = 2**20
# Two devices in a host, and one adapter for both: every kind of link takes part.
SHARED = hardware("h100", devices_per_host=2, network_name="ethernet-100g")
every_choice = pytest.mark.parametrize("name", draw.names())


def _devices(name, upto=9):
    return [n for n in range(1, upto) if catalogue.choice(name).fits(n)]


@every_choice
def test_frames_hold_cost_and_last_what_the_library_says(name):
    for devices in _devices(name):
        schedule = catalogue.build(name, devices)
        found = frames(schedule, 1_000_003, SHARED)
        held = [record(frame)["held"] for frame in found]
        assert held == [
            [[sorted(chunk) for chunk in row] for row in moment]
            for moment in holdings(schedule)
        ]
        last, counted = found[-1], cost(schedule, 250_001, 4)  # padded to whole floats
        assert last.sent_bytes == counted.sent_bytes
        assert last.received_bytes == counted.received_bytes
        assert last.clock_s == time_s(schedule, 250_001, 4, SHARED)
        assert [len(f.arrows) for f in found[:-1]] == [
            sum(len(t.pairs) for t in r.transfers) for r in schedule.rounds
        ]
        assert last.arrows == ()


def test_a_ring_counted_by_hand():
    """64 MiB on 4 H100: rounds of 16 MiB at 450 GB/s, each after 10 µs."""
    found = frames(algorithms.ring(4), 64 * MIB, "h100")
    round_s = 10e-6 + 16 * MIB / 450e9
    assert len(found) == 7
    for done, frame in enumerate(found):
        assert frame.sent_bytes == frame.received_bytes == (done * 16 * MIB,) * 4
        assert math.isclose(frame.clock_s, done * round_s)
    first = found[0].arrows[0]
    assert (first.source, first.target, first.chunk, first.op) == (0, 1, 3, "add")
    assert {arrow.op for arrow in found[3].arrows} == {"replace"}


def test_the_root_of_a_star_counted_by_hand():
    _, gathered, _ = frames(algorithms.star(4), 4000, "h100")
    assert gathered.sent_bytes == (0, 4000, 4000, 4000)
    assert gathered.received_bytes == (12000, 0, 0, 0)
    assert math.isclose(gathered.clock_s, 3 * (10e-6 + 4000 / 450e9))


def test_a_frame_is_json():
    frame = frames(algorithms.star(2), 400)[1]
    assert json.loads(json.dumps(record(frame))) == {
        "title": "Round 1",
        "sent_bytes": [0, 400],
        "received_bytes": [400, 0],
        "clock_s": pytest.approx(10e-6, rel=1e-3),
        "now": "After round 0 the whole buffer is complete on device 0.",
        "next": "Device 0 sends the whole buffer to device 1, where it is stored.",
        "detail": "",
        "held": [[[0, 1]], [[1]]],
        "sends": [{"source": 0, "target": 1, "chunk": 0, "op": "replace"}],
    }


def _words(schedule, done):
    moments = panels.moments(schedule)
    now = true_now(moments[done - 1] if done else None, moments[done])
    return (now, *doing(moments[done])) if moments[done].arrows else (now,)


@pytest.mark.parametrize(
    ("schedule", "done", "words"),
    [
        (
            *(algorithms.ring(4), 0),
            (
                "At the start every device holds its own contribution to every chunk.",
                "Every device sends a chunk to the next one, where it is added.",
                "Chunk 3 goes from 0 to 1, chunk 0 from 1 to 2, chunk 1 from 2 to 3, "
                "chunk 2 from 3 to 0.",
            ),
        ),
        (
            *(algorithms.ring(4), 3),
            (
                "After round 2 every device owns the chunk of its own number complete.",
                "Every device sends a chunk to the next one, where it is stored.",
                "Chunk 0 goes from 0 to 1, chunk 1 from 1 to 2, chunk 2 from 2 to 3, "
                "chunk 3 from 3 to 0.",
            ),
        ),
        (
            *(algorithms.ring(8), 3),
            (
                "After round 2 no chunk is complete yet: partial sums have up to 4 of "
                "8 contributions.",
                "Every device sends a chunk to the next one, where it is added.",
                "Chunk 4 goes from 0 to 1, chunk 5 from 1 to 2, chunk 6 from 2 to 3, "
                "chunk 7 from 3 to 4, and so on.",
            ),
        ),
        (
            algorithms.ring(4),
            6,
            ("After round 5 every device holds every chunk complete.",),
        ),
        (
            *(algorithms.star(4), 0),
            (
                "At the start every device holds its own contribution to the whole "
                "buffer.",
                "Devices 1, 2 and 3 send the whole buffer to device 0, where it is "
                "added.",
                "",
            ),
        ),
        (
            *(algorithms.recursive_doubling(4), 1),
            (
                "After round 0 no chunk is complete yet: partial sums have up to 2 of "
                "4 contributions.",
                "Partners 0 and 2, 1 and 3 exchange the whole buffer, and add what "
                "they get.",
                "",
            ),
        ),
        (
            *(algorithms.hierarchical(6, hosts=2), 0),
            (
                "At the start every device holds its own contribution to every chunk.",
                "Every device sends 2 chunks to the next one of its ring (0-1-2, "
                "3-4-5), where they are added.",
                "Chunks 4 and 5 go from 0 to 1, chunks 0 and 1 from 1 to 2, chunks 2 "
                "and 3 from 2 to 0, chunks 4 and 5 from 3 to 4, and so on.",
            ),
        ),
        (
            *(algorithms.bidirectional_ring(5), 0),
            (
                "At the start every device holds its own contribution to every chunk.",
                "Every device sends a chunk to both neighbours, where it is added.",
                "Chunk 2 goes from 0 to 1, chunk 3 from 0 to 4, chunk 4 from 1 to 0, "
                "chunk 3 from 1 to 2, and so on.",
            ),
        ),
        (
            *(algorithms.star_gather(5), 1),
            ("After round 0 device 0 holds every chunk complete.",),
        ),
        (
            *(algorithms.star_scatter(5), 1),
            ("After round 0 every device owns the chunk of its own number complete.",),
        ),
        (
            *(algorithms.tree_broadcast(6), 1),
            (
                "After round 0 the whole buffer is complete on devices 2 and 4.",
                "Whole buffers travel from 2 to 1, 4 to 3, 4 to 5, where they are "
                "stored.",
                "",
            ),
        ),
        (
            *(algorithms.ring(1), 0),
            (
                "At the start the only device holds everything: there is nothing to "
                "send.",
            ),
        ),
    ],
    ids=lambda value: (
        getattr(value, "name", value) if not isinstance(value, tuple) else ""
    ),
)
def test_words_of_a_round(schedule, done, words):
    assert _words(schedule, done) == words


@every_choice
def test_devices_stand_apart_and_on_no_link_of_others(name):
    hosts = catalogue.choice(name).hosts
    for devices in _devices(name):
        placed = places(catalogue.build(name, devices), hosts)
        assert len(placed.points) == devices
        assert all(0 < x < 1 and 0 < y < 1 for x, y in placed.points)
        pairs = itertools.combinations(placed.points, 2)
        assert all(math.dist(a, b) > 0.1 for a, b in pairs)
        for link in placed.links:
            start, end = placed.points[link.source], placed.points[link.target]
            others = set(placed.points) - {start, end}
            way = [along(start, link.over, end, t / 20) for t in range(21)]
            assert all(math.dist(p, other) > 0.07 for p in way for other in others)


def test_places_suit_who_sends_to_whom():
    ring = places(algorithms.ring(4))
    compass = [(0.5, 0.1), (0.9, 0.5), (0.5, 0.9), (0.1, 0.5)]
    assert all(
        math.dist(*pair) < 1e-9 for pair in zip(ring.points, compass, strict=True)
    )
    assert {(link.source, link.target) for link in ring.links} == {
        *((0, 1), (1, 2), (2, 3), (3, 0))
    }
    assert places(algorithms.star(5, root=2)).points[2] == (0.5, 0.5)
    tree = places(algorithms.tree(8)).points  # 0 over 2 and 6, 5 over 4
    assert tree[0][1] < tree[2][1] == tree[6][1] < tree[1][1] == tree[5][1] < tree[4][1]
    assert tree[4][0] == tree[5][0]
    assert tree[2][0] < tree[0][0] < tree[6][0]
    hosts = places(algorithms.hierarchical(6, hosts=2), hosts=2)
    assert hosts.groups == ((0, 1, 2), (3, 4, 5))
    assert {x for x, _ in hosts.points[:3]} == {0.25}


def test_a_shortened_link_leaves_room_for_both_ends():
    curve = shortened((0.0, 0.0), (0.5, 0.4), (1.0, 0.0), 0.1)
    assert 0.1 < math.dist(curve[0], (0, 0)) < 0.13
    assert 0.1 < math.dist(curve[2], (1, 0)) < 0.13
    whole = [along((0.0, 0.0), (0.5, 0.4), (1.0, 0.0), t / 200) for t in range(201)]
    assert min(math.dist(along(*curve, 0.3), p) for p in whole) < 0.003


def test_every_schedule_of_the_library_can_be_drawn():
    known = {f.__name__ for c in algorithms.SCHEDULES.values() for f in c.values()}
    assert known < {*draw.names()}
    assert {*draw.names()} - known == {"hierarchical", "sharded_servers"}


def test_an_unknown_name_lists_all_and_the_nearest():
    with pytest.raises(ValueError) as error:
        catalogue.build("Recursive-dubling", 4)
    message = str(error.value)
    assert message.endswith("Did you mean 'recursive_doubling'?")
    assert all(name in message for name in draw.names())


@pytest.mark.parametrize(
    ("name", "devices", "message"),
    [
        ("ring", 0, r"0 devices for ring.*between 1 and 16"),
        ("ring", 17, r"17 devices for ring.*between 1 and 16"),
        ("hierarchical", 5, r"5 devices.*an even number.*Choose 4 or 6"),
        ("sharded_servers", 1, r"1 devices.*at least 2.*Choose 2"),
    ],
)
def test_devices_that_cannot_be_drawn(name, devices, message):
    with pytest.raises(ValueError, match=message):
        catalogue.build(name, devices)


def test_a_malformed_schedule_is_refused():
    ring = algorithms.ring(4)
    broken = dataclasses.replace(ring, rounds=ring.rounds[:1] * 2)
    with pytest.raises(ValueError, match=r"round 1.*twice"):
        frames(broken)


def test_figures_have_three_digits_and_a_unit():
    assert [bytes_text(n) for n in (0, 999, 1000, 48 * MIB, 2**34)] == [
        *("0 B", "999 B", "0.977 KiB", "48 MiB", "16 GiB")
    ]
    assert [seconds_text(s) for s in (0, 142.4e-6, 1.418e-3, 2, 5e-10)] == [
        *("0 µs", "142 µs", "1.42 ms", "2 s", "0.5 ns")
    ]
