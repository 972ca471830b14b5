"""How much of its operands a fused computation needs, by hand."""

import pytest

from jaxdp.program import hlo
from jaxdp.program.timeline.demand import elements_needed

HEADER = "HloModule m, is_scheduled=true\n\n"
CASES = {
    "all of an elementwise result": (
        """
        %a = f32[100]{0} parameter(0)
        ROOT %r = f32[100]{0} negate(%a)""",
        {"a": 100},
    ),
    "a slice of an elementwise result": (
        """
        %a = f32[100]{0} parameter(0)
        %b = f32[100]{0} parameter(1)
        %sum = f32[100]{0} add(%a, %b)
        ROOT %r = f32[10]{0} slice(%sum), slice={[20:30]}""",
        {"a": 10, "b": 10},
    ),
    "two slices are two parts": (
        """
        %a = f32[100]{0} parameter(0)
        %n = f32[100]{0} negate(%a)
        %x = f32[10]{0} slice(%n), slice={[0:10]}
        %y = f32[25]{0} slice(%n), slice={[40:65]}
        ROOT %r = (f32[10]{0}, f32[25]{0}) tuple(%x, %y)""",
        {"a": 35},
    ),
    "never more than there is": (
        """
        %a = f32[100]{0} parameter(0)
        %x = f32[80]{0} slice(%a), slice={[0:80]}
        %y = f32[70]{0} slice(%a), slice={[30:100]}
        ROOT %r = (f32[80]{0}, f32[70]{0}) tuple(%x, %y)""",
        {"a": 100},
    ),
    "a part of joined arrays is a part of each": (
        """
        %a = f32[60]{0} parameter(0)
        %b = f32[40]{0} parameter(1)
        %c = f32[100]{0} concatenate(%a, %b), dimensions={0}
        ROOT %r = f32[10]{0} slice(%c), slice={[55:65]}""",
        {"a": 6, "b": 4},
    ),
    "a part that may lie anywhere counts for each": (
        """
        %a = f32[60]{0} parameter(0)
        %b = f32[4]{0} parameter(1)
        %i = s32[] parameter(2)
        %c = f32[64]{0} concatenate(%a, %b), dimensions={0}
        %d = f32[10]{0} dynamic-slice(%c, %i), dynamic_slice_sizes={10}
        ROOT %r = f32[2,5]{1,0} bitcast(%d)""",
        {"a": 10, "b": 4, "i": 1},
    ),
    "a sum needs what it adds up": (
        """
        %a = f32[8,10]{1,0} parameter(0)
        %z = f32[] constant(0)
        %s = f32[10]{0} reduce(%a, %z), dimensions={0}, to_apply=%add
        ROOT %r = f32[5]{0} slice(%s), slice={[0:5]}""",
        {"a": 40},
    ),
    "what is updated in place is not read": (
        """
        %a = f32[100]{0} parameter(0)
        %u = f32[7]{0} parameter(1)
        %i = s32[] parameter(2)
        ROOT %r = f32[100]{0} dynamic-update-slice(%a, %u, %i)""",
        {"a": 0, "u": 7, "i": 1},
    ),
    "what no result needs": (
        """
        %a = f32[100]{0} parameter(0)
        %b = f32[3]{0} parameter(1)
        %n = f32[100]{0} negate(%a)
        ROOT %r = f32[3]{0} negate(%b)""",
        {"a": 0, "b": 3},
    ),
}


@pytest.mark.parametrize(("body", "expected"), CASES.values(), ids=CASES)
def test_elements_needed(body, expected):
    module = hlo.parse(f"{HEADER}ENTRY %main (p: f32[]) -> f32[] {{{body}\n}}\n")
    needed = elements_needed(module.computations["main"])
    assert {name: needed[name] for name in expected} == pytest.approx(expected)
