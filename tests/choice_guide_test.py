"""The code of docs/algorithms.md does what the page says, and its formulas hold."""

import math
import re

import numpy as np
import pytest

from jaxdp import algorithms, targets
from jaxdp.cost import time_s
from tests.readme_test import README, code_of

GUIDE = README.parent / "docs" / "algorithms.md"
ROW = re.compile(
    r"^\| `(\w+)` \| (at most )?`(.*?)` \| (at most )?`(.*?)` \|", re.MULTILINE
)
ROWS = {row[0]: row[1:] for row in ROW.findall(GUIDE.read_text())}
A, RATE = 2.0, 3.0  # seconds, bytes per second


def test_code_of_the_guide_runs_and_prints_what_it_says(capsys):
    names = {}
    for block in code_of(GUIDE):
        exec(block, names)
    printed = capsys.readouterr().out
    for expected in re.findall(r"```text\n(.*?)```", GUIDE.read_text(), re.DOTALL):
        assert expected in printed
    for leaf in names["total"].values():
        np.testing.assert_array_equal(leaf, np.full(leaf.shape, 8.0))


def test_every_algorithm_is_in_the_table():
    assert {*ROWS} == {*algorithms.SCHEDULES["all_reduce"]}


@pytest.mark.parametrize("devices", [2, 4, 8, 16, 64])
@pytest.mark.parametrize("name", ROWS)
def test_formulas_are_those_of_the_schedules(name, devices):
    at_most_rounds, rounds, at_most_time, seconds = ROWS[name]
    schedule = algorithms.build("all_reduce", name, devices)
    size_bytes = 7 * math.lcm(schedule.chunks, 64)
    link = targets.Link(name="", bytes_per_s=RATE, alpha_s=A)
    machine = targets.hardware("h100", devices_per_host=devices)
    machine = machine.__class__(**{**vars(machine), "link": link})
    known = {"N": devices, "C": schedule.chunks, "a": A, "k": size_bytes / RATE}
    known["log2"] = lambda number: int(math.log2(number))
    found = len(schedule.rounds), time_s(schedule, size_bytes, 1, machine)
    said = [eval(formula, known) for formula in (rounds, seconds)]
    for at_most, value, expected in zip(
        (at_most_rounds, at_most_time), found, said, strict=True
    ):
        assert value <= expected * (1 + 1e-9)
        assert at_most or value == pytest.approx(expected)
        assert value >= 0.3 * expected  # a bound that says something
