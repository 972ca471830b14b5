"""`overlap_delay`: schedules read, streams by hand, and what a delay sets free."""

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
from experiments.parts.overlap_schedule import Done, Kernel, Start, hidden_by, schedule
from experiments.parts.overlap_streams import Bar, Hardware, bounds, estimate
from jaxdp import targets

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
ITEMS = (
    Start("push", ((2, 0),), 512, False),
    Kernel("fusion", 2 * 16 * 8 * 32, 1024 + 512 + 256),
    Done("arrived", "push"),
    Start("blocked", ((0, 1),), 512, True),
    Done("there", "blocked"),
    Kernel("gemm", 2 * 32 * 32 * 8, 512 + 512 + 2048 + 64),
    Kernel("sum", 0, 256 + 256),
)
SECONDS = Hardware(
    flops_per_s=1.0, memory_bytes_per_s=1.0, link_bytes_per_s=1.0, alpha_s=0.0
)


def test_a_schedule_is_read_in_its_order():
    assert schedule(TEXT) == ITEMS


def test_a_permute_without_halves_blocks():
    text = TEXT[: TEXT.index("  %push")] + (
        "  ROOT %move = bf16[32,8]{1,0} collective-permute(%w), channel_id=1, "
        "source_target_pairs={{0,1}}\n}\n"
    )
    assert schedule(text) == (Start("move", ((0, 1),), 512, True),)


def test_all_products_of_a_fusion_count():
    twice = "  %again = bf16[16,8]{1,0} dot(%p, %q), lhs_contracting_dims={1}\n"
    items = schedule(TEXT.replace("  ROOT %dot", f"{twice}  ROOT %dot"))
    assert items[1] == ITEMS[1]._replace(flops=2 * ITEMS[1].flops)


def test_what_runs_between_start_and_done():
    assert hidden_by(ITEMS) == {"push": ("fusion",), "blocked": ()}
    late = (ITEMS[0], ITEMS[1], ITEMS[6], ITEMS[5], ITEMS[2])
    assert hidden_by(late) == {"push": ("fusion", "gemm")}  # "sum" multiplies nothing


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "fusion(%x, %w), kind=kCustom, calls=%inner",
            "all-reduce(%x), channel_id=3, replica_groups={{0,1,2}}, "
            "use_global_device_ids=true, to_apply=%add",
            "%fusion = .*neither other collectives",
        ),
        (
            "dot(%p, %q), lhs_contracting_dims={1}, ",
            "convolution(%p, %q), dim_labels=bf_io->bf, ",
            "FLOPs of .*%dot = .*without convolutions",
        ),
        (
            "add(%a, %a)",
            "collective-permute(%a), source_target_pairs={{0,1}}",
            "%s = .*in a loop or branch",
        ),
    ],
    ids=["another collective", "a convolution", "a collective inside"],
)
def test_schedules_that_cannot_be_placed(old, new, message):
    assert old in TEXT
    with pytest.raises(ValueError, match=message):
        schedule(TEXT.replace(old, new))


def _start(name, source, seconds, blocks=False):
    return Start(name, ((source, 0),), seconds, blocks)


STREAMS = {  # items, then step, compute and communication of the server
    "one after the other": ([Kernel("k", 5, 3), _start("a", 1, 4, True)], (9, 5, 4)),
    "memory is slower": ([Kernel("k", 5, 7)], (7, 7, 0)),
    "beside": (
        [_start("a", 1, 4), Kernel("k", 5, 3), Done("d", "a")],
        (5, 5, 4),
    ),
    "the longer of both": (
        [_start("a", 1, 8), Kernel("k", 5, 3), Done("d", "a")],
        (8, 5, 8),
    ),
    "two on one link": (
        [
            _start("a", 1, 4),
            _start("b", 2, 3),
            Kernel("k", 5, 0),
            Done("d", "a"),
            Done("e", "b"),
        ],
        (7, 5, 7),
    ),
    "waited for too early": (
        [_start("a", 1, 4), Kernel("k", 1, 0), Done("d", "a"), Kernel("l", 6, 0)],
        (10, 7, 4),
    ),
    "nobody waits": ([_start("a", 1, 9), Kernel("k", 5, 0)], (9, 5, 9)),
    "the others' transfers": (
        [Start("a", ((1, 2),), 50, True), Kernel("k", 5, 0)],
        (5, 5, 0),
    ),
    "held up by the step before": (  # 1 goes on with 2 for 50, and then sends
        [
            _start("b", 1, 3),
            Done("d", "b"),
            Kernel("k", 5, 0),
            Start("a", ((1, 2),), 50, True),
        ],
        (3 + 5 + 50, 5, 3),
    ),
    "held up by another": (  # 1 is busy with 2 until 4, and then sends to the server
        [
            Start("a", ((1, 2),), 4, False),
            _start("b", 1, 3),
            Kernel("k", 5, 0),
            Done("d", "b"),
        ],
        (7, 5, 3),
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_streams_by_hand(name):
    items, expected = STREAMS[name]
    step = estimate(items, 3, SECONDS)
    assert (step.step_s, step.compute_s, step.communication_s) == expected


def test_exposed_and_hidden_communication():
    items, _ = STREAMS["the longer of both"]
    step = estimate(items, 3, SECONDS)
    assert (step.exposed_s, step.hidden) == (3, 1 - 3 / 8)
    assert step.bars == (
        Bar("communication", "push", 0, 8),
        Bar("compute", "matrix multiplication", 0, 5),
    )
    (pull,) = estimate([Start("a", ((0, 2),), 4, True)], 3, SECONDS).bars
    assert pull == Bar("communication", "pull", 0, 4)
    (other,) = estimate([Kernel("k", 0, 2)], 3, SECONDS).bars
    assert other == Bar("compute", "other kernel", 0, 2)


def test_times_of_the_hardware():
    hardware = Hardware()
    assert math.isclose(hardware.kernel_s(Kernel("k", 989, 0)), 2e-12)
    assert math.isclose(hardware.kernel_s(Kernel("k", 989, 33500)), 1e-8)
    assert math.isclose(hardware.transfer_s(450_000), 10e-6 + 1e-6)
    assert bounds(7.0, 3, 4, SECONDS) == (7 + 2 * 3 * 3, 18)
    assert bounds(20.0, 3, 4, SECONDS).overlapped_s == 20


def test_a_profile_holds_the_times_of_kernels_and_starts():
    hardware = Hardware(
        flops_per_s=8192e6, memory_bytes_per_s=512e6, link_bytes_per_s=256e6, alpha_s=0
    )
    assert ways.profile(ITEMS, hardware).splitlines() == [
        'costs { name: "push" cost_us: 2.000 }',
        'costs { name: "fusion" cost_us: 3.500 }',
        'costs { name: "blocked" cost_us: 2.000 }',
        'costs { name: "gemm" cost_us: 6.125 }',
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
    hardware = Hardware()
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
    kernels = [i for i in schedule(programs[1].as_text()) if isinstance(i, Kernel)]
    assert sum(kernel.flops for kernel in kernels) == overlap_delay.TINY.step_flops
    assert overlap_delay.TINY.step_flops == 5 * 2 * 16 * 64 * 64
    starts = [i for i in schedule(programs[1].as_text()) if isinstance(i, Start)]
    sizes = [start.bytes for start in starts if start.bytes >= findings.CARRIES]
    assert sizes == [overlap_delay.TINY.gradient_bytes] * 14
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
    step = findings.Estimate(step_s, 1.0, 2.0, ())
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
