"""The experiment `errors`: what its checks accept and refuse, and its references."""

import re
import sys

import jax
import numpy as np
import pytest

from experiments import errors
from experiments.harness import command
from experiments.parts import (
    allowed,
    beliefs,
    mistakes,
    pytorch,
    recurrent,
)
from tests.helpers import needs_torch

COUNTS = {"devices": 7, "inputs": 6, "shapes": 5, "models": 6, "steps": 4}


@pytest.fixture
def without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)


@pytest.mark.usefixtures("without_torch")
@pytest.mark.parametrize("count", [2, 8])
@pytest.mark.parametrize("group", errors.MISTAKES)
def test_every_mistake_is_refused_with_cause_and_fix(group, count):
    on = mistakes.Setting(jax.devices()[:count])
    rows = mistakes.provoke(errors.MISTAKES[group](on))
    assert len(rows) == COUNTS[group]
    assert [row for row in rows if not (row["cause"] and row["fix"])] == []


def test_the_docstring_counts_the_mistakes():
    (count,) = re.findall(r"mistakes +(\d+), each refused", errors.__doc__ or "")
    assert int(count) == sum(COUNTS.values())


def _raise(error):
    raise error


GOOD = ValueError("got 3 rows on cpu:1. Use 4.")


@pytest.mark.parametrize(
    ("make", "raises", "message", "cause", "fix"),
    [
        (lambda: _raise(GOOD), "ValueError", str(GOOD), True, True),
        (lambda: None, "nothing", "", False, False),
        (lambda: _raise(TypeError(str(GOOD))), "TypeError", str(GOOD), False, True),
        (
            lambda: _raise(ValueError("3. Use 4.")),
            "ValueError",
            "3. Use 4.",
            False,
            True,
        ),
        (
            lambda: _raise(ValueError("3 rows, cpu:1")),
            "ValueError",
            "3 rows, cpu:1",
            True,
            False,
        ),
    ],
    ids=["good", "nothing raised", "other type", "no cause", "no fix"],
)
def test_a_message_must_say_enough(make, raises, message, cause, fix):
    given = mistakes.Mistake("m", make, ValueError, ("3", "cpu:1"), "Use 4")
    (row,) = mistakes.provoke([given])
    assert row == {
        "label": mistakes.SAYS,
        "mistake": "m",
        "raises": raises,
        "message": message,
        "cause": cause,
        "fix": fix,
    }


def test_what_is_allowed_is_right():
    rows = allowed.situations(mistakes.Setting(jax.devices()[:3]))
    assert len(rows) == 6
    assert all(row["right"] for row in rows)
    assert rows[0]["jaxdp"] == "runs 2 replicas"
    assert "replica 1 on cpu:1 (rows 4 to 7), operation log" in rows[-1]["jaxdp"]


@pytest.mark.usefixtures("without_torch")
def test_uneven_batches():
    rows, programs = beliefs.uneven(jax.devices()[:4], [66, 9])
    assert [row["slices"] for row in rows] == ["17, 17, 17, 15", "3, 3, 3"]
    assert [row["rows out"] for row in rows] == [66, 9]
    assert set(programs.found) == {f"Forward of {n} rows" for n in (17, 15, 3)}
    for row in rows:
        assert row["torch.chunk"] == pytorch.ABSENT
        assert max(row["output apart"], row["gradient apart"]) < 1e-6
    claim = errors.claim_divisible(rows)
    assert (claim.verdict, claim.measured) == ("refuted", 66)
    for change in ({"rows out": 60}, {"gradient apart": 0.1}, {"output apart": 0.1}):
        assert errors.claim_divisible([{**rows[0], **change}]).verdict == "holds"
    figure = errors.plot_slices(rows, [f"cpu:{i}" for i in range(4)])
    widths = [17 / 66, 17 / 66, 17 / 66, 15 / 66, 1 / 3, 1 / 3, 1 / 3]
    boxes = [bar.get_bbox() for each in figure.axes[0].containers for bar in each]
    np.testing.assert_allclose([box.width for box in boxes], widths)
    starts = [0, 17 / 66, 34 / 66, 51 / 66, 0, 1 / 3, 2 / 3]
    np.testing.assert_allclose([box.x0 for box in boxes], starts, atol=1e-12)
    drawn = [text.get_text() for text in figure.axes[0].texts]
    assert drawn[1:][3] == "15\ncpu:3"


def test_the_gradient_on_one_device_is_that_of_the_network():
    params, x = beliefs.start(5)
    hidden = np.tanh(x @ params["w"])
    output = hidden @ params["v"]
    expected = {"v": hidden.T @ (2 * output / output.size)}
    back = (2 * output / output.size) @ params["v"].T * (1 - hidden**2)
    expected["w"] = x.T @ back
    found = beliefs.on_one_device(params, x)
    for name, leaf in expected.items():
        np.testing.assert_allclose(found[name], leaf, rtol=1e-4, atol=1e-6)


def test_output_devices():
    rows = beliefs.output_devices(jax.devices()[1:4])
    assert [row["output_device"] for row in rows] == [1, 2, 3]
    assert [row["lies on"] for row in rows] == ["1", "2", "3"]
    assert [row["in device_ids"] for row in rows] == [True, True, False]
    claim = errors.claim_output_device(rows)
    assert (claim.verdict, claim.expected, claim.measured) == ("refuted", "1, or 2", 3)
    for change in ({"lies on": "0"}, {"other bits": 1}):
        altered = errors.claim_output_device([rows[0], {**rows[1], **change}, rows[2]])
        assert (altered.verdict, altered.measured) == ("partly", 2)


def test_replicate_alone():
    rows = beliefs.replicate_alone(jax.devices()[:3])
    found = {row["what"]: row for row in rows}
    own = [found[f"replica {i}'s own gradient"] for i in range(3)]
    assert [row["on"] for row in own] == ["cpu:0", "cpu:1", "cpu:2"]
    assert all(0.01 < row["apart"] < 2 for row in own)
    assert found["the sum of these"]["apart"] < 1e-6
    through = found["the original's gradient, through replicate"]
    assert through["apart"] < 1e-6
    assert through["on"] == "cpu:0"
    before = found["a copy from before an update"]
    assert before["apart"] > 1e-3
    assert found["a copy from after the update"]["apart"] == 0
    assert errors.claim_replicate(rows).verdict == "partly"
    assert errors.claim_replicate(rows).measured == through["apart"]
    for what, apart in ((through["what"], 1.0), (before["what"], 0.0)):
        altered = [{**r, "apart": apart} if r["what"] == what else r for r in rows]
        assert errors.claim_replicate(altered).verdict == "holds"


def test_attributes():
    rows = beliefs.attributes(jax.devices()[:3])
    assert [row["replicas right"] for row in rows] == [3, 3, 3, 0]
    assert re.search(r"captured .*\(1, 2\) on cpu:0", rows[-1]["message"])
    claim = errors.claim_attributes(rows, None)
    assert (claim.verdict, claim.measured) == ("partly", 3)
    assert pytorch.ABSENT in claim.why
    assert "3 of 3 replicas hold the very same" in errors.claim_attributes(rows, 3).why
    for i, change in enumerate([{"replicas right": 2}] * 3 + [{"message": "none"}]):
        altered = [*rows]
        altered[i] = {**rows[i], **change}
        assert errors.claim_attributes(altered, None).verdict == "refuted"


def test_recurrent_network_is_a_gru():
    given = recurrent.problem(times=2, rows=3)
    (of_x, of_h), (x, _), hidden = given
    outputs, states = np.asarray(x, np.float64), []

    def sigmoid(z):
        return 1 / (1 + np.exp(-z))

    for layer in range(2):
        h, seen = hidden[layer], []
        for now in outputs:
            update, reset = (
                sigmoid(now @ of_x[layer, k] + h @ of_h[layer, k]) for k in (0, 1)
            )
            new = np.tanh(now @ of_x[layer, 2] + (reset * h) @ of_h[layer, 2])
            h = (1 - update) * h + update * new
            seen.append(h)
        outputs = np.stack(seen)
        states.append(h)
    found = recurrent.gru(given.params, x, hidden)
    for leaf, expected in zip(found, (outputs, np.stack(states)), strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-5, atol=1e-6)
    first = recurrent.batch_first(given.params, x.swapaxes(0, 1), hidden.swapaxes(0, 1))
    for leaf, other in zip(first, found, strict=True):
        np.testing.assert_array_equal(leaf, other.swapaxes(0, 1))


def test_the_state_goes_from_window_to_window():
    given = recurrent.problem(times=2, rows=3)
    run = jax.jit(recurrent.gru)
    last, (_, of_state) = recurrent.through(run, *given)
    whole = np.concatenate(given.windows)
    np.testing.assert_allclose(last, run(given.params, whole, given.hidden)[1], 1e-6)
    assert np.abs(of_state).min(axis=(1, 2)).all()  # in both layers


def test_carried_state():
    rows = recurrent.compare(recurrent.problem(times=2, rows=5), [1, 0])
    assert [row["dim"] for row in rows] == [1, 0, 0]
    assert [row["state"] for row in rows] == ["(2, 5, 3)", "(5, 2, 3)", "(2, 5, 3)"]
    assert [row["refused"] for row in rows] == [False, False, True]
    assert all(row[name] < 1e-5 for row in rows[:2] for name in recurrent.APART)
    claim = errors.claim_recurrent(rows)
    assert claim.verdict == "refuted"
    assert claim.measured == max(row[recurrent.APART[-1]] for row in rows[:2])
    for name in recurrent.APART:
        rows_apart = [rows[0], {**rows[1], name: 0.1}, rows[2]]
        assert errors.claim_recurrent(rows_apart).verdict == "holds"


def test_other_errors_of_a_recurrent_network_are_not_taken_for_the_refusal():
    with pytest.raises(ValueError, match="got 0 rows"):
        recurrent.compare(recurrent.problem(times=2, rows=0), [0, 1])


@needs_torch
@pytest.mark.torch
def test_pieces_of_pytorch():
    assert pytorch.chunks(66, 4) == "17, 17, 17, 15"
    assert pytorch.chunks(9, 4) == "3, 3, 3"
    assert pytorch.sharing(3) == 3
    on = mistakes.Setting(jax.devices()[:2])
    rows = mistakes.provoke(errors.MISTAKES["inputs"](on))
    (row,) = [row for row in rows if row["mistake"] == "a PyTorch tensor"]
    assert "torch.Tensor" in row["message"]
    assert row["cause"] and row["fix"]


@pytest.mark.usefixtures("without_torch")
def test_without_pytorch():
    assert pytorch.library() is None
    assert pytorch.chunks(66, 4) == pytorch.ABSENT
    assert pytorch.sharing(4) is None
    values = np.arange(3.0)
    stand_in = pytorch.tensor(values)
    assert isinstance(stand_in, pytorch.Tensor)
    np.testing.assert_array_equal(np.asarray(stand_in), values)


@pytest.mark.parametrize("options", ["--devices 1", "--times 0"])
def test_options_that_do_not_fit(capsys, options):
    assert command.run(errors, [*options.split(), "--platform", "cpu"]) == 2
    message = capsys.readouterr().err
    assert "got " + options.split()[1] in message or options in message
    assert re.search(r"at least 2 of them.*--devices 4 --times 20", message)
