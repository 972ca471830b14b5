"""How far numbers are from what is claimed: in a figure, and in a gradient."""

import numpy as np
import pytest

from experiments.ledger import figures
from experiments.parts import gradients


@pytest.mark.parametrize(
    ("cell", "numbers"),
    [
        (97.5, (97.5, 97.5)),
        ("15 to 30 %", (15, 30)),
        ("1.5 to 57.3 %, predicted", (1.5, 57.3)),
        ("18 and 29 % of memory; time: none", (18, 29)),
        ("50 % of memory, 20 % of time", (50, 50)),
        ("about 40", (40, 40)),
        ("3, or 1", (1, 3)),
        ("1,024 of 2", (1024, 1024)),
        ("-2.5e-3", (-0.0025, -0.0025)),
        ("slices on devices 3, 1", None),
        ("", None),
    ],
    ids=str,
)
def test_numbers_of_cells(cell, numbers):
    assert figures.interval(cell) == numbers


def test_how_far_a_number_is_from_a_claim():
    far = {measured: figures.apart((20, 40), measured) for measured in (0, 10, 30, 80)}
    assert far == {0: -1, 10: -0.5, 30: 0, 80: 0.5}
    assert [figures.apart((0, 0), measured) for measured in (0, 66)] == [0, 1]


def test_the_share_of_a_gradient_by_hand():
    full = {"w": np.array([3.0, 0.0]), "b": np.array([4.0])}
    quarter = {"w": np.array([0.75, 9.0]), "b": np.array([1.0])}  # 9: across it
    assert gradients.share(full, full) == 1
    assert gradients.share(quarter, full) == (2.25 + 4) / 25
