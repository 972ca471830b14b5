"""`overlap_delay`: schedules read, streams by hand, and what a delay sets free."""

import dataclasses
import math
import pathlib
import types
from typing import Any

import pytest

import jaxdp
from experiments import overlap_delay
from experiments.parts import overlap_findings as findings
from experiments.parts import overlap_problem as problem
from experiments.parts import overlap_ways as ways
from experiments.parts.overlap_findings import hidden_by
from jaxdp import targets
from jaxdp.program import hlo
from jaxdp.program.timeline import Timeline
from jaxdp.program.timeline.scheduled import Kernel, Start, schedule
from jaxdp.targets import Hardware, Link

# As XLA prints a step for GPUs: a fusion with a product, one push that runs beside it,
# one that blocks, a product by cuBLAS, a kernel without any product.
TEXT = """HloModule step, is_scheduled=true, num_partitions=3

%inner (p: bf16[16,32], q: bf16[32,8]) -> bf16[16,8] {
  %p = bf16[16,32]{1,0} parameter(0)
  %q = bf16[32,8]{1,0} parameter(1)
  ROOT %dot = bf16[16,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
}

ENTRY %main (x: bf16[16,32], w: bf16[32,8]) -> bf16[16,8] {
  %x = bf16[16,32]{1,0} parameter(0)
  %w = bf16[32,8]{1,0} parameter(1)
  %push = (bf16[32,8]{1,0}, bf16[32,8]{1,0}) collective-permute-start(%w), \
channel_id=1, source_target_pairs={{2,0}}, \
backend_config={"collective_backend_config":{"is_sync":false}}
  %fusion = bf16[16,8]{1,0} fusion(%x, %w), kind=kCustom, calls=%inner
  %arrived = bf16[32,8]{1,0} collective-permute-done(%push)
  %blocked = (bf16[32,8]{1,0}, bf16[32,8]{1,0}) collective-permute-start(%w), \
channel_id=2, source_target_pairs={{0,1}}, \
backend_config={"collective_backend_config":{"is_sync":true}}
  %there = bf16[32,8]{1,0} collective-permute-done(%blocked)
  %t = (bf16[16,8]{1,0}, bf16[32,8]{1,0}) tuple(%fusion, %there)
  %gemm = (bf16[32,32]{1,0}, s8[64]{0}) custom-call(%w, %w), \
custom_call_target="__cublas$gemm", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"]}}}
  ROOT %sum = bf16[16,8]{1,0} fusion(%fusion), kind=kLoop, calls=%add
}

%add (a: bf16[16,8]) -> bf16[16,8] {
  %a = bf16[16,8]{1,0} parameter(0)
  ROOT %s = bf16[16,8]{1,0} add(%a, %a)
}
"""
ITEMS = schedule(hlo.parse(TEXT))
LINK = Link(name="link", bytes_per_s=256e6, alpha_s=0.0)
SLOW = Hardware(
    name="slow",
    flops_per_s=(("bf16", 8192e6),),
    memory_bytes_per_s=512e6,
    memory_bytes=1,
    launch_s=0.0,
    link=LINK,
    network=LINK,
    devices_per_host=8,
)


def test_items_of_the_schedule():
    assert [item.name for item in ITEMS] == [
        *("push", "fusion", "arrived", "blocked", "there", "gemm", "sum")
    ]


def test_what_runs_between_start_and_done():
    assert hidden_by(ITEMS) == {"push": ("fusion",), "blocked": ()}
    late = (ITEMS[0], ITEMS[1], ITEMS[6], ITEMS[5], ITEMS[2])
    assert hidden_by(late) == {"push": ("fusion", "gemm")}  # "sum" multiplies nothing


def test_bounds_by_hand():
    link = dataclasses.replace(LINK, bytes_per_s=1.0)
    one = dataclasses.replace(SLOW, link=link)
    assert problem.bounds(7.0, 3, 4, one) == (7 + 2 * 3 * 3, 18)
    assert problem.bounds(20.0, 3, 4, one).overlapped_s == 20


def test_a_profile_holds_the_times_of_kernels_and_starts():
    assert ways.profile(ITEMS, SLOW).splitlines() == [
        'costs { name: "push" cost_us: 2.000 }',
        'costs { name: "fusion" cost_us: 3.500 }',
        'costs { name: "blocked" cost_us: 2.000 }',
        'costs { name: "gemm" cost_us: 6.000 }',  # its workspace is not moved
        'costs { name: "sum" cost_us: 1.000 }',
    ]


def test_only_the_default_lets_xla_combine():
    default, *others = ways.WAYS
    assert (default.options, default.profiled) == ({}, False)
    assert {way.options[ways.PERMUTES_COMBINED] for way in others} == {0}
    assert ways.EXTREMES[0] == default


class _Lowered:
    """A program that is compiled already; notes options, and what a profile held."""

    def __init__(self, program=None):
        self.asked = []
        self.program = program or types.SimpleNamespace(as_text=lambda: TEXT)

    def compile(self, compiler_options=None) -> Any:
        options = dict(compiler_options or {})
        path = options.pop(ways.PROFILE, None)
        text = pathlib.Path(path).read_text() if path else None
        self.asked.append((options, text))
        return self.program


def test_a_profile_is_made_from_the_same_options():
    lowered: Any = _Lowered()
    hardware = SLOW
    way = ways.Way("w", {"flag": 3}, profiled=True)
    found = ways.scheduled(lowered, way, hardware)
    profile = ways.profile(ITEMS, hardware)
    assert lowered.asked == [({"flag": 3}, None), ({"flag": 3}, profile)]
    assert (found.way, found.items) == (way, ITEMS)
    ways.scheduled(lowered, ways.Way("v", {"other": 4}), hardware)
    assert lowered.asked[2:] == [({"other": 4}, None)]


@pytest.fixture(scope="module")
def programs():
    """Both steps, compiled for the devices here."""
    mesh = jaxdp.data_mesh(8)
    return [
        problem.lowered(mesh, tau, overlap_delay.TINY).compile()
        for tau in problem.STALENESS
    ]


def test_a_delay_sets_all_transfers_free(programs):
    synchronous, late = (
        findings.dependence(f"τ = {i}", p) for i, p in enumerate(programs)
    )
    matmuls = 3 * overlap_delay.TINY.layers - 1
    for row in (synchronous, late):
        assert row["transfers"] == 2 * 7
        assert row["matmuls"] == matmuls
        assert row["wait for transfers"] == 0
    assert synchronous["wait for matmuls"] == 2 * 7
    assert late["wait for matmuls"] == 0
    for row in (synchronous, late):
        assert row["small ones wait"] == 2 * 7  # the loss of this step
    claim = findings.claim([synchronous, late], [], "nothing there")
    assert (claim.verdict, claim.measured) == ("partly", "14 of 14 may; not scheduled")
    assert "nothing there." in claim.why
    wrong = late | {"wait for matmuls": 3}
    refuted = findings.claim([synchronous, wrong], [], "")
    assert refuted.verdict == "refuted"
    assert str(refuted.measured).startswith("11 of 14 may")


def test_flops_of_a_step(programs):
    items = schedule(hlo.parse(programs[1].as_text()))
    kernels = [item for item in items if isinstance(item, Kernel)]
    flops = sum(sum(kernel.work.flops.values()) for kernel in kernels)
    assert flops == overlap_delay.TINY.step_flops
    assert overlap_delay.TINY.step_flops == 5 * 2 * 16 * 64 * 64
    sizes = [item.op.bytes for item in items if isinstance(item, Start)]
    large = [size for size in sizes if size >= findings.CARRIES]
    assert large == [overlap_delay.TINY.gradient_bytes] * 14
    assert overlap_delay.TINY.gradient_bytes == 2 * 2 * 64 * 64


@pytest.fixture(scope="module")
def as_if_for_h100(programs):
    """The whole experiment, with CPU devices in the place of GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "missing", lambda target: "")
        patch.setattr(targets, "mesh", lambda _, devices: jaxdp.data_mesh(devices))
        lowered = [_Lowered(program) for program in programs]
        patch.setattr(problem, "lowered", lambda mesh, tau, sizes: lowered[tau])
        config = overlap_delay.Config(tiny=True, platform="cpu")
        found = overlap_delay.run(config)
    asked = [[options for options, _ in each.asked] for each in lowered]
    assert asked == [[{}, *(way.options for way in ways.EXTREMES)]] * 2
    return found


def test_tables_of_predictions(as_if_for_h100):
    rows = as_if_for_h100.tables["predicted_steps_on_h100"]
    names = [f"τ = {tau}, {way.name}" for tau in (0, 1) for way in ways.EXTREMES]
    assert [row["step"] for row in rows] == names
    assert [row["waiting"] for row in rows] == [14, 14, 0, 0]
    assert {row["async"] for row in rows} == {"0 of 14"}  # on CPU all permutes block
    for row in rows:
        total = row["compute_ms"] + row["exposed_ms"]
        assert math.isclose(row["step_ms"], total)
        assert row["hidden"] == 0
    beside = as_if_for_h100.tables["beside_each_transfer"]
    transfers = {f"push {worker} → 0" for worker in range(1, 8)}
    transfers |= {f"pull 0 → {worker}" for worker in range(1, 8)}
    assert {row["transfer"] for row in beside} == transfers
    (claim,) = as_if_for_h100.claims
    assert (claim.verdict, claim.expected) == ("partly", 1.0)
    assert claim.measured == pytest.approx(0, abs=1e-3)
    assert "not run there" in claim.why


def test_figures_of_predictions(as_if_for_h100):
    by_link, streams = as_if_for_h100.figures.values()
    lines = {line.get_label(): line.get_ydata() for line in by_link.axes[0].lines}
    total, longer = lines["computation + communication"], lines["the longer of both"]
    assert (longer <= total).all()
    assert lines["τ = 1, default"] == pytest.approx(lines["τ = 0, default"], rel=1)
    labels = [text.get_text() for text in streams.axes[0].get_yticklabels()]
    assert labels[:2] == ["τ = 0, default: compute", "communication"]
    assert len(streams.axes[0].patches) > 2 * 14


def _predicted(tau, way, step_s, waiting):
    step = Timeline(step_s, 1.0, 2.0, 0, (), (), SLOW)
    found = findings.Predicted(tau, way, None, ITEMS, step)  # type: ignore[arg-type]
    found.__dict__["waiting"] = waiting
    return found


def test_the_best_way_is_one_in_which_nothing_waits():
    default, other = ways.EXTREMES
    synchronous = _predicted(0, default, 3.0, 14)
    late = _predicted(1, default, 1.5, 7)
    slower, faster = _predicted(1, other, 2.5, 0), _predicted(1, other, 2.0, 0)
    every = [synchronous, _predicted(0, other, 3.0, 14), late, slower, faster]
    assert findings.chosen(every) == [synchronous, late, faster]
    free = _predicted(1, default, 1.5, 0)
    assert findings.chosen([synchronous, free, slower]) == [synchronous, free]
    assert findings.chosen([]) == []


def test_a_row_counts_large_transfers_only(monkeypatch):
    monkeypatch.setattr(findings, "CARRIES", 512)
    row = findings.row(_predicted(1, ways.EXTREMES[0], 2.5, 3))
    assert (row["async"], row["beside"], row["waiting"]) == ("1 of 2", 1, 3)
    assert (row["step_ms"], row["exposed_ms"], row["hidden"]) == (2500, 1500, 0.25)
    monkeypatch.setattr(findings, "CARRIES", 513)
    row = findings.row(_predicted(1, ways.EXTREMES[0], 2.5, 3))
    assert (row["async"], row["beside"]) == ("0 of 0", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, "--devices got 1.*at least 2"),
        ({"rows": 0}, "--layers got 4, --width 4096 and --rows 0.*at least 1"),
        ({"link_gb_s": 0.0}, r"--link-gb-s got 0\.0.*more than 0 GB/s"),
        ({"link_gb_s": math.inf}, "--link-gb-s got inf.*not infinitely"),
        ({"repeats": 1}, "--repeats got 1.*at least 2"),
    ],
    ids=str,
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        overlap_delay.Config(**options).check()
