"""What the experiment `zero` says devices hold and send: by hand, and as it runs."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import zero
from experiments.parts import zero_claims as claims
from experiments.parts import zero_formulas as formulas
from experiments.parts import zero_steps as steps
from experiments.parts import zero_tables as tables
from tests import experiments_contract as contract
from tests.compilers import needs_compiler

PARAMS = {
    "blocks": {"bias": jnp.zeros(5), "scale": jnp.zeros((1, 7))},
    "stem": {"kernel": jnp.zeros((3, 4))},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return contract.run("zero", tmp_path_factory.mktemp("results"))


def test_what_is_written(ran):
    contract.check(ran, {"CB8": "holds"})
    contract.check_labels(ran.document)


def test_every_byte_that_is_sent_is_explained(ran):
    rows = ran.document["tables"]["sent_by_a_device"]
    assert [row["stage"] for row in rows] == [1, 2, 3]
    assert all(row["exact"] for row in rows)
    assert [row["spared_bytes"] < 0 for row in rows] == [False, False, True]


def test_parameters_and_state_are_those_of_the_formula(ran):
    """Up to padding to two devices and two counters: parameters are even in number."""
    for row in ran.document["tables"]["held_by_a_device"]:
        for kind in (formulas.PARAMETERS, formulas.STATE):
            counted, formula = row[f"{kind}_mb"], row[f"{kind}, formula_mb"]
            assert abs(counted - formula) * tables.MIB <= 8
        total = sum(row[f"{kind}_mb"] for kind in steps.KINDS)
        assert total == pytest.approx(row["all_mb"])


def test_stages_train_alike(ran):
    rows = ran.document["tables"]["losses_on_digits"]
    assert [row["run"] for row in rows] == ["DDP", "stage 1", "stage 2", "stage 3"]
    for row in rows:
        assert row["largest difference to DDP"] < 1e-6
        assert row["parameters to one device"] < 1e-4
        assert row["last loss"] < row["first loss"]


@pytest.mark.parametrize(
    ("stage", "widths"),  # of 1000 parameters on 4 devices, Adam in float32
    [(0, (4, 4, 8)), (1, (4, 4, 2)), (2, (4, 1, 2)), (3, (1, 1, 2))],
    ids=str,
)
def test_formula_of_what_is_held(stage, widths):
    held = formulas.held(stage, 1000, 4)
    assert list(held.values()) == [1000 * width for width in widths]


def test_formula_of_16_bits_is_that_of_the_paper():
    """Figure 1: 7.5e9 parameters, 64 devices, K = 12: 120, 31.4, 16.6 and 1.9 GB."""
    widths = formulas.Widths(2, 2, 12)
    totals = [
        sum(formulas.held(s, 7_500_000_000, 64, widths).values()) for s in range(4)
    ]
    assert [round(total / 1e9, 1) for total in totals] == [120, 31.4, 16.6, 1.9]


def test_formula_of_what_is_sent():
    """Leaves of 5 and 12 on 4 devices are 8 and 12; 3 numbers beside are 4."""
    one = formulas.sent(1, (5, 12), (5,), 4, 3)
    assert one == (2 * 3 * 17, 0, 2 * 3 * 3, 2 * 3 * 4)
    assert one == formulas.sent(2, (5, 12), (5,), 4, 3)
    three = formulas.sent(3, (5, 12), (5,), 4, 3)
    assert three == (3 * 3 * 17, -3 * 5, 2 * 3 * 3, 2 * 3 * 4)
    assert three.total == 3 * (20 + 20 + 12) + 24  # gathered, reduced, gathered again


def test_what_the_backward_pass_does_not_read():
    assert sorted(steps.not_again(PARAMS)) == [5, 12]


def held_as(**parts: list[tuple[str, int]]) -> Any:
    """What a program would hold."""
    return SimpleNamespace(
        parts={
            name.replace("_", " "): SimpleNamespace(leaves=leaves)
            for name, leaves in parts.items()
        }
    )


@pytest.mark.parametrize(
    ("stage", "kept", "moving"), [(1, 2 + 4 + 16, 1 + 8), (2, 16, 1 + 2 + 4 + 8)]
)
def test_kinds_of_what_is_held(stage, kept, moving):
    held = held_as(
        parameters=[("params['w']", 32), ("gathered/ppermute f32[1,6]", 1)],
        gradients=[("transpose(jvp())/dot_general f32[7]", 2)],
        buckets=[
            ("jit(_where)/select_n f32[4,3]", 4),
            ("bucket_2 f32[4,6]", 8),
            ("bucket_2 f32[1,6]", 16),
        ],
        optimizer_state=[("opt_state.mu", 64)],
        activations=[("jvp()/tanh f32[9]", 128)],
        batch=[("batch[0]", 256)],
    )
    assert steps.by_kind(stage, held, PARAMS) == {
        formulas.PARAMETERS: 32,
        formulas.GRADIENTS: kept,
        formulas.STATE: 64,
        steps.ACTIVATIONS: 128,
        steps.COPIES: moving,
        steps.REST: 256,
    }


def made_up(stage: int, devices: int, more: float = 1.0, sent: int = 0) -> steps.Step:
    """A step that holds and sends what formulas say, and something more."""
    leaves, not_again = (1024, 640), (640,)
    held = formulas.held(stage, sum(leaves), devices)
    held = dict.fromkeys(steps.KINDS, 7) | {k: int(more * x) for k, x in held.items()}
    expected = formulas.sent(max(stage, 1), leaves, not_again, devices, 1)
    total = int(expected.total) + sent
    given = "M", stage, devices, leaves, not_again, 1, held, (total,) * devices
    return steps.Step(*given, program=None)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("more", "verdict"), [(1.0, "holds"), (1.04, "holds"), (1.06, "partly")]
)
def test_claim_holds_within_5_percent(more, verdict):
    found = [made_up(s, n, more if n == 8 else 1.0) for n in (8, 64) for s in range(4)]
    rows = tables.held(found, ""), tables.sent(found, "")
    claim = claims.redundancy(*rows, "here")
    assert claim.verdict == verdict
    assert claim.expected == claim.measured == 64
    assert "Bytes sent are those of 2Φ" in claim.why


def test_claim_is_refuted_where_a_stage_saves_nothing():
    found = [made_up(s and 1, 8)._replace(stage=s) for s in range(4)]
    rows = tables.held(found, ""), tables.sent(found, "")
    assert claims.redundancy(*rows, "").verdict == "refuted"


def test_one_byte_more_is_not_exact():
    found = [made_up(3, 4), made_up(3, 4, sent=1)]
    assert [row["exact"] for row in tables.sent(found, "")] == [True, False]
    found = [made_up(s, 8, sent=s) for s in range(4)]
    rows = tables.held(found, ""), tables.sent(found, "")
    assert "Bytes sent are not those of 2Φ" in claims.redundancy(*rows, "").why


@needs_compiler("h100")
def test_stage_3_for_h100_sends_what_formulas_say():
    with jax.numpy_rank_promotion("allow"):  # as when run by hand
        step = steps.step(steps.transformer(tiny=True), 3, 3, "h100")
    (row,) = tables.sent([step], "")
    assert row["exact"] and row["padding_bytes"] > 0
    assert step.held[formulas.PARAMETERS] < 4 * sum(step.leaves) / 2


@pytest.mark.parametrize("given", [{"most": 1}, {"epochs": 0}, {"devices": 3}], ids=str)
def test_options_that_do_not_fit(given):
    with pytest.raises(ValueError, match=r"--most got \d+, --epochs \d+ and --devices"):
        zero.Config(**given).check()
    with pytest.raises(ValueError, match="--least got 8 and --most 2"):
        zero.Config(least=8, most=2).check()


@pytest.mark.parametrize(
    ("least", "most", "numbers"),
    [(1, 64, [1, 2, 8, 64]), (2, 8, [2, 8]), (8, 4, [2]), (9, 63, [8])],
)
def test_programs_are_for_the_devices_asked_for(least, most, numbers):
    assert zero.Config(least=least).numbers(most) == numbers


@pytest.mark.parametrize(("counts", "drawn"), [([8], 1), ([2, 8], 2)], ids=str)
def test_memory_against_n_takes_several_n(counts, drawn):
    found = [made_up(stage, n) for n in counts for stage in range(4)]
    figures = zero.draw(found, "")
    titles = ["Memory of net by stage", "Memory of net against N"]
    assert [*figures] == [t.replace("net", found[0].model) for t in titles[:drawn]]
    for figure in figures.values():
        figure.draw_without_rendering()
    if drawn == 2:
        lines = figures[[*figures][1]].axes[0].get_lines()
        assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [counts] * 8
