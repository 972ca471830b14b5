"""The experiment `overlap`: rows by hand, gaps by hand, and its tiny form."""

import dataclasses
from typing import Any

import jax
import pytest

import jaxdp
from experiments import overlap
from experiments.parts import gpu_models
from experiments.parts import hidden_figures as figures
from experiments.parts import hidden_steps as steps
from experiments.parts import hidden_tables as tables
from jaxdp import targets
from jaxdp.program.timeline import Bar, Timeline
from tests import experiments_contract as contract
from tests.compilers import needs_compiler

NAMED = (
    *("model", "design", "variant", "devices", "step_ms", "compute_ms"),
    *("communication_ms", "exposed_fraction"),
)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return contract.run("overlap", tmp_path_factory.mktemp("results"))


def bar(stream: Any, start_s: float, end_s: float) -> Bar:
    return Bar(stream, "one", "other kernel", start_s, end_s, 0)


def timeline(*bars: Bar, step_s: float) -> Timeline:
    busy_s = {
        stream: sum(b.end_s - b.start_s for b in bars if b.stream == stream)
        for stream in ("compute", "communication")
    }
    machine = targets.hardware("h100")
    return Timeline(
        step_s, busy_s["compute"], busy_s["communication"], 0, bars, (), machine
    )


def row(design: str, variant: str, step_ms: float, **more: Any) -> dict[str, Any]:
    found = dict.fromkeys(NAMED, 0) | {"link GB per s": 450.0, "model": "GPT-2 small"}
    found |= {"design": design, "variant": variant, "devices": 8}
    return found | {"step_ms": step_ms} | more


@needs_compiler("h100")
def test_what_is_written(ran):
    contract.check(ran, {})


@needs_compiler("h100")
def test_rows_have_the_promised_names_and_add_up(ran):
    found = ran.document["tables"]
    for name in ("steps", "steps with links of 50 GB/s"):
        ways = [(r["design"], r["variant"]) for r in found[name]]
        assert ways == [
            ("RingAllReduce", "before"),
            ("RingAllReduce", "after"),
            ("NativeAllReduce", "merged by XLA"),
            ("NativeAllReduce", "25 MB buckets"),
        ]
        for one in found[name]:
            assert tuple(one)[: len(NAMED)] == NAMED
            exposed_ms = one["exposed_fraction"] * one["communication_ms"]
            assert one["compute_ms"] + exposed_ms == pytest.approx(one["step_ms"])
    rates = {
        r["link GB per s"] for name in found if "steps" in name for r in found[name]
    }
    assert rates == {450.0, 50.0}


@needs_compiler("h100")
def test_a_small_ring_is_one_bucket_of_fourteen_permutes(ran):
    found = ran.document["tables"]["schedules of GPT-2 small"]
    assert [r["permutes"] for r in found] == [14, 14, 0, 0]
    assert all(r["kept"] for r in found if r["design"] == "RingAllReduce")
    assert all(0 <= r["synchronous"] <= r["permutes"] + r["others"] for r in found)


@needs_compiler("h100")
def test_slower_links_take_longer_by_their_bytes(ran):
    """14 permutes: alpha is the same, and bytes take 9 times as long."""
    fast, slow = (
        next(r for r in rows if r["variant"] == "after")
        for name, rows in ran.document["tables"].items()
        if name.startswith("steps")
    )
    assert slow["communication_ms"] > fast["communication_ms"]
    bytes_ms = [r["communication_ms"] - 14 * 10e-3 for r in (fast, slow)]
    assert bytes_ms[1] == pytest.approx(9 * bytes_ms[0], rel=0.01)


@needs_compiler("h100")
def test_two_rings_in_one_are_compiled_for_several_hosts():
    way = next(w for w in steps.ways(2) if w.name == steps.HIERARCHICAL)
    with jax.numpy_rank_promotion("allow"):  # as when run by hand
        model = gpu_models.transformer(tiny=True)
        step = steps.compiled(model, way, 4, 2)
    assert step.verdict.kept
    # One round in a host, two between hosts of two, one in a host.
    assert [one.kind for one in step.verdict.distances] == 4 * ["collective-permute"]
    assert {t.hardware.devices_per_host for t in (step.fast, step.slow)} == {2}
    assert step.program is None  # of several hosts


def test_before_is_what_was_and_after_is_the_default():
    found = {(w.name, w.variant): w.design for w in steps.ways(1)}
    assert found["RingAllReduce", "after"] == jaxdp.RingAllReduce()
    assert found["RingAllReduce", "before"] == jaxdp.RingAllReduce(in_flight=None)
    estimated = "xla_gpu_enable_analytical_latency_estimator"
    for variant in ("before", "after"):
        options = found["RingAllReduce", variant].compiler_options("cuda")
        assert (estimated in options) == (variant == "after")


def test_what_is_compared_with_one_host_and_with_several():
    one, several = ({w.name for w in steps.ways(hosts)} for hosts in (1, 8))
    assert several - one == {"hierarchical"} and not one - several
    assert [w.name for w in steps.ways(8) if w.two_axes] == ["hierarchical"]


def test_only_the_link_inside_a_host_is_slower():
    fast, slow = steps.machines(4)
    assert fast.devices_per_host == 4
    assert (fast.link.bytes_per_s, slow.link.bytes_per_s) == (450e9, 50e9)
    assert fast.link.alpha_s == slow.link.alpha_s
    assert dataclasses.replace(slow, link=fast.link) == fast


def test_gaps_by_hand():
    """Kernels from 1 to 4, 2 to 3 and 6 to 7 of 9 seconds."""
    spans = ((6, 7), (1, 4), (2, 3))
    found = timeline(
        *(bar("compute", *span) for span in spans),
        bar("communication", 0, 9),
        step_s=9,
    )
    assert [*tables.gaps_s(found)] == [1, 2, 2]
    assert [*tables.gaps_s(timeline(bar("compute", 0, 2), step_s=2))] == []


def test_reach_by_hand():
    fast = [
        row("RingAllReduce", "before", 99.0, exposed_fraction=0.9),
        row("RingAllReduce", "after", 11.0, exposed_fraction=0.25),
        row("NativeAllReduce", "merged by XLA", 10.0),
        row("NativeAllReduce", "25 MB buckets", 8.0),
    ]
    slow = [r | {"link GB per s": 50.0, "step_ms": 2 * r["step_ms"]} for r in fast]
    slow[3]["step_ms"] = 22.0
    found = tables.reach(fast, slow)
    assert [(r["measured"], r["met"]) for r in found] == [
        (0.25, True),  # the exposed share
        (1.1, True),
        (11 / 8, False),
        (1.1, False),  # no slower than XLA, with slow links
        (1.0, True),
    ]
    assert [r["required"][-4:] for r in found] == ["0.25", *2 * ["1.10"], *2 * ["1.00"]]


def test_nothing_to_reach_for_other_models_and_sizes():
    rows = [row("RingAllReduce", "after", 1.0, model="ResNet-50")]
    rows += [row("RingAllReduce", "after", 1.0, devices=64)]
    assert tables.reach(rows, rows) == []


def test_bars_are_as_long_as_the_step():
    shown = {"compute_ms": 8.0, "communication_ms": 5.0}
    figure = figures.shares("Steps", [row("one", "after", 10.0, **shown)])
    widths = [container[0].get_width() for container in figure.axes[0].containers]
    assert widths == [5.0, 3.0, 2.0]  # alone, beside communication, exposed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, "--devices got 1 and --hosts 8"),
        ({"hosts": 0}, "--devices got 8 and --hosts 0"),
    ],
    ids=["one device", "no host"],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        overlap.Config(**options).check()


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(targets, "missing", lambda target: f"{target} is not here.")
    with pytest.raises(ValueError, match=r"overlap compiles for h100\. h100 is not"):
        overlap.Config().check()
