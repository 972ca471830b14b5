"""`gpu-check`: tiny on CPU devices; what it counts, predicts and leaves out."""

import json
import subprocess

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxdp
from experiments.gpu_check import __main__ as command
from experiments.gpu_check import predicted, rates, steps, suite
from experiments.gpu_check.clock import Clock
from experiments.harness import result
from jaxdp.precision import Precision
from jaxdp.prediction import Model
from tests.compilers import shape

MODEL = Model(
    loss_fn=lambda params, batch: (jnp.mean((batch @ params - 1) ** 2), jaxdp.Aux()),
    optimizer=optax.sgd(0.1),
    params=shape(4, 3),
    batch=shape(8, 4),
    precision=Precision("f32"),
    name="linear",
)
PASSED = {"files": 1, "passed": 7, "failed": 0, "error": 0, "skipped": 0, "why": ""}


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suite, "run", lambda tiny, limit_s: dict(PASSED))
        options = ["--platform", "cpu", "--tiny", "--output", str(folder)]
        assert command.main(options) == 0
    text = (folder / "gpu-check" / "result.json").read_text(encoding="utf-8")
    return json.loads(text)


def test_the_document_is_valid(document):
    assert result.validate(document)["experiment"] == "gpu-check"
    assert {claim["id"] for claim in document["claims"]} == {"designs", "predicted"}
    assert document["tables"]["tests"] == [PASSED]


def test_rates_and_times(document):
    tables = document["tables"]
    assert [row["unit"] for row in tables["rates"]] == [*["TFLOP/s"] * 3, "TB/s"]
    product = tables["rates"][0]
    seconds = product["median_ms"] / 1e3
    assert product["rate"] == pytest.approx(2 * 128**3 / seconds / 1e12)
    models = {row["model"]: row for row in tables["step_times"]}
    assert set(models) == {"GPT-2 small", "ResNet-50"}
    for row in tables["step_times"]:
        plain = next(
            other["median_ms"]
            for other in tables["step_times"]
            if (other["model"], other["step"]) == (row["model"], steps.PLAIN)
        )
        assert row["of_plain_jax"] == pytest.approx(row["median_ms"] / plain)


def test_predictions_of_an_unknown_device_use_measured_rates(document):
    tables = document["tables"]
    assert {row["figures"] for row in tables["predicted"]} == {predicted.MEASURED}
    assert len(tables["predicted"]) == len(tables["step_times"]) == 4
    for row in tables["predicted"]:
        ratio = row["measured_ms"] / row["predicted_ms"]
        assert row["measured_of_predicted"] == pytest.approx(ratio)


def test_a_known_device_is_predicted_from_its_data_sheet_too(monkeypatch):
    class Device:
        device_kind = "NVIDIA H200"

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    every = predicted.hardwares({"bf16": 7e14, "f32": 4e13}, 4e12)
    assert every[predicted.DATA_SHEET].flops_of("bf16") == pytest.approx(494.7e12)
    assert every[predicted.MEASURED].flops_of("bf16") == 7e14
    assert every[predicted.MEASURED].memory_bytes_per_s == 4e12
    assert every[predicted.MEASURED].name == "NVIDIA H200"


def test_rates_by_type():
    names = [*rates.PRODUCTS, rates.COPY]
    rows = [
        {"operation": n, "rate": r} for n, r in zip(names, (8, 4, 2, 3), strict=True)
    ]
    found = rates.flops_per_s(rows)
    assert found == {"bf16": 8e12, "tf32": 4e12, "f32": 2e12, "f16": 8e12}
    assert rates.bytes_per_s(rows) == 3e12


def test_the_plain_step_is_what_a_design_computes():
    given = [steps.filled(x) for x in (MODEL.params, MODEL.model_state, MODEL.batch)]
    losses = []
    mesh = jaxdp.data_mesh(1)
    for make in (steps.plain(MODEL), steps.of(MODEL, jaxdp.RingAllReduce(), mesh)):
        _, call = make(*given)
        values = [call() for _ in range(3)]
        losses.append([v["loss"] if isinstance(v, dict) else v for v in values])
    plain, design = map(jnp.array, losses)
    assert jnp.allclose(plain, design, rtol=1e-5, atol=0)
    assert plain[2] != plain[0]  # it trains


def test_designs_are_left_out_when_time_runs_short(capsys):
    designs = {"ring": jaxdp.RingAllReduce()}
    found = steps.measure(MODEL, designs, 2, Clock(30.0), keep_s=31.0)
    assert [row["step"] for row in found.rows] == [steps.PLAIN]
    assert "ring: left out, too little time" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ("...\n21 passed in 3.2s\n", {"passed": 21}),
        ("F\n1 failed, 20 passed in 3s", {"passed": 20, "failed": 1}),
        ("3 skipped, 2 errors in 1s", {"skipped": 3, "error": 2}),
        ("", {}),
    ],
)
def test_counts_of_pytest(output, found):
    assert suite.counted(output) == found


@pytest.mark.parametrize("name", suite.FILES)
def test_the_tests_it_runs_exist(name):
    assert (suite.ROOT / "tests" / f"{name}_test.py").is_file()


def test_tests_run_in_a_process_of_their_own():
    row = suite.run(tiny=True, limit_s=120)
    assert row["why"] == ""
    assert row["passed"] > 10
    assert row["failed"] == row["error"] == 0


def test_tests_that_cannot_run_say_why(monkeypatch):
    monkeypatch.setattr(suite, "NEEDED", ("pytest", "no_such_package"))
    assert suite.run(True, 1)["why"] == "not run: no_such_package not installed"
    monkeypatch.setattr(suite, "NEEDED", ())

    def late(*args, timeout, **keywords):
        raise subprocess.TimeoutExpired(args, timeout)

    monkeypatch.setattr(suite.subprocess, "run", late)
    assert suite.run(True, 12.0)["why"] == "stopped after 12 s"


def test_a_failed_test_fails_the_check(monkeypatch, tmp_path):
    failed = PASSED | {"failed": 1}
    table = {"of_plain_jax": 1.5, "step": "s", "model": "m", "median_ms": 2.0}
    guess = {"measured_of_predicted": 0.4, "step": "s", "model": "m", "figures": "f"}
    guess |= {"predicted_ms": 5.0, "measured_ms": 2.0}
    monkeypatch.setattr(
        *(command, "measure"),
        lambda tiny, clock: {
            "step_times": [table | {"label": "l"}],
            "predicted": [guess],
            "tests": [failed],
        },
    )
    assert command.main(["--platform", "cpu", "--output", str(tmp_path)]) == 1
    document = json.loads((tmp_path / "gpu-check" / "result.json").read_text())
    assert [claim["verdict"] for claim in document["claims"]] == ["refuted"] * 2


def test_gpus_that_are_not_there(capsys):
    assert command.main(["--platform", "gpu"]) == 2
    assert "--platform gpu" in capsys.readouterr().err
