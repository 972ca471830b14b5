"""Durations, stops and links, against sums done by hand."""

import math

import numpy as np
import pytest

from jaxdp.asynchronous import Constant, Link, LogNormal, Stops
from jaxdp.asynchronous.times import Direction, intervals


def computing(times, start_s):
    return list(intervals(times, start_s, np.random.default_rng(0)))


@pytest.mark.parametrize(
    ("times", "start_s", "expected"),
    [
        pytest.param(Constant(4.0), 1.0, [("compute", 1, 5)], id="no-stop"),
        pytest.param(
            Stops(Constant(4.0), 3.0, 10.0),
            1.0,
            [("compute", 1, 3), ("stopped", 3, 10), ("compute", 10, 12)],
            id="within",
        ),
        pytest.param(
            Stops(Constant(4.0), 3.0, 10.0),
            5.0,
            [("stopped", 5, 10), ("compute", 10, 14)],
            id="starts-while-stopped",
        ),
        pytest.param(
            Stops(Constant(4.0), 3.0, 10.0),
            3.0,
            [("stopped", 3, 10), ("compute", 10, 14)],
            id="starts-as-it-stops",
        ),
        pytest.param(
            Stops(Constant(4.0), 5.0, 10.0), 1.0, [("compute", 1, 5)], id="ends-before"
        ),
        pytest.param(
            Stops(Constant(4.0), 3.0, 10.0), 10.0, [("compute", 10, 14)], id="over"
        ),
        pytest.param(
            Stops(Constant(4.0), 3.0),
            1.0,
            [("compute", 1, 3), ("stopped", 3, math.inf)],
            id="never-returns",
        ),
        pytest.param(
            Stops(Stops(Constant(4.0), 12.0, 13.0), 3.0, 10.0),
            1.0,
            [("compute", 1, 3), ("stopped", 3, 10), ("compute", 10, 12)],
            id="second-stop-as-it-ends",
        ),
        *(
            pytest.param(
                times,
                1.0,
                [
                    *[("compute", 1, 3), ("stopped", 3, 10), ("compute", 10, 11)],
                    *[("stopped", 11, 13), ("compute", 13, 14)],
                ],
                id=name,
            )
            for name, times in {
                "two-stops": Stops(Stops(Constant(4.0), 3.0, 10.0), 11.0, 13.0),
                "in-any-order": Stops(Stops(Constant(4.0), 11.0, 13.0), 3.0, 10.0),
            }.items()
        ),
        pytest.param(
            Stops(Stops(Constant(4.0), 3.0, 8.0), 2.0, 5.0),
            1.0,
            [
                *[("compute", 1, 2), ("stopped", 2, 5), ("stopped", 5, 8)],
                ("compute", 8, 11),
            ],
            id="overlapping-stops",
        ),
    ],
)
def test_intervals_of_a_computation(times, start_s, expected):
    assert computing(times, start_s) == expected


def test_log_normal_has_its_median_and_spread():
    random = np.random.default_rng(3)
    samples = [LogNormal(2.0, 0.5).sample(random) for _ in range(4000)]
    assert np.median(samples) == pytest.approx(2.0, rel=0.04)
    assert np.std(np.log(samples)) == pytest.approx(0.5, rel=0.04)
    assert LogNormal(2.0, 0.0).sample(random) == 2.0


def test_a_stop_does_not_change_what_is_drawn():
    plain, stopped = LogNormal(2.0, 0.5), Stops(LogNormal(2.0, 0.5), 100.0, 101.0)
    assert computing(plain, 1.0) == computing(stopped, 1.0)


def test_a_link_serves_messages_in_turn():
    # 0.5 s + 12 bytes * 0.25 s = 3.5 s each.
    link = Direction([Link(0.5, 0.25)], message_bytes=12)
    sent = [link.send(now_s) for now_s in (0.0, 1.0, 7.0, 20.0)]
    assert sent == [3.5, 7.0, 10.5, 23.5]


def test_servers_share_a_message_and_the_last_part_counts():
    # 6 bytes each: 0.5 + 1.5 = 2 s on the first link, 1 + 3 = 4 s on the second.
    links = Direction([Link(0.5, 0.25), Link(1.0, 0.5)], message_bytes=12)
    assert [links.send(now_s) for now_s in (0.0, 1.0)] == [4.0, 8.0]
    # Each of 4 servers carries a quarter: 0.5 + 0.75 = 1.25 s.
    assert Direction([Link(0.5, 0.25)] * 4, message_bytes=12).send(1.0) == 2.25


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(0.0), "Constant got seconds=0.0.*more than 0"),
        (lambda: Constant(-1.0), "seconds=-1.0.*more than 0"),
        (lambda: Constant(math.inf), "seconds=inf.*finite"),
        (lambda: Constant(math.nan), "seconds=nan.*finite"),
        (lambda: LogNormal(0.0, 1.0), "LogNormal got median_s=0.0"),
        (lambda: LogNormal(1.0, -1.0), "LogNormal got sigma=-1.0.*0 or more"),
        (lambda: Stops(Constant(1.0), -1.0), "Stops got at_s=-1.0"),
        (lambda: Stops(Constant(1.0), 3.0, 3.0), "at_s=3.0 and until_s=3.0.*until_s >"),
        (lambda: Link(alpha_s=-1.0), "Link got alpha_s=-1.0.*0 or more"),
        (lambda: Link(beta_s_per_byte=math.nan), "beta_s_per_byte=nan"),
    ],
)
def test_impossible_times_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
