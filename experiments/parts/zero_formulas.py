"""What a device holds and sends at each stage of ZeRO, in closed form.

Nothing here reads a program. Ψ parameters; p, g and k bytes of each for itself, its
gradient and its optimizer state; N devices; Φ = g Ψ bytes of gradients:

    stage    holds                       sends
    0        (p + g + k) Ψ               2 (N - 1) / N Φ
    1        (p + g + k / N) Ψ           2 (N - 1) / N Φ
    2        (p + (g + k) / N) Ψ         2 (N - 1) / N Φ
    3        (p + g + k) Ψ / N           3 (N - 1) / N Φ

Every array is cut into N equal parts, so it is padded to a multiple of N elements, and
that travels too. Beside gradients travel a loss and statistics of BatchNorm, around a
ring of their own. Stage 3 gathers parameters for each pass that reads them; biases, and
all else that is only added, the backward pass does not.

Source: Rajbhandari et al., SC 2020, section 5 and figure 1 (what is held), section 7
(what is sent).
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

STAGES = (0, 1, 2, 3)
FLOAT = 4  # bytes of a float32
PARAMETERS, GRADIENTS, STATE = "parameters", "gradients", "optimizer state"
KINDS = (PARAMETERS, GRADIENTS, STATE)
FROM = {PARAMETERS: 3, GRADIENTS: 2, STATE: 1}  # the first stage that cuts it
PHASES = {0: 2, 1: 2, 2: 2, 3: 3}  # reduce-scatters and all-gathers


class Widths(NamedTuple):
    """Bytes for each parameter."""

    parameter: int
    gradient: int
    state: int


ADAM = Widths(FLOAT, FLOAT, 2 * FLOAT)  # two moments


class Sent(NamedTuple):
    """Bytes that a device sends in a step, by what they are."""

    formula: Fraction  # gradients, and parameters that are gathered
    spared: Fraction  # negative: gathered once and not twice
    padding: Fraction
    beside: Fraction

    @property
    def total(self) -> Fraction:
        """All of them."""
        return sum(self, Fraction(0))


def held(
    stage: int, parameters: int, n: int, widths: Widths = ADAM
) -> dict[str, float]:
    """Bytes of the model's states on a device, by kind."""
    return {
        name: parameters * width / (n if stage >= FROM[name] else 1)
        for name, width in zip(KINDS, widths, strict=True)
    }


def sent(
    stage: int, leaves: Sequence[int], not_again: Sequence[int], n: int, beside: int
) -> Sent:
    """Bytes that a device sends at a stage from 1 on.

    Args:
        stage: From 1 to 3.
        leaves: Elements of each parameter, in float32.
        not_again: Of those that the backward pass does not read.
        n: N.
        beside: Numbers of float32 that are averaged besides.
    """
    phase = Fraction(FLOAT * (n - 1), n)
    once = sum(not_again) if stage == 3 else 0
    padding = PHASES[stage] * sum(-leaf % n for leaf in leaves)
    if stage == 3:
        padding -= sum(-leaf % n for leaf in not_again)
    return Sent(
        phase * PHASES[stage] * sum(leaves),
        -phase * once,
        phase * padding,
        phase * 2 * (beside + -beside % n),
    )
