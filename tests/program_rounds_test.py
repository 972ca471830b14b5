"""Rounds on the critical path: what waits for what, in programs written by hand."""

import pytest

from jaxdp.program import analyze

ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""
HEADER = "HloModule jit_f, is_scheduled=true, num_partitions=4\n"
MOVE = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
ALL = "channel_id=2, replica_groups={{0,1,2,3}}, use_global_device_ids=true"


def rounds(lines, computations=""):
    """Rounds of a program of a parameter `%p` of 8 float32 and these lines."""
    body = "\n  ".join(["%p = f32[8]{0} parameter(0)", *lines])
    entry = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  {body}\n}}\n"
    return analyze(HEADER + ADD + computations + entry).rounds


def permute(name, of):
    return f"%{name} = f32[8]{{0}} collective-permute(%{of}), {MOVE}"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["ROOT %c = f32[8]{0} copy(%p)"], 0),
        ([f"ROOT {permute('x', 'p')}"], 1),
        ([permute("x", "p"), permute("y", "x"), f"ROOT {permute('z', 'y')}"], 3),
        ([permute("x", "p"), permute("y", "p"), "ROOT %z = f32[8] add(%x, %y)"], 1),
        (
            [
                permute("x", "p"),
                "%t = (f32[8], f32[8]) tuple(%x, %p)",
                "%late = f32[8] get-tuple-element(%t), index=0",
                "%early = f32[8] get-tuple-element(%t), index=1",
                permute("y", "early"),
                "ROOT %z = f32[8] add(%late, %y)",
            ],
            1,
        ),
        ([f"ROOT %x = f32[8] all-reduce(%p), {ALL}, to_apply=%add"], 6),
        ([f"ROOT %x = f32[2] reduce-scatter(%p), {ALL}, dimensions={{0}}, "
          "to_apply=%add"], 3),
        ([f"ROOT %x = f32[32] all-gather(%p), {ALL}, dimensions={{0}}"], 3),
        ([f"ROOT %x = f32[8] all-to-all(%p), {ALL}, dimensions={{0}}"], 3),
        (
            [
                "ROOT %x = f32[8] all-reduce(%p), channel_id=2, "
                "replica_groups={{0,1},{2,3}}, use_global_device_ids=true, "
                "to_apply=%add"
            ],
            2,
        ),
        (
            [
                "ROOT %x = f32[8] all-reduce(%p), channel_id=2, "
                "replica_groups={{0},{1},{2},{3}}, use_global_device_ids=true, "
                "to_apply=%add"
            ],
            0,
        ),
        (
            [
                "ROOT %x = f32[8]{0} collective-permute(%p), channel_id=1, "
                "source_target_pairs={{0,0},{1,1}}"
            ],
            0,
        ),
        (
            [
                f"%s = (f32[8], f32[8]) collective-permute-start(%p), {MOVE}",
                "%k = f32[8] negate(%p)",
                "%d = f32[8] collective-permute-done(%s)",
                "ROOT %y = f32[8] add(%d, %k)",
            ],
            1,
        ),
    ],
    ids=[
        *("none", "permute", "chain", "side_by_side", "elements_of_a_tuple"),
        *("all_reduce", "reduce_scatter", "all_gather", "all_to_all"),
        *("groups_of_two", "groups_of_one", "to_itself", "start_and_done"),
    ],
)  # fmt: skip
def test_rounds(lines, expected):
    assert rounds(lines) == expected


BODY = f"""
%body (t: f32[8]) -> f32[8] {{
  %t = f32[8]{{0}} parameter(0)
  {permute("x", "t")}
  ROOT {permute("y", "x")}
}}

%go (t: f32[8]) -> pred[] {{
  %t = f32[8]{{0}} parameter(0)
  ROOT %yes = pred[] constant(true)
}}

%one (t: f32[8]) -> f32[8] {{
  %t = f32[8]{{0}} parameter(0)
  ROOT {permute("x", "t")}
}}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"5"}}'


def test_turns_of_a_loop_follow_each_other():
    loop = f"%w = f32[8]{{0}} while(%p), condition=%go, body=%body, {TRIPS}"
    branch = "conditional(%p, %w, %w), branch_computations={%one, %body}"
    # 5 trips of 2, then the longer of 1 and 2, then a call of 1.
    lines = [loop, f"%b = f32[8] {branch}", "ROOT %c = f32[8] call(%b), to_apply=%one"]
    assert rounds(lines, BODY) == 5 * 2 + 2 + 1


def test_an_asynchronous_call_counts_once():
    lines = [
        "%s = ((f32[8]), f32[8], u32[]) async-start(%p), calls=%body",
        "%u = ((f32[8]), f32[8], u32[]) async-update(%s), calls=%body",
        "ROOT %d = f32[8] async-done(%u), calls=%body",
    ]
    computations = BODY.replace(BODY[BODY.index("%go") :], "")
    assert rounds(lines, computations) == 2


def test_a_report_without_a_program_has_no_rounds():
    report = analyze(HEADER + "ENTRY %m (p: f32[]) -> f32[] {\n"
                     "  ROOT %p = f32[] parameter(0)\n}\n")  # fmt: skip
    without = type(report)(report.collectives, report.devices)
    with pytest.raises(ValueError, match=r"report\.rounds got a report without"):
        _ = without.rounds
    assert "rounds" not in str(without) and "rounds    0" in str(report)
