"""Long modules are read in little time."""

from benchmarks.analysis import LIMIT_S, analyzed, repeated
from jaxdp.program import analyze
from tests.modules import module_text


def test_ten_thousand_lines_take_less_than_two_seconds():
    run = min((analyzed(7) for _ in range(2)), key=lambda run: run.seconds)
    assert run.lines > 10_000
    assert run.seconds < LIMIT_S


def test_the_long_module_is_its_parts():
    once, thrice = analyze(module_text("h100-ring")), analyze(repeated("h100-ring", 3))
    assert len(thrice.collectives) == 3 * len(once.collectives)
    assert thrice.sent_bytes == tuple(3 * size for size in once.sent_bytes)
    assert thrice.rounds == once.rounds == 14  # the parts do not wait for each other
