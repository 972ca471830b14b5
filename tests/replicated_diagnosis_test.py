"""The bottleneck hunt: its numbers from hand-made records, and a run of each answer."""

import math
import time
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.replicated.views import diagnosis, findings
from jaxdp.replicated.views.diagnosis import diagnose
from jaxdp.replicated.views.findings import Place
from jaxdp.replicated.views.trace import Record
from tests.contract import waves
from tests.helpers import assert_bit_equal

FOUR = Place(("cpu:3", "cpu:1", "cpu:0", "cpu:2"), "cpu:3")
ELSEWHERE = FOUR._replace(output_device="cpu:5")
ALONE = Place(("cpu:3",), "cpu:3")


def record(
    start, end, target="cpu:3", source=None, nbytes=0, what="", stage="4 forward"
):
    """A program on `target`, or a transfer from `source` to it."""
    return Record(
        stage=stage,
        what=what,
        replica=None,
        source=source or target,
        target=target,
        shape="float32[2]",
        arrays=1,
        nbytes=nbytes,
        start_ms=start,
        duration_ms=end - start,
        is_transfer=source is not None,
    )


def transfer(start, end, source, target, nbytes, what="parameters"):
    return record(start, end, target, source, nbytes, what, stage="2 replicate")


@pytest.mark.parametrize(
    ("intervals", "covered"),
    [
        ([], 0.0),
        ([(2.0, 5.0)], 3.0),
        ([(2.0, 5.0), (7.0, 11.0)], 7.0),
        ([(2.0, 5.0), (4.0, 11.0)], 9.0),
        ([(2.0, 11.0), (4.0, 5.0)], 9.0),
        ([(2.0, 11.0), (4.0, 5.0), (10.0, 12.0)], 10.0),
        ([(2.0, 5.0), (5.0, 6.0)], 4.0),
        ([(7.0, 11.0), (2.0, 5.0), (4.0, 6.0)], 8.0),
        ([(2.0, 5.0), (2.0, 5.0)], 3.0),
        ([(2.0, 2.0)], 0.0),
    ],
    ids=[
        "none",
        "one",
        "apart",
        "overlapping",
        "nested",
        "nested-and-overlapping",
        "touching",
        "unsorted",
        "same-twice",
        "empty",
    ],
)
def test_overlapping_records_cover_their_union(intervals, covered):
    assert findings.covered_ms([record(*each) for each in intervals]) == covered


def test_the_span_is_from_the_first_start_to_the_last_end():
    records = [record(3.0, 4.0), record(1.0, 9.0), record(2.0, 5.0)]
    assert findings.span_ms(records) == 8.0
    assert findings.share(records[:1], records) == 1 / 8
    assert findings.share([record(1.0, 1.0)], [record(1.0, 1.0)]) == 0.0


def test_devices_without_a_forward_program_are_named():
    def step(width):
        return [
            record(0.0, 2.0 * width, "cpu:3"),
            record(width, 2.0 * width, "cpu:3", stage="7 backward"),
            record(0.0, width, "cpu:1"),
            record(0.0, 3.0, "cpu:0"),
            record(0.0, 9.0, "cpu:2", stage="7 backward"),
            transfer(0.0, 10.0, "cpu:3", "cpu:2", 7),
        ]

    steps = [step(1.0), step(2.0), step(3.0)]
    place = FOUR._replace(others=("cpu:4", "cpu:5"))
    found = findings.devices_used(steps, place, 9)
    assert found.measured == 3 / 4
    assert not found.passes
    assert "3 of 4 devices" in found.evidence
    assert "cpu:3 40%, cpu:1 20%, cpu:0 30%, cpu:2 90%" in found.evidence
    assert "Not in device_ids: cpu:4, cpu:5" in found.evidence
    assert "cpu:2 had no rows" in found.remedy
    assert "9 rows on 4 devices are slices of 3, 3, 3, 0" in found.remedy
    assert "Use a batch of 8 or 12 rows" in found.remedy


def test_all_devices_used_needs_no_remedy():
    step = [record(0.0, 2.0, device) for device in FOUR.devices]
    found = findings.devices_used([step], FOUR, 8)
    assert (found.measured, found.passes, found.remedy) == (1.0, True, "")
    assert "Not in device_ids" not in found.evidence


@pytest.mark.parametrize(
    ("rows", "measured", "evidence", "remedy"),
    [
        (
            66,
            17 / 15,
            "17, 17, 17, 15 rows: largest over smallest is 17/15",
            "64 or 68",
        ),
        (9, math.inf, "3, 3, 3, 0 rows: largest over smallest is 3/0", "8 or 12"),
        (3, math.inf, "1, 1, 1, 0 rows: largest over smallest is 1/0", "of 4"),
        (43, 11 / 10, "11, 11, 11, 10 rows", None),
        (39, 10 / 9, "10, 10, 10, 9 rows", "36 or 40"),
        (64, 1.0, "16, 16, 16, 16 rows: largest over smallest is 16/16", None),
    ],
)
def test_a_split_is_even_when_its_slices_are(rows, measured, evidence, remedy):
    found = findings.even_split(Counter([rows]), FOUR)
    assert found.measured == measured
    assert found.passes == (remedy is None)
    assert evidence in found.evidence
    assert (f"{remedy} rows" in found.remedy) if remedy else found.remedy == ""


def test_the_most_frequent_batch_is_judged_and_others_are_counted():
    found = findings.even_split(Counter([64, 64, 66, 9, 9, 9, 64, 64]), FOUR)
    assert found.passes
    assert "Other batches: 3 of 9 rows, 1 of 66 rows" in found.evidence
    assert findings.typical(Counter([5, 5, 7, 7, 6])) == 7


def step_with_transfers(busy):
    """10 ms, of which the root's link is busy for `busy` ms and 1 ms more."""
    return [
        record(0.0, 10.0, "cpu:1"),
        transfer(0.0, busy, "cpu:3", "cpu:1", 300),
        transfer(0.0, busy / 2, "cpu:3", "cpu:0", 300),
        transfer(8.0, 9.0, "cpu:1", "cpu:3", 40, "received outputs"),
        transfer(8.5, 9.0, "cpu:3", "cpu:1", 41, "output gradients"),
        transfer(0.0, 10.0, "host", "cpu:0", 5000, "batch"),
        transfer(0.0, 10.0, "cpu:3", "cpu:3", 0),
    ] + [record(0.0, 1.0, device) for device in FOUR.devices]


def test_transfers_of_the_root_count_once_and_only_those():
    steps = [step_with_transfers(busy) for busy in (1.0, 6.0, 4.0)]
    found = findings.root_transfer(steps, FOUR, 30)
    assert found.measured == 0.5
    assert not found.passes
    assert "5.000 ms of 10.000 ms; 681 bytes to or from cpu:3:" in found.evidence
    assert "parameters 600, received outputs 40, output gradients 41" in found.evidence
    # 2 * 3 * 30 / 4 and 3 * 30
    assert "2 (N - 1) K / N = 45 bytes" in found.remedy
    assert "(N - 1) K = 90 bytes each (N = 4, K = 30)" in found.remedy
    assert "jaxdp.RingAllReduce()" in found.remedy
    assert "Or take a larger batch" in found.remedy
    assert "Or return a smaller output" in found.remedy
    assert "outputs and their gradients are 81 bytes" in found.remedy
    assert "batch on the host" not in found.remedy


def test_the_output_device_is_an_end_too():
    steps = [
        [
            *step_with_transfers(1.0),
            transfer(4.0, 7.0, "cpu:1", "cpu:5", 50, "received outputs"),
        ]
    ]
    assert findings.root_transfer(steps, FOUR, 30).measured == 0.2
    found = findings.root_transfer(steps, ELSEWHERE, 30)
    assert found.measured == 0.5
    assert "731 bytes to or from cpu:3 and cpu:5" in found.evidence


@pytest.mark.parametrize(("busy", "passes"), [(1.0, True), (1.1, False)])
def test_a_fifth_of_the_step_may_be_transfer(busy, passes):
    found = findings.root_transfer([step_with_transfers(busy)], FOUR, 30)
    assert found.passes == passes
    assert bool(found.remedy) == (not passes)


def test_a_batch_that_the_root_sends_on_should_lie_on_the_host():
    steps = [[*step_with_transfers(6.0), transfer(0, 1, "cpu:3", "cpu:1", 77, "batch")]]
    remedy = findings.root_transfer(steps, FOUR, 30).remedy
    assert "Or leave the batch on the host, as NumPy arrays: 77 bytes" in remedy


def test_a_single_device_is_told_to_send_batches_ahead():
    step = [
        transfer(0.0, 6.0, "host", "cpu:3", 500, "batch"),
        transfer(0.0, 6.0, "host", "cpu:3", 11, "targets"),
        record(6.0, 10.0),
    ]
    found = findings.root_transfer([step], ALONE, 30)
    assert found.measured == 0.6
    assert found.remedy.startswith("Send the 511 bytes of a batch ahead")
    assert "Ring" not in found.remedy


@pytest.mark.parametrize(
    ("wait_ms", "ratio", "passes", "remedy"),
    [
        (1.0, 0.25, True, ""),
        (1.2, 0.3, False, "Prefetch: let a thread call next"),
        (4.0, 1.0, False, "Prefetch: let a thread call next"),
        (9.0, 2.25, False, "Prepare batches in 3 workers (9.000 ms / 4.000 ms"),
    ],
)
def test_a_batch_may_take_a_quarter_of_a_step(wait_ms, ratio, passes, remedy):
    found = findings.input_pipeline(wait_ms, 4.0)
    assert found.measured == pytest.approx(ratio)
    assert found.passes == passes
    assert found.remedy.startswith(remedy)
    assert bool(found.remedy) == (not passes)
    assert f"{wait_ms / (wait_ms + 4.0):.0%} of its time" in found.evidence


def test_without_a_pipeline_the_question_is_not_asked():
    found = findings.input_pipeline(None, 4.0)
    assert math.isnan(found.measured)
    assert found.passes
    assert found.evidence.startswith("Not asked")
    assert found.remedy == ""


def apply_fn(params, x, scale=1.0):
    return scale * jnp.tanh(x @ params["in"]) @ params["out"]


@pytest.fixture(scope="module")
def step():
    params = {"in": waves(3, 4), "out": waves(4, 2, start=0.5)}
    model = jaxdp.DataParallel(apply_fn, params, device_ids=[3, 1, 0, 2])
    return model.train_step(
        lambda output, targets: jnp.mean((output - targets) ** 2), optax.adam(0.1)
    )


def batch(rows, start=0.0):
    return waves(rows, 3, start=start), waves(rows, 2, start=start + 0.3)


def test_a_diagnosis_answers_four_questions_and_leaves_the_state_alone(step):
    state, _ = step(step.init(), *batch(10))
    before = jax.tree.map(np.array, state)  # a view would keep it from donation
    found = diagnose(step, state, batch(10), steps=3, warm_up=1)
    jax.tree.map(assert_bit_equal, before, jax.tree.map(np.asarray, state))
    assert [finding.measured for finding in found.findings[:2]] == [1.0, 3.0]
    assert [finding.passes for finding in found.findings[:2]] == [True, False]
    assert "8 or 12 rows" in found.findings[1].remedy
    # K = (12 + 8) * 4 bytes: three copies out, three gradients in.
    evidence = found.findings[2].evidence
    assert "parameters 240" in evidence and "received gradients 240" in evidence
    # Rows of 12 bytes, 3 of them to the root; outputs of 8 bytes, 7 rows from others.
    assert "batch 36" in evidence and "targets 80" in evidence
    assert "received outputs 56" in evidence and "output gradients 56" in evidence
    assert 0 < found.findings[2].measured <= 1
    assert math.isnan(found.findings[3].measured)
    assert found.step_ms > 0
    assert "share its cores" in found.note and "bandwidth" in found.note
    assert not found.passes
    step(state, *batch(10))


def test_a_diagnosis_prints_every_number_and_remedy(step):
    found = diagnose(step, step.init(), batch(9), steps=1, warm_up=0)
    text = str(found)
    for finding in found.findings:
        assert finding.question in text
        assert finding.evidence in text
        assert finding.remedy in text
    assert found.note in text
    assert "0.750" in text and "inf" in text
    assert [row["question"] for row in found.rows()] == [
        finding.question for finding in found.findings
    ]
    assert set(found.rows()[0]) == set(findings.Finding._fields)


def test_waits_and_steps_are_timed_apart(step, monkeypatch):
    # Warm-up, then (wait, step): medians 3 and 40 ms.
    pairs = [(900, 9000), (2, 40), (7, 30), (3, 50)]
    clock, ticks = 0.0, []
    for wait, work in pairs:
        ticks += [clock, clock + wait / 1e3, clock + (wait + work) / 1e3]
        clock = ticks[-1] + 5.0
    clock = iter(ticks)
    fake = types.SimpleNamespace(perf_counter=lambda: next(clock))
    monkeypatch.setattr(diagnosis, "time", fake)
    source = iter([batch(8, start) for start in (0.0, 1.0, 2.0, 3.0)])
    found = diagnose(step, step.init(), source, steps=3, warm_up=1)
    assert found.step_ms == pytest.approx(40.0)
    assert found.findings[3].measured == pytest.approx(3 / 40)
    assert next(clock, None) is None
    assert next(source, None) is None


def test_a_slow_pipeline_is_found(step):
    def slowly():
        while True:
            time.sleep(0.05)
            yield list(batch(8))  # as torch's DataLoader does

    found = diagnose(step, step.init(), slowly(), steps=3)
    assert found.findings[3].measured > 1
    assert "workers" in found.findings[3].remedy
    assert found.findings[1].passes


def test_a_list_starts_again_and_the_usual_batch_is_judged(step):
    batches = [batch(8), batch(8, start=1.0), batch(9)]
    # The last, which is traced if no other is chosen, would leave a device out.
    found = diagnose(step, step.init(), batches, steps=5, warm_up=1)
    assert found.findings[0].measured == 1.0
    assert found.findings[1].measured == 1.0
    assert "Other batches: 2 of 9 rows" in found.findings[1].evidence


def test_keywords_and_several_inputs_reach_the_model():
    seen = []

    def two(params, x, y, *, train):
        seen.append(train)
        return params * (x + y)

    model = jaxdp.DataParallel(two, jnp.float32(2.0), device_ids=[2])
    step = model.train_step(lambda output, _: jnp.sum(output), optax.sgd(0.1))
    inputs = (np.arange(4.0, dtype="f4"), np.arange(1.0, 5.0, dtype="f4"))
    found = diagnose(step, step.init(), (inputs, None), steps=1, train="yes")
    assert set(seen) == {"yes"}
    assert found.findings[0].measured == 1.0
    assert found.findings[1].passes


def test_only_cpus_share_cores():
    gpu = types.SimpleNamespace(platform="gpu")
    cpu = types.SimpleNamespace(platform="cpu")
    assert diagnosis._note([gpu, cpu]) == ""
    assert "share its cores" in diagnosis._note([cpu, cpu])


@pytest.mark.parametrize(
    ("batches", "kind", "message"),
    [
        (3, TypeError, r"batches of type int.*tuple of 2.*Pass"),
        (np.ones((4, 3)), TypeError, r"batches of type ndarray.*tuple of 2"),
        ({"x": 1}, TypeError, r"batches of type dict.*tuple of 2"),
        ("train", TypeError, r"batches of type str.*tuple of 2"),
        ([batch(8)[0]], TypeError, r"a batch of type \w+.*\(\(x, mask\), targets\)"),
        ([(1, 2, 3)], TypeError, r"a batch of type tuple of length 3.*tuple of 2"),
        ([], ValueError, r"ended after 0.*takes 12, warm_up \+ steps"),
        (iter([batch(8)] * 3), ValueError, r"ended after 3.*takes 12.*Pass a list"),
    ],
    ids=["int", "array", "dict", "str", "no-pair", "triple", "empty", "short"],
)
def test_batches_must_be_a_pipeline_or_a_pair(step, batches, kind, message):
    with pytest.raises(kind, match=message):
        diagnose(step, step.init(), batches)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"steps": 0}, ValueError, "steps=0. At least 1"),
        ({"warm_up": -1}, ValueError, "warm_up=-1. At least 0"),
        ({"steps": 2.0}, TypeError, r"steps=2\.0. It must be an integer"),
        ({"warm_up": True}, TypeError, "warm_up=True. It must be an integer"),
    ],
)
def test_counts_must_be_counts(step, options, kind, message):
    with pytest.raises(kind, match=message):
        diagnose(step, step.init(), batch(8), **options)


def test_a_step_and_a_living_state_are_needed(step):
    with pytest.raises(TypeError, match=r"step of type function.*train_step"):
        diagnose(apply_fn, step.init(), batch(8))  # pyright: ignore[reportArgumentType]
    state = step.init()
    step(state, *batch(8))
    with pytest.raises(RuntimeError, match="deleted"):
        diagnose(step, state, batch(8))
