"""Reading HLO text: groups, instructions, loops, branches, asynchronous forms.

The snippets are what XLA prints for GPUs or in other versions, which the CPU of the
test run does not. `jaxlib`'s own parser accepted most of them.
"""

import re

import jax
import pytest

from jaxdp.program import analyze, hlo
from jaxdp.program.hlo import shapes
from jaxdp.program.hlo.groups import parse_groups, parse_pairs

RING = "source_target_pairs={{0,1},{1,2},{2,3},{3,0}}"
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}
"""


def program(entry, computations="", header="num_partitions=4"):
    return (
        f"HloModule jit_f, is_scheduled=true, {header}\n{ADD}{computations}\n"
        f"ENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"
    )


def one(line, header="num_partitions=4", p="f32[8]{0}"):
    """Analyze a program of a parameter `%p` and one line."""
    return analyze(program(f"  %p = {p} parameter(0)\n  ROOT {line}", header=header))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0},{1,2,3}}", ((0,), (1, 2, 3))),
        ("{{0}}", ((0,),)),
        ("{}", ()),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[1,8]<=[8]", (tuple(range(8)),)),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=2] {'b','a'}", ((0, 2, 1, 3),)),
        ("mesh['a'=2,'b'=2] {}", ((0,), (1,), (2,), (3,))),
        ("mesh['b'=8] {'b':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['b'=8] {'b':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a,b'=2,'c=d'=2] {'c=d'}", ((0, 1), (2, 3))),
        (
            "mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}",
            ((0, 1, 2, 3), (4, 5, 6, 7)),
        ),
        ("mesh['a'=2,'b'=2], device_ids=(0,3,1,2) {'b'}", ((0, 3), (1, 2))),
        ("single_device[device_id=3] {}", ((3,),)),
    ],
)
def test_groups_in_every_syntax(text, expected):
    assert parse_groups(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "[2,4]<=8",
        "[2,4]<=[9]",
        "[4,2]<=[2,4]T(1,2)",
        "mesh['a'=2] {'b'}",
        "mesh['a'=2]",
        "mesh['a'=6] {'a':(4)2}",
        "mesh['a'=8] {'a':(1)2,'a':(4)2}",
        "mesh['a'=8] {'a','a':(2)2}",
        "mesh['a'=4], device_ids=(0,1) {'a'}",
        "{{0,1},{2,3}",
        "device_list(0,1)",
        "",
    ],
)
def test_unknown_groups_are_refused_with_their_line(text):
    line = f"%x = f32[8]{{0}} all-reduce(%p), replica_groups={text}"
    with pytest.raises(ValueError, match="cannot read replica_groups=") as error:
        parse_groups(text, line)
    assert repr(text) in str(error.value) and shapes.quote(line) in str(error.value)


def test_operands_with_shapes_and_tiles():
    line = (
        "ROOT %c = f32[8] copy(f32[8]{0:T(8,128)S(1)} /*x)*/%p), metadata={op_name=1}"
    )
    text = program(f"  %p = f32[8]{{0}} parameter(0)\n  {line}")
    copied = hlo.parse(text).computations["main"]["c"]
    assert copied.operands == ("p",)
    assert copied.attributes == {"metadata": "{op_name=1}"}


@pytest.mark.parametrize(
    ("written", "keys"),
    [
        (
            'metadata={op_name="a, b"}, backend_config={"n":[1,{"m":"}"}]}',
            ["metadata", "backend_config"],
        ),
        ('backend_config={"a":1}, origin={{"x"}}', ["backend_config", "origin"]),
        (
            'frontend_attributes={x=", backend_config={"}, channel_id=1',
            ["frontend_attributes", "channel_id"],
        ),
    ],
    ids=["before", "behind", "in_quotes"],
)
def test_attributes_around_a_configuration(written, keys):
    text = program(f"  ROOT %p = f32[8]{{0}} parameter(0), {written}")
    found = hlo.parse(text).computations["main"]["p"].attributes
    assert list(found) == keys
    assert ", ".join(f"{key}={value}" for key, value in found.items()) == written


def test_an_unknown_group_syntax_stops_the_report():
    line = "%x = f32[8]{0} all-reduce(%p), replica_groups=ring(4), to_apply=%add"
    with pytest.raises(ValueError, match=r"replica_groups='ring\(4\)'.*%x = f32\[8\]"):
        one(line)


@pytest.mark.parametrize("text", ["{{0,1,2}}", "{{0}}", "0,1", ""])
def test_pairs_that_are_no_pairs_are_refused(text):
    with pytest.raises(ValueError, match="cannot read source_target_pairs="):
        parse_pairs(text)


@pytest.mark.parametrize(
    ("attributes", "header", "expected"),
    [
        ("replica_groups={}", "replica_count=4", ((0, 1, 2, 3),)),
        ("replica_groups={{0,1}}", "replica_count=2", ((0, 1),)),
        ("replica_groups={{0}}", "num_partitions=2", ((0,), (1,))),
        ("channel_id=1, replica_groups={{0}}", "num_partitions=2", ((0, 1),)),
        (
            "channel_id=1, use_global_device_ids=true, replica_groups={{0,3},{1,2}}",
            "replica_count=2, num_partitions=2",
            ((0, 3), (1, 2)),
        ),
        (
            "replica_groups={{0,1}}",
            "replica_count=2, num_partitions=2",
            ((0, 2), (1, 3)),
        ),
        (
            "channel_id=1, replica_groups={{1,0}}",
            "replica_count=2, num_partitions=2",
            ((2, 3, 0, 1),),
        ),
    ],
    ids=[
        "replicas_all",
        "replicas",
        "each_partition_alone",
        "all_partitions_of_a_replica",
        "global_ids",
        "replicas_per_partition",
        "replicas_with_their_partitions",
    ],
)
def test_what_the_numbers_of_a_group_mean(attributes, header, expected):
    line = f"%x = f32[8]{{0}} all-reduce(%p), {attributes}, to_apply=%add"
    report = one(line, header)
    assert report.collectives[0].groups == expected


def test_pairs_with_a_channel_are_partitions_of_each_replica():
    line = "%x = f32[8] collective-permute(%p), channel_id=1, "
    report = one(
        line + "source_target_pairs={{0,1}}", "replica_count=2, num_partitions=2"
    )
    assert report.collectives[0].pairs == ((0, 1), (2, 3))
    assert report.sent_bytes == (32, 0, 32, 0)


def test_a_permute_without_pairs_moves_nothing():
    report = one("%x = f32[8] collective-permute(%p), source_target_pairs={}")
    assert report.sent_bytes == (0, 0, 0, 0) and report.permutes == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "all-reduce(%p), channel_id=1, use_global_device_ids=true, "
            "replica_groups={{0,7}}, to_apply=%add",
            "device 7 in .*replica_count=1 and num_partitions=4",
        ),
        (
            "all-reduce(%p), channel_id=1, use_global_device_ids=true, "
            "replica_groups={{0,1},{1,2}}, to_apply=%add",
            r"device twice in .*\{\{0,1\},\{1,2\}\}",
        ),
        (
            "collective-permute(%p), channel_id=1, source_target_pairs={{0,1},{2,1}}",
            r"device twice in .*\{\{0,1\},\{2,1\}\}",
        ),
        (
            "collective-permute(%gone), channel_id=1, " + RING,
            "no instruction named 'gone'",
        ),
        (
            "collective-permute(%p, %p), channel_id=1, slice_sizes={{4}}, " + RING,
            "cannot count a collective-permute with slice_sizes",
        ),
        (
            "collective-broadcast(%p), channel_id=1, replica_groups={{0,1}}, "
            "has_dynamic_root=true",
            "cannot count a collective-broadcast with has_dynamic_root",
        ),
        (
            "ragged-all-to-all(%p, %p, %p, %p, %p, %p), replica_groups={{0,1,2,3}}",
            r"cannot count 'ragged-all-to-all' in .*offsets computed at run time",
        ),
        ("send(%p, %p), channel_id=3", r"cannot count 'send' in .*channel_id=3"),
        ("all-reduce(%p, to_apply=%add", "no closing bracket in"),
    ],
    ids=[
        "device_out_of_range",
        "device_in_two_groups",
        "target_twice",
        "operand_missing",
        "in_place_permute",
        "dynamic_root",
        "ragged",
        "send",
        "bracket_open",
    ],
)
def test_what_cannot_be_counted_is_refused_with_its_line(line, message):
    with pytest.raises(ValueError, match=message):
        one(f"%x = f32[8]{{0}} {line}")


def test_host_transfers_are_not_traffic_between_devices():
    line = "%x = (f32[8], u32[], token[]) send(%p, %p), is_host_transfer=true"
    assert one(line).collectives == ()


@pytest.mark.parametrize(
    ("shape", "line", "kind", "sent"),
    [
        (
            "f32[8]",
            "all-reduce-start(%p), replica_groups=[1,4]<=[4], channel_id=1, "
            "use_global_device_ids=true, to_apply=%add",
            "all-reduce",
            48,
        ),
        (
            "(f32[8], f32[32], u32[])",
            "all-gather-start(%p), replica_groups=[1,4]<=[4], channel_id=1, "
            "use_global_device_ids=true, dimensions={0}",
            "all-gather",
            96,
        ),
        (
            "((f32[8]), f32[2], u32[])",
            "reduce-scatter-start(%p), replica_groups={{0,1,2,3}}, channel_id=1, "
            "use_global_device_ids=true, dimensions={0}, to_apply=%add",
            "reduce-scatter",
            24,
        ),
        (
            "((f32[8]), f32[8])",
            "all-to-all-start(%p), channel_id=1, replica_groups={{0,1,2,3}}, "
            "dimensions={0}",
            "all-to-all",
            24,
        ),
        (
            "(f32[8], f32[8], u32[], u32[])",
            f"collective-permute-start(%p), channel_id=1, {RING}, "
            'backend_config={"collective_backend_config":{"is_sync":true}}',
            "collective-permute",
            32,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_asynchronous_forms_count_once_and_by_what_goes_in(shape, line, kind, sent):
    report = analyze(
        program(
            f"  %p = f32[8]{{0}} parameter(0)\n  %s = {shape} {line}\n"
            f"  ROOT %d = f32[8] {kind}-done(%s)"
        )
    )
    assert [op.kind for op in report.collectives] == [kind]
    assert report.sent_bytes == report.received_bytes == (sent,) * 4


def test_a_broadcast_passes_from_device_to_device():
    report = one(
        "%x = ((f32[8]), f32[8]) collective-broadcast-start(%p), channel_id=1, "
        "replica_groups={{3,0,1,2}}"
    )
    assert report.sent_bytes == (32, 32, 0, 32)
    assert report.received_bytes == (32, 32, 32, 0)


WRAPPED = """
%wrapped (q: f32[8]) -> (f32[2], f32[8]) {
  %q = f32[8]{0} parameter(0)
  %rs = f32[2]{0} reduce-scatter(%q), channel_id=1, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%add
  %ar = f32[8]{0} all-reduce(%q), channel_id=2, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, to_apply=%add
  ROOT %t = (f32[2]{0}, f32[8]{0}) tuple(%rs, %ar)
}
"""


def test_an_asynchronous_group_is_entered_where_it_starts_only():
    entry = (
        "  %p = f32[8]{0} parameter(0)\n"
        "  %s = ((f32[8]), (f32[2], f32[8]), s32[]) async-start(%p), calls=%wrapped\n"
        "  %u = ((f32[8]), (f32[2], f32[8]), s32[]) async-update(%s), calls=%wrapped\n"
        "  ROOT %d = (f32[2], f32[8]) async-done(%u), calls=%wrapped"
    )
    report = analyze(program(entry, WRAPPED))
    assert [op.kind for op in report.collectives] == ["reduce-scatter", "all-reduce"]
    assert report.sent_bytes == (24 + 48,) * 4


def test_a_computation_counts_for_every_place_that_calls_it():
    entry = (
        "  %p = f32[8]{0} parameter(0)\n"
        "  %c = (f32[2], f32[8]) call(%p), to_apply=%wrapped\n"
        "  ROOT %f = (f32[2], f32[8]) fusion(%p), kind=kCustom, calls=%wrapped"
    )
    report = analyze(program(entry, WRAPPED))
    assert report.count("all-reduce") == 2
    assert report.sent_bytes == (2 * (24 + 48),) * 4


def test_a_collective_in_an_uncounted_call_is_refused():
    entry = (
        "  %p = f32[8]{0} parameter(0)\n"
        "  ROOT %c = f32[8] custom-call(%p), called_computations={%wrapped}"
    )
    with pytest.raises(ValueError, match=r"that 'custom-call' runs in .*%wrapped"):
        analyze(program(entry, WRAPPED))


BODY = """
%cond (t: f32[8]) -> pred[] {
  %t = f32[8]{0} parameter(0)
  %probe = f32[8]{0} all-reduce(%t), channel_id=2, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, to_apply=%add
  ROOT %go = pred[] constant(true)
}

%body (t: f32[8]) -> f32[8] {
  %t = f32[8]{0} parameter(0)
  ROOT %move = f32[8]{0} collective-permute(%t), channel_id=1, PAIRS
}
""".replace("PAIRS", RING)
LOOP = "%w = f32[8]{0} while(%p), condition=%cond, body=%body"
TRIPS = 'backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}'


def test_loops_multiply_and_the_condition_runs_once_more():
    entry = f"  %p = f32[8]{{0}} parameter(0)\n  ROOT {LOOP}, {TRIPS}"
    report = analyze(program(entry, BODY))
    assert report.count("collective-permute") == 5
    assert report.count("all-reduce") == 6
    assert report.sent_bytes == (5 * 32 + 6 * 48,) * 4


def test_a_loop_in_a_loop_multiplies_twice():
    outer = (
        "%outer (o: f32[8]) -> f32[8] {\n  %o = f32[8]{0} parameter(0)\n"
        f"  ROOT {LOOP.replace('%p', '%o')}, {TRIPS}\n}}\n\n"
        "%always (o: f32[8]) -> pred[] {\n  ROOT %go = pred[] constant(true)\n}\n"
    )
    line = "%w2 = f32[8] while(%p), condition=%always, body=%outer, "
    trips = 'backend_config="{\\"known_trip_count\\":{\\"n\\":\\"3\\"}}"'
    entry = f"  %p = f32[8]{{0}} parameter(0)\n  ROOT {line}{trips}"
    report = analyze(program(entry, BODY + outer))
    assert report.count("collective-permute") == 15
    assert report.static_count("collective-permute") == 1


def test_an_unknown_trip_count_is_refused_only_around_a_collective():
    entry = f"  %p = f32[8]{{0}} parameter(0)\n  ROOT {LOOP}"
    with pytest.raises(ValueError, match=r"how often the loop 'w' runs.*body=%body"):
        analyze(program(entry, BODY))
    quiet = re.sub(r"(?:collective-permute|all-reduce)\(%t\),.*", "copy(%t)", BODY)
    assert analyze(program(entry, quiet)).collectives == ()


BRANCHES = """
%left (t: f32[8]) -> f32[8] {
  %t = f32[8]{0} parameter(0)
  ROOT %l = f32[8]{0} collective-permute(%t), channel_id=1, source_target_pairs={{0,1}}
}

%right (t: f32[8]) -> f32[8] {
  %t = f32[8]{0} parameter(0)
  %half = f32[4]{0} slice(%t), slice={[0:4]}
  %r1 = f32[4]{0} collective-permute(%half), channel_id=2, \
source_target_pairs={{0,1},{2,3}}
  ROOT %r2 = f32[4]{0} collective-permute(%r1), channel_id=3, \
source_target_pairs={{2,3}}
}
"""


@pytest.mark.parametrize(
    "names",
    [
        "branch_computations={%left, %right}",
        "true_computation=%left, false_computation=%right",
    ],
    ids=["indexed", "boolean"],
)
def test_of_two_branches_the_larger_counts_device_by_device(names):
    line = f"%c = f32[8]{{0}} conditional(%p, %p, %p), {names}"
    entry = f"  %p = f32[8]{{0}} parameter(0)\n  ROOT {line}"
    report = analyze(program(entry, BRANCHES))
    assert [op.branch for op in report.collectives] == [
        (("c", 0),),
        (("c", 1),),
        (("c", 1),),
    ]
    assert report.sent_bytes == (32, 0, 32, 0)
    assert report.link_bytes == {(0, 1): 32, (2, 3): 32}
    assert report.permutes == 2 and report.static_count("collective-permute") == 3
    assert "? may not run" in str(report)


def test_two_conditionals_add_up():
    line = "conditional(%p, %p, %p), branch_computations={%left, %right}"
    entry = (
        f"  %p = f32[8]{{0}} parameter(0)\n  %c = f32[8]{{0}} {line}\n"
        f"  ROOT %d = f32[8]{{0}} {line}"
    )
    assert analyze(program(entry, BRANCHES)).sent_bytes == (64, 0, 64, 0)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[1,16]{1,0}", 64),
        ("bf16[3]{0:T(256)(128)(2,1)}", 6),
        ("pred[5]{0}", 5),
        ("s4[5]{0}", 5),
        ("s4[5]{0:E(4)}", 3),
        ("f8e4m3fn[7]{0}", 7),
        ("c128[2]{0}", 32),
        ("f64[]", 8),
        ("f32[0,4]{1,0}", 0),
        ("((f32[2]{0}, /*index=5*/u8[3]), token[], (bf16[2]))", 15),
    ],
)
def test_sizes_of_shapes(shape, size):
    assert sum(array.bytes for array in shapes.arrays(shape, "")) == size


@pytest.mark.parametrize("shape", ["f32[<=8]", "weird[8]"])
def test_a_shape_without_a_size_is_refused(shape):
    with pytest.raises(ValueError, match=r"cannot size .*'%x = "):
        shapes.arrays(shape, f"%x = {shape} all-reduce(%p)")


def test_strings_comments_and_layouts_do_not_confuse_the_parser():
    line = (
        r"%y.1 = (b(f32[8]{0}), /*index=1*/f32[8]{0:T(8,128)S(1)}) custom-call(%a, "
        r'/*index=1*/f32[8]{0} %b.2), custom_call_target="x\"}, y=(", '
        r'sharding={devices=[4,1]<=[4] metadata={op_name="q, r"}}, '
        r'metadata={op_name="jit(f)/\"g\"" source_file="a b.py" source_line=12}, '
        r'backend_config={"s":"}\"{","n":{"m":[1,2]}}'
    )
    module = hlo.parse(program(f"  {line}"))
    instruction = module.computations["main"]["y.1"]
    assert instruction.opcode == "custom-call"
    assert instruction.operands == ("a", "b.2")
    assert instruction.attributes["custom_call_target"] == r'"x\"}, y=("'
    assert instruction.attributes["backend_config"] == r'{"s":"}\"{","n":{"m":[1,2]}}'
    assert module.origin(instruction) == ('jit(f)/"g"', "a b.py:12")


def test_a_scope_named_like_the_mark_of_a_root_is_none():
    module = hlo.parse(
        "HloModule m\n\nENTRY %main (x: f32[2]) -> f32[2] {\n"
        "  %x = f32[2] parameter(0)\n"
        '  %y = f32[2] negate(%x), metadata={op_name="jit(f)/ROOT block/neg"}\n'
        "  ROOT %z = f32[2] negate(%y)\n}\n"
    )
    assert hlo.root_of(module.computations["main"]).name == "z"


def test_a_line_that_is_no_instruction_is_quoted_with_its_number():
    text = program("  %p = f32[8]{0} parameter(0)\n  replica_groups={{0,1}}")
    with pytest.raises(ValueError, match=r"line 11 .*'replica_groups=\{\{0,1\}\}'"):
        hlo.parse(text)


def test_two_modules_are_refused():
    text = program("  ROOT %p = f32[8]{0} parameter(0)")
    with pytest.raises(ValueError, match="2 'HloModule' lines and 2 ENTRY"):
        analyze(text + "\n" + text)


def test_a_long_line_is_cut_in_messages():
    assert shapes.quote("  " + "x" * 500) == repr("x" * 400) + " (cut)"


def plus_one(x):
    return x + 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (jax.jit(plus_one), "a PjitFunction"),
        (plus_one, "a function"),
        (jax.jit(plus_one).lower(1.0), "a Lowered"),
        (jax.jit(plus_one).trace(1.0), "a Traced"),
        (jax.jit(plus_one).lower(1.0).as_text(), "starts with 'module @jit_plus_one"),
        (jax.jit(plus_one).lower(1.0).as_text("hlo"), "without is_scheduled=true"),
        (None, "a compiled program without text"),
        (3, "a int"),
    ],
    ids=["jitted", "function", "lowered", "traced", "mlir", "raw_hlo", "none", "int"],
)
def test_what_is_not_compiled_is_refused_with_the_remedy(given, message):
    with pytest.raises(TypeError, match=message) as error:
        analyze(given)
    assert "jax.jit(f).lower(*args).compile()" in str(error.value)
