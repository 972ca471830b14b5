"""Damaged programs: a report follows from the text, or an error quotes the line.

Real modules are mutated at random, with fixed seeds. What a report says of a mutated
text is compared with a reader of ten lines that shares nothing with the library: it
looks for collectives line by line and takes sizes from *results*.
"""

import collections
import functools
import math
import random
import re

import pytest

from jaxdp.program import analyze
from tests.modules import NAMES, module_text

SMALL = [name for name in NAMES if len(module_text(name)) < 130_000]
ROUNDS = 30  # mutations of each module, shared by the kinds of mutation

COLLECTIVE = re.compile(
    r"^ *(?:ROOT )?%?(?P<name>\S+) = (?P<shape>.*?) (?P<kind>all-reduce|reduce-scatter|"
    r"all-gather|all-to-all|collective-permute)(?P<start>-start)?\((?P<operands>[^)]*)\)"
)
BYTES = {"f16": 2, "bf16": 2, "u16": 2, "f32": 4, "u32": 4, "s32": 4}
# Lines that say how often something runs, or how many devices there are.
COUNTS = re.compile(
    r"while|constant|compare|add|tuple|parameter|HloModule|conditional|call|fusion|copy"
)


def found_in(text):
    """By name: kind, bytes of the full array, and who takes part, as written."""
    found = {}
    for line in text.splitlines():
        match = COLLECTIVE.match(line)
        if not match or re.search(r'"flag_start":"\d', line):  # goes on with one
            continue
        kind, count = match["kind"], match["operands"].count("%")
        sizes = [
            BYTES.get(dtype, 1) * math.prod(int(d) for d in dims.split(",") if d)
            for dtype, dims in re.findall(r"([a-z]+\d+)\[([\d,]*)\]", match["shape"])
        ]
        if match["start"] and len(sizes) > count:
            sizes = sizes[count : 2 * count]
        listed = re.search(r"(?:groups|pairs)=\{(\{([\d,]*)\}\S*)\}", line)
        size = len(listed[2].split(",")) if listed else axes_size(line)
        full = sum(sizes) * (size if kind == "reduce-scatter" else 1)
        numbers = tuple(re.findall(r"\d+", listed[1])) if listed else size
        found[match["name"]] = (kind, full, numbers)
    return found


def axes_size(line):
    """Devices of a group along mesh axes."""
    found = re.search(r"groups=mesh\[(.*?)\].*? \{(.*?)\}", line)
    assert found is not None, line
    sizes = dict(re.findall(r"('\w+')=(\d+)", found[1]))
    return math.prod(int(sizes[axis]) for axis in found[2].split(","))


def read_by(report, written):
    """The same of a report; groups as a size where they are written as mesh axes."""
    found = {}
    for op in report.collectives:
        who = tuple(str(d) for group in op.pairs or op.groups for d in group)
        if isinstance(written.get(op.name, ["", 0, ()])[2], int):
            who = op.group_size
        found[op.name] = (op.kind, op.bytes, who)
    return found


def delete_line(text, random):
    lines = text.splitlines()
    del lines[random.randrange(len(lines))]
    return "\n".join(lines)


def duplicate_line(text, random):
    lines = text.splitlines()
    at = random.randrange(len(lines))
    lines.insert(random.randrange(len(lines)), lines[at])
    return "\n".join(lines)


def swap_lines(text, random):
    lines = text.splitlines()
    a = random.randrange(len(lines) - 1)
    b = random.choice([a + 1, random.randrange(len(lines))])
    lines[a], lines[b] = lines[b], lines[a]
    return "\n".join(lines)


def on_a_line(change):
    """Changes one line: half the time one with a collective or a loop in it."""

    def mutate(text, random):
        lines = text.splitlines()
        heavy = [
            i
            for i, line in enumerate(lines)
            if COLLECTIVE.match(line) or re.search(r" (while|conditional|call)\(", line)
        ]
        at = (
            random.choice(heavy)
            if random.random() < 0.5
            else random.randrange(len(lines))
        )
        lines[at] = change(lines[at], random)
        return "\n".join(lines)

    mutate.__name__ = change.__name__
    return mutate


@on_a_line
def delete_characters(line, random):
    at = random.randrange(len(line) + 1)
    return line[:at] + line[at + random.randrange(1, 6) :]


@on_a_line
def change_digit(line, random):
    digits = [i for i, c in enumerate(line) if c.isdigit()]
    if not digits:
        return line
    at = random.choice(digits)
    return line[:at] + random.choice("0123456789") + line[at + 1 :]


@on_a_line
def rename_operation(line, random):
    other = random.choice(
        ["copy", "add", "all-reduce", "all-gather", "collective-permute", "all-redce",
         "tuple", "all-to-all", "fusion", "collective-permute-start", "all-reduce-done"]
    )  # fmt: skip
    return re.sub(r" [a-z][a-z-]+\(", f" {other}(", line, count=1)


@on_a_line
def swap_words(line, random):
    words = line.split(" ")
    a, b = random.randrange(len(words)), random.randrange(len(words))
    words[a], words[b] = words[b], words[a]
    return " ".join(words)


@on_a_line
def drop_attribute(line, random):
    parts = line.split(", ")
    del parts[random.randrange(len(parts))]
    return ", ".join(parts)


@on_a_line
def empty_line(line, random):
    return ""


def truncate(text, random):
    return text[: random.randrange(len(text))]


MUTATIONS = [
    *(delete_line, duplicate_line, swap_lines, delete_characters, change_digit),
    *(rename_operation, swap_words, drop_attribute, empty_line, truncate),
]


def lines_that_differ(text, other):
    a, b = (collections.Counter(t.splitlines()) for t in (text, other))
    return [*(a - b), *(b - a)]


@functools.cache
def whole(text):
    """A report of a whole module, and the collectives in its text."""
    return analyze(text), found_in(text)


def check(text, mutated):
    """Whether a mutated text is refused; fails if what is reported is not in it."""
    original, present = whole(text)
    try:
        report = analyze(mutated)
    except (ValueError, TypeError) as error:
        assert "analyze" in str(error)
        quoted = re.findall(r"'([^'\n]*(?:'\w*'[^'\n]*)*)'|\"([^\"]*)\"", str(error))
        assert quoted, error
        return True
    differ = lines_that_differ(text, mutated)
    written = found_in(mutated)
    assert read_by(report, written) == written, differ
    assert len(written) >= len(present), differ
    runs, before = (
        [(op.name, op.count, op.branch) for op in each.collectives]
        for each in (report, original)
    )
    if runs != before or report.devices != original.devices:
        assert any(COUNTS.search(line) for line in differ), differ
    elif written == present:
        assert report.link_bytes == original.link_bytes, differ
        assert report.sent_bytes == original.sent_bytes, differ
    return False


@pytest.mark.parametrize("name", NAMES)
def test_the_reader_of_these_tests_agrees_on_whole_modules(name):
    written = found_in(module_text(name))
    assert read_by(analyze(module_text(name)), written) == written


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutated_modules(mutate):
    refused = 0
    for name in SMALL:
        chance = random.Random(f"{name} {mutate.__name__}")
        for _ in range(ROUNDS // len(MUTATIONS)):
            text = module_text(name)
            refused += check(text, mutate(text, chance))
    assert refused > 0


def test_every_truncation_is_refused():
    text = module_text("h100-combined")
    for end in range(0, len(text) - 2, 97):
        with pytest.raises((ValueError, TypeError)):
            analyze(text[:end])


@pytest.mark.parametrize("name", ["h100-kinds", "cpu-layers", "tpu-v5e-gathered"])
def test_no_collective_can_be_deleted(name):
    lines = module_text(name).splitlines()
    for at, line in enumerate(lines):
        if COLLECTIVE.match(line):
            with pytest.raises(ValueError, match="analyze found"):
                analyze("\n".join([*lines[:at], *lines[at + 1 :]]))
