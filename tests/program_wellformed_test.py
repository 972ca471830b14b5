"""Text that is not whole is refused, with its line: one edit of a program each."""

import pytest

from jaxdp.program import analyze
from tests.modules import module_text

WHOLE = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

FileNames
1 "tests/f.py"

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner (q: f32[8]) -> f32[2] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[2]{0} reduce-scatter(%q), channel_id=1, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, dimensions={0}, to_apply=%add
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %ps = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), \
channel_id=2, source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  %pd = f32[8]{0} collective-permute-done(%ps)
  %c = f32[2]{0} call(%pd), to_apply=%inner
  ROOT %ag = f32[8]{0} all-gather(%c), channel_id=3, replica_groups={{0,1,2,3}}, \
use_global_device_ids=true, dimensions={0}
}
"""
DONE = "  %pd = f32[8]{0} collective-permute-done(%ps)\n"


def test_the_whole_program_is_read():
    report = analyze(WHOLE)
    assert report.sent_bytes == (32 + 3 * 8 + 3 * 8,) * 4
    assert report.rounds == 1 + 3 + 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("add(%a, %b)", "plus(%a, %b)", r"operation 'plus' in 'ROOT %sum ="),
        ("%pd = f32", "%p = f32", r"a second 'p' in line 20: '%p = f32\[8\]"),
        ("%inner (q", "%add (q", r"a second 'add' in line 12: '%add \(q"),
        ("all-gather(%c)", "all-gather(%d)", r"no instruction named 'd' in 'ROOT %ag"),
        ("to_apply=%inner", "to_apply=%other", r"no computation named 'other' in '%c"),
        ("to_apply=%inner", "apply=%inner", r"no to_apply or calls in '%c = "),
        ("ROOT %ag", "%ag", r"found 0 results in the computation 'main'"),
        ("  %pd = f32", "  ROOT %pd = f32", r"2 results .*'main': \['pd', 'ag'\]"),
        (DONE, "  %pd = f32[8]{0} copy(%p)\n", r"nothing that waits for it in '%ps ="),
        ("done(%ps)", "done(%p)", r"no collective-permute-start in '%pd ="),
        (DONE, DONE + DONE.replace("%pd", "%pe"), r"a second collective-permute-done"),
        ("call(%pd), to", "custom-call(%pd), to", r"that 'custom-call' runs in '%c"),
        ("call(%pd)", 'custom-call(%pd), custom_call_target="NcclAllReduce"', "Nccl"),
        ("all-gather(%c)", "copy(%c)", r"replica_groups of a copy in 'ROOT %ag ="),
        ("to_apply=%inner", "to_apply=%add", r"nothing that runs .*'inner'.*'ROOT %rs"),
        ("f32[2]{0} reduce", "f32[4]{0} reduce", r"reduce-scatter of f32\[8\] with"),
        ("f32[8]{0} all-gather", "f32[7]{0} all-gather", r"does not give f32\[7\]"),
        ("f32[8]{0}, u32", "f32[9]{0}, u32", r"f32\[8\], f32\[9\], u32\[\], u32\[\]\."),
        ("dimensions={0}, to", "dimensions={1}, to", r"with dimension '1' does not"),
        ("ids=true, dimensions={0}\n", "ids=true\n", r"with dimension '' does not"),
        ("id=3, replica_groups", "id=3, groups", r"the attribute 'groups' in 'ROOT"),
        ("replica_groups={{0,1,2,3}}, use_global_device_ids=true, dimensions={0}\n",
         "dimensions={0}\n", r"no replica_groups in 'ROOT %ag"),
        ("id=3, replica_groups={{0,1,2,3}}", "id=3, replica_groups={{0,1},{2}}",
         r"3 of 4 devices in the groups of 'ROOT %ag"),
        ("id=3, replica_groups={{0,1,2,3}}", "id=3, replica_groups={{0,1,2},{3}}",
         r"groups of \[1, 3\] devices in 'ROOT %ag"),
        ("u32[], u32[])", "u32[], f32[2])", r"f32\[8\], f32\[8\], u32\[\], f32\[2\]\."),
        ('1 "tests', 'x "tests', r"read line 4 of the HLO text: 'x \"tests"),
        ("%inner (q: f32[8]) -> f32[2] {\n", "", r"line 12 .*'%q = f32.*outside"),
        ("{0}\n}\n", "{0}\n", r"ends inside a computation.*'ROOT %ag"),
        ("ENTRY ", "", r"1 'HloModule' lines and 0 ENTRY"),
    ],
)  # fmt: skip
def test_a_damaged_program_is_refused(old, new, message):
    assert WHOLE.count(old) >= 1
    head, _, tail = WHOLE.rpartition(old)
    with pytest.raises(ValueError, match=message):
        analyze(head + new + tail)


def test_the_marks_of_a_tpu_must_fit():
    text = module_text("tpu-v5e-gathered")
    start = 'custom_call_target="AsyncCollectiveStart"'
    with pytest.raises(ValueError, match=r"0 AsyncCollectiveStart in the computation"):
        analyze(text.replace(start, 'custom_call_target="Other"', 1))
    with pytest.raises(ValueError, match=r"1 AsyncCollectiveStart .* and 0 coll"):
        analyze(text.replace('"flag_start":"-1"', '"flag_start":"1"', 1))
    with pytest.raises(ValueError, match=r"cannot tell whether '%all-gather.*chain_id"):
        analyze(text.replace('"flag_start":"2"', '"flag_start":""', 1))


def test_an_unscheduled_program_is_refused_with_its_header():
    with pytest.raises(TypeError, match=r"not optimized.*'HloModule jit_f, num_part"):
        analyze(WHOLE.replace("is_scheduled=true, ", ""))


def test_a_kind_that_newer_versions_have_is_refused():
    line = WHOLE.replace("all-gather(%c)", "collective-reduce(%c)")
    with pytest.raises(ValueError, match=r"cannot count 'collective-reduce' in 'ROOT"):
        analyze(line)
