"""`verify` accepts the logs of sound runs, and refuses every way to spoil one."""

import functools

import numpy as np
import optax
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from jaxdp.asynchronous import (
    Backup,
    Bounded,
    Constant,
    Event,
    Eventual,
    Link,
    LogNormal,
    Sequential,
    Span,
    Stops,
    simulate,
    verify,
)

POLICIES = [Sequential(), Eventual(), Bounded(0), Bounded(2), Backup(1), Backup(2)]
WORKERS = 4


@functools.cache
def sound(policy):
    """A run with a straggler, a stop, a busy link and a refused push."""

    def batches(worker, iteration):
        return np.float32(np.nan if (worker, iteration) == (2, 1) else worker + 1)

    times = [LogNormal(1.0, 0.4), Stops(Constant(1.1), 3.0, 4.0)]
    return simulate(
        lambda x, gradient: x * gradient,
        optax.sgd(0.1),
        np.float32(0),
        batches,
        workers=WORKERS,
        policy=policy,
        iterations=5,
        compute=[*times, LogNormal(1.0, 0.4), Constant(2.7)],
        link=Link(0.125),
    )


def refuse(run, spans=None, events=None):
    with pytest.raises(ValueError, match="verify got"):
        verify(
            run.spans if spans is None else spans,
            run.events if events is None else events,
            run.policy,
            run.workers,
        )


over_policies = pytest.mark.parametrize("policy", POLICIES, ids=str)
policies = st.sampled_from(POLICIES)


@over_policies
def test_a_sound_log_is_accepted(policy):
    run = sound(policy)
    run.verify()
    kinds = {event.kind for event in run.events}
    assert kinds >= {"read", "apply", "refuse"}
    assert ("drop" in kinds) == isinstance(policy, Backup)
    assert {s.kind for s in run.spans} >= {"pull", "compute", "stopped", "push"}


def pick(data, items):
    index = data.draw(st.integers(0, len(items) - 1))
    return index, list(items)


@given(policies, st.data())
def test_a_lost_event_is_found(policy, data):
    run = sound(policy)
    index, events = pick(data, run.events)
    del events[index]
    refuse(run, events=events)


@given(policies, st.data())
def test_a_doubled_event_is_found(policy, data):
    run = sound(policy)
    index, events = pick(data, run.events)
    assume(events[index].kind != "read")  # to read twice is no fault
    events.insert(index, events[index])
    refuse(run, events=events)


@given(policies, st.data())
def test_reordered_events_are_found(policy, data):
    run = sound(policy)
    index, events = pick(data, run.events[:-1])
    events.append(run.events[-1])
    first, second = events[index : index + 2]
    # Nothing tells apart two reads of a version, or the pushes of one average.
    assume(first.version != second.version or first.time_s != second.time_s)
    events[index : index + 2] = second, first
    refuse(run, events=events)


@given(
    policies,
    st.sampled_from(["version", "staleness", "iteration"]),
    st.sampled_from([-1, 1, 7]),
    st.data(),
)
def test_a_wrong_number_in_an_event_is_found(policy, field, by, data):
    run = sound(policy)
    index, events = pick(data, run.events)
    wrong = getattr(events[index], field) + by
    events[index] = events[index]._replace(**{field: wrong})
    refuse(run, events=events)


@given(policies, st.integers(-1, WORKERS), st.data())
def test_an_event_of_another_worker_is_found(policy, worker, data):
    run = sound(policy)
    index, events = pick(data, run.events)
    assume(worker != events[index].worker)
    events[index] = events[index]._replace(worker=worker)
    refuse(run, events=events)


@given(policies, st.sampled_from(["read", "apply", "drop", "refuse"]), st.data())
def test_an_event_of_another_kind_is_found(policy, kind, data):
    run = sound(policy)
    index, events = pick(data, run.events)
    old = events[index].kind
    assume(kind != old)
    # What a late push held is not in the log; the counts of the run tell it.
    assume(not (isinstance(policy, Backup) and {kind, old} == {"drop", "refuse"}))
    events[index] = events[index]._replace(kind=kind)
    refuse(run, events=events)


@given(policies, st.data())
def test_time_that_runs_backwards_is_found(policy, data):
    run = sound(policy)
    index, events = pick(data, run.events)
    assume(events[index].time_s > 0)
    time_s = data.draw(st.floats(-1.0, events[index - 1].time_s - 1e-3))
    events[index] = events[index]._replace(time_s=time_s)
    refuse(run, events=events)


@given(policies, st.data())
def test_a_lost_span_is_found(policy, data):
    run = sound(policy)
    index, spans = pick(data, run.spans)
    assume(spans[index].kind in ("pull", "push"))
    del spans[index]
    refuse(run, spans=spans)


@given(policies, st.data())
def test_a_doubled_span_is_found(policy, data):
    run = sound(policy)
    index, spans = pick(data, run.spans)
    assume(spans[index].end_s > spans[index].start_s)
    spans.insert(index, spans[index])
    refuse(run, spans=spans)


@given(
    policies,
    st.sampled_from(["version", "iteration", "worker"]),
    st.sampled_from([-1, 1, 7]),
    st.data(),
)
def test_a_wrong_number_in_a_span_is_found(policy, field, by, data):
    run = sound(policy)
    index, spans = pick(data, run.spans)
    assume(spans[index].kind != "wait" or field != "version")
    wrong = getattr(spans[index], field) + by
    spans[index] = spans[index]._replace(**{field: wrong})
    refuse(run, spans=spans)


@given(policies, st.data())
def test_overlapping_spans_are_found(policy, data):
    run = sound(policy)
    index, spans = pick(data, run.spans)
    lane = [s for s in spans if s.worker == spans[index].worker]
    place = lane.index(spans[index])
    assume(place > 0)
    early = lane[place - 1].end_s - 1e-3
    spans[index] = spans[index]._replace(start_s=early)
    refuse(run, spans=spans)


@given(policies, st.data())
def test_a_span_that_ends_before_it_begins_is_found(policy, data):
    run = sound(policy)
    index, spans = pick(data, run.spans)
    spans[index] = spans[index]._replace(end_s=spans[index].start_s - 1e-3)
    refuse(run, spans=spans)


@pytest.mark.parametrize(
    ("policy", "other", "message"),
    [
        (Eventual(), Bounded(0), "had finished . iterations, and at most 0"),
        (Bounded(2), Bounded(1), "had finished . iterations, and at most 1"),
        (Bounded(0), Sequential(), "version 1 has 1 of its 4 pushes"),
        (Backup(1), Sequential(), "version 1 has 3 of its 4 pushes"),
        (Backup(1), Backup(2), "The next update makes version 2|open round is 1"),
        (Sequential(), Eventual(), "The next update makes version 2"),
    ],
    ids=str,
)
def test_the_log_of_another_policy_is_found(policy, other, message):
    run = sound(policy)
    with pytest.raises(ValueError, match=message):
        verify(run.spans, run.events, other, run.workers)


# Two workers, hand-written: each pushes once, at 1 and 2 s.
SPANS = [
    *[Span(0, "pull", 0, 0, 0, 0), Span(1, "pull", 0, 0, 0, 0)],
    *[Span(0, "compute", 0, 1, 0, 0), Span(1, "compute", 0, 2, 0, 0)],
    *[Span(0, "push", 1, 1, 0, 0), Span(1, "push", 2, 2, 0, 0)],
]
READS = [Event(0, "read", 0, 0, 0, 0), Event(0, "read", 1, 0, 0, 0)]
APPLIES = [Event(1, "apply", 0, 0, 1, 0), Event(2, "apply", 1, 0, 2, 1)]
ROUND = [Event(2, "apply", 0, 0, 1, 0), Event(2, "apply", 1, 0, 1, 0)]


def test_hand_written_logs_are_accepted():
    verify([], [], Eventual(), 1)
    verify(SPANS, READS + APPLIES, Eventual(), 2)
    verify(SPANS, READS + APPLIES, Bounded(0), 2)
    verify(SPANS, READS + ROUND, Sequential(), 2)
    drops = [Event(2, "drop", 0, 0, 0, 0), Event(2, "drop", 1, 0, 0, 0)]
    verify(SPANS[:5], [*READS, drops[0]], Sequential(), 2)  # an open round was closed
    late = [Event(1, "apply", 0, 0, 1, 0), Event(2, "drop", 1, 0, 1, 0)]
    verify(SPANS, READS + late, Backup(1), 2)
    refusals = [Event(1, "refuse", 0, 0, 0, 0), Event(2, "refuse", 1, 0, 0, 0)]
    verify(SPANS, READS + refusals, Sequential(), 2)
    cut = [s for s in SPANS if s.kind != "push"]
    verify(cut, READS, Eventual(), 2)


@pytest.mark.parametrize(
    ("policy", "events", "message"),
    [
        pytest.param(
            Sequential(),
            [*READS, ROUND[0]],
            "ends early.*version 1 has 1 of its 2",
            id="half-an-update",
        ),
        pytest.param(
            Sequential(),
            [*READS, ROUND[0], Event(2, "read", 0, 1, 1, 0), ROUND[1]],
            "event 3.*version 1 has 1 of its 2",
            id="torn-read",
        ),
        pytest.param(
            Sequential(),
            [*READS, ROUND[0]._replace(time_s=1), ROUND[1]],
            "event 3.*version 1 has 1 of its 2",
            id="not-at-once",
        ),
        pytest.param(
            Eventual(),
            [*READS, Event(1, "drop", 0, 0, 0, 0), Event(2, "drop", 1, 0, 0, 0)],
            "event 2.*This policy drops nothing",
            id="dropped",
        ),
        pytest.param(
            Sequential(),
            [*READS, Event(2, "drop", 0, 0, 0, 0), Event(2, "drop", 1, 0, 0, 0)],
            "event 3.*round was complete",
            id="complete-round-dropped",
        ),
        pytest.param(
            Sequential(),
            [*READS, Event(1, "drop", 0, 0, 0, 0), Event(2, "refuse", 1, 0, 0, 0)],
            "event 3.*run was over",
            id="goes-on-after-closing",
        ),
        pytest.param(
            Backup(1),
            [*READS, Event(1, "apply", 0, 0, 1, 0), Event(2, "apply", 1, 0, 2, 1)],
            "event 3.*open round is 1",
            id="late-but-applied",
        ),
        pytest.param(
            Eventual(),
            [READS[0], *APPLIES],
            "event 2.*no pull of this iteration",
            id="never-pulled",
        ),
        pytest.param(
            Eventual(),
            [*READS, APPLIES[0], APPLIES[1]._replace(staleness=0)],
            "event 3.*were 1 updates old",
            id="staleness",
        ),
        pytest.param(
            Eventual(),
            [*READS, APPLIES[0], APPLIES[1]._replace(version=3, staleness=2)],
            "event 3.*makes version 2",
            id="gap",
        ),
        pytest.param(
            Bounded(0),
            [*READS, APPLIES[0], Event(1, "read", 0, 1, 1, 0), APPLIES[1]],
            "event 3.*Worker 1 had finished 0 iterations, and at most 0",
            id="bound",
        ),
        pytest.param(
            Eventual(),
            [READS[0], READS[1]._replace(time_s=float("nan")), *APPLIES],
            "event 1.*one before is of 0 s",
            id="nan",
        ),
        pytest.param(
            Eventual(),
            [*READS, APPLIES[0], Event(1, "read", 0, 2, 1, 0)],
            "event 3.*next iteration was 1",
            id="skipped-iteration",
        ),
        pytest.param(
            Eventual(),
            [
                *[*READS, APPLIES[0], Event(1, "read", 1, 0, 1, 0)],
                APPLIES[1]._replace(staleness=0),
            ],
            "Span.*applied a push of version 1",
            id="applied-as-of-another-pull",
        ),
        *(
            pytest.param(
                policy,
                [*READS, Event(1, "refuse", 1, 0, 0, 0), Event(1, "read", 1, 1, 0, 0)],
                "event 3.*Round 0 had not ended",
                id=f"goes-on-in-an-open-round-{policy}",
            )
            for policy in (Sequential(), Backup(0))
        ),
        pytest.param(
            Backup(0),
            [*READS, Event(1, "refuse", 1, 0, 0, 0), Event(1, "read", 1, 0, 0, 0)],
            "event 3.*next iteration was 1",
            id="pulls-for-a-round-it-has-pushed-in",
        ),
        pytest.param(
            Backup(1),
            [
                *[*READS, APPLIES[0], Event(1, "read", 1, 1, 1, 0)],
                Event(2, "apply", 1, 1, 2, 1),
            ],
            "event 4.*were 0 updates old",
            id="staleness-of-a-pull-given-up",
        ),
        pytest.param(
            Eventual(), [*READS, APPLIES[0]], "Span.*settled no such push", id="lost"
        ),
        pytest.param(
            Eventual(),
            [*READS, APPLIES[0]._replace(time_s=0.5), APPLIES[1]],
            "Span.*settled no such push",
            id="applied-before-it-was-pushed",
        ),
    ],
)
def test_hand_written_faults_are_named(policy, events, message):
    with pytest.raises(ValueError, match=f"(?s)verify got .*{message}"):
        verify(SPANS, events, policy, 2)


@pytest.mark.parametrize(
    ("index", "change", "message"),
    [
        pytest.param(2, {"version": 1}, "used version 0", id="torn-compute"),
        pytest.param(4, {"version": 1}, "used version 0", id="torn-push"),
        pytest.param(0, {"version": 1}, "handed out nothing such", id="future-pull"),
        pytest.param(0, {"end_s": -1, "start_s": -1}, "handed out nothing", id="early"),
        pytest.param(2, {"kind": "push"}, "It follows a pull", id="no-compute"),
        pytest.param(2, {"kind": "pull"}, "It follows a pull", id="pull-twice"),
        pytest.param(2, {"kind": "sleep"}, "kind must be one of", id="unknown"),
        pytest.param(2, {"iteration": 1}, "a pull of iteration 0", id="iteration"),
        pytest.param(2, {"worker": 2}, "There are 2 workers", id="worker"),
        pytest.param(4, {"start_s": 0.5}, "ends at 1 s", id="overlap"),
        pytest.param(2, {"start_s": float("nan")}, "ends at 0 s", id="nan"),
    ],
)
def test_hand_written_span_faults_are_named(index, change, message):
    spans = [*SPANS]
    spans[index] = spans[index]._replace(**change)
    with pytest.raises(ValueError, match=f"verify got Span.*{message}"):
        verify(spans, READS + APPLIES, Eventual(), 2)
