"""Every experiment runs in tiny form, and what it writes has the promised format."""

import functools
import importlib
import inspect
import json
import math
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import jaxdp
from experiments import __main__ as experiments
from experiments import network
from experiments.harness import (
    command,
    config,
    devices,
    fast,
    registry,
    result,
    show,
    timing,
    wording,
)
from experiments.parts import ownership
from jaxdp import algorithms
from jaxdp.schedule import holdings
from tests import experiments_contract as contract

NAMES = [
    *("algorithms", "amp", "bandwidth", "claims", "compare", "compression", "ddp"),
    *("dp", "errors", "faults", "gpu", "memory", "overlap", "overlap_delay"),
    *("pipeline", "ps", "resume", "ring", "scaling", "staleness", "traffic"),
    *("uneven", "zero"),
]
TIMED = [
    "amp",
    "compare",
    "ddp",
    "dp",
    "overlap_delay",
    "ps",
    "ring",
]  # the others time nothing
CLAIMS = {  # of those that run here
    "amp": {"CA8": "partly", "A6": "holds"},
    "bandwidth": {"CB2": "partly", "CB4": "partly"},  # too small for more
    "compare": {"CB7": "holds"},
    "ddp": {"CA5": "partly"},
    "dp": {"CA1": "partly", "CA10": "holds", "CA11": "refuted", "CA16": "partly"},
    "errors": {
        "CA2": "refuted",
        "CA9": "refuted",
        "CA12": "partly",
        "CA13": "partly",
        "CA14": "refuted",
    },
    "faults": {},
    "overlap_delay": {"CB4": "partly"},
    "ps": {"CB2": "holds", "CB6": "holds"},
    "ring": {"CB1": "holds", "CB3": "holds"},
    "traffic": {"CB1": "holds", "CB2": "holds", "CB6": "holds"},
}


@pytest.fixture(scope="module")
def run_tiny(tmp_path_factory):
    """Runs an experiment in tiny form, once; gives its folder and its document."""
    output = tmp_path_factory.mktemp("results")

    @functools.cache
    def run(name):
        if name == "bandwidth" and network.missing():
            pytest.skip(network.missing())
        ran = contract.run(name, output)
        return ran.folder, ran.document

    return run


every_experiment = pytest.mark.parametrize("name", NAMES)
every_run = pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in contract.ELSEWHERE]
)


@every_run
def test_result_has_the_promised_format(run_tiny, name):
    contract.check_format(*run_tiny(name))


@every_run
def test_claims_have_their_verdicts(run_tiny, name):
    contract.check_claims(run_tiny(name)[1], CLAIMS[name])


@every_run
def test_artifacts_exist(run_tiny, name):
    contract.check_artifacts(*run_tiny(name))


@every_run
def test_report_needs_no_other_file_and_shows_everything(run_tiny, name):
    contract.check_report(*run_tiny(name))


@pytest.mark.parametrize("name", TIMED)
def test_timings_on_forced_devices_are_labelled(run_tiny, name):
    contract.check_labels(run_tiny(name)[1])


@pytest.mark.parametrize(("name", "module"), contract.ELSEWHERE.items())
def test_runs_elsewhere_are_checked_there(name, module):
    """A test of this name asks for all checks, of a run of this experiment."""
    own = importlib.import_module(f"tests.{module}")
    source = inspect.getsource(own.test_what_is_written)
    (fixture,) = re.findall(
        rf'def (\w+)\([^)]*\):(?:(?!\ndef ).)*contract\.run\(\s*"{name}", ',
        inspect.getsource(own),
        re.DOTALL,
    )
    assert f"contract.check({fixture}, " in source


def test_runs_from_the_command_line_and_says_so(tmp_path):
    options = ["ring", "--tiny", "--devices", "3", "--output", str(tmp_path)]
    ran = subprocess.run(
        [sys.executable, "-m", "experiments", *options, "--platform", "cpu"],
        capture_output=True,
        text=True,
        check=False,
        cwd=registry.FOLDER.parent,
    )
    assert ran.returncode == 0, ran.stderr
    assert "3 forced host devices" in ran.stdout
    document = json.loads((tmp_path / "ring" / "result.json").read_text())
    (claim,) = [claim for claim in document["claims"] if claim["id"] == "CB1"]
    assert claim["measured"] == 4 / 3
    assert document["environment"]["devices"] == 3


@pytest.mark.parametrize("arguments", [[], ["--list"], ["--help"]], ids=str)
def test_lists_every_experiment_with_its_question(capsys, arguments):
    assert experiments.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == NAMES == registry.names()
    assert all(line.endswith("?") for line in lines)


def test_unknown_name_lists_the_names_and_the_nearest(capsys):
    assert experiments.main(["rign"]) == 2
    message = capsys.readouterr().err
    assert "no experiment 'rign'" in message
    assert ", ".join(NAMES) in message
    assert "Did you mean 'ring'?" in message
    assert experiments.main(["harness"]) == 2  # a folder, and no experiment
    capsys.readouterr()
    assert experiments.main(["xyz"]) == 2
    assert "Choose one of these" in capsys.readouterr().err


@every_experiment
def test_docstring_says_how_to_run_and_what_to_expect(name):
    text = importlib.import_module(f"experiments.{name}").__doc__ or ""
    for word in (
        "Command:",
        f"EXP={name}",
        "Hardware:",
        "Runtime:",
        "Expected numbers",
    ):
        assert word in text


@pytest.mark.parametrize(
    ("count", "platform", "message"),
    [
        (99, "cpu", "got 99 .*JAX has 8.*at most 8"),
        (1, "gpu", "got 1 with --platform gpu.*JAX has 0.*--platform cpu"),
    ],
    ids=["too many", "no gpu"],
)
def test_devices_that_are_not_there(count, platform, message):
    jax.devices()  # once JAX has started, it takes no other number
    with pytest.raises(ValueError, match=message):
        devices.start(count, platform)


@pytest.mark.parametrize("tiny", [False, True])
def test_tiny_runs_alone_compile_quickly(monkeypatch, tiny):
    given = "--xla_cpu_max_isa=AVX"
    monkeypatch.setenv("XLA_FLAGS", given)
    for _ in range(2):
        config.Config(platform="cpu", tiny=tiny).start()
    assert os.environ["XLA_FLAGS"] == (f"{fast.FLAGS} {given}" if tiny else given)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ring", "--devices 0", "--devices got 0.*at least 1 device"),
        ("ring", "--devices 99", "--devices got 99.*JAX has 8"),
        ("ring", "--size-mb 0", r"--size-mb got 0\.0.*at least 0\.01 MiB"),
        ("ring", "--repeats 1", "--repeats got 1.*at least 2"),
        ("dp", "--batch-size 66", "got 66 for 4 devices.*--batch-size 68"),
        ("compare", "--batch-size 0", "got 0 for 8 devices.*--batch-size 8"),
        ("compare", "--batch-size 1600", "1600.*there are 1437 training images"),
        ("compare", "--epochs 0", "--epochs got 0.*at least one step"),
        ("ps", "--devices 2", "--devices got 2.*at least 4"),
        ("ps", "--gbit-per-s 0", r"--gbit-per-s 0\.0.*bandwidth above 0"),
        ("traffic", "--most 2", "--devices got 8 and --most 2.*at least 4"),
        ("scaling", "--devices 4", "--devices got 4.*a host of 8"),
    ],
)
def test_options_that_do_not_fit_end_the_command(capsys, name, options, message):
    module = importlib.import_module(f"experiments.{name}")
    assert command.run(module, [*options.split(), "--platform", "cpu"]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_counts_gpus_in_a_process_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "GPU_FILES", (str(tmp_path / "none*"),))
    assert devices.count_gpus() == 0
    monkeypatch.setattr(devices, "GPU_FILES", (str(tmp_path),))
    monkeypatch.setattr(devices, "COUNT_GPUS", "print(4)")
    assert devices.count_gpus() == 4
    monkeypatch.setattr(devices, "COUNT_GPUS", "raise RuntimeError")
    assert devices.count_gpus() == 0


def _document(**changes):
    claim = {
        "id": "CX",
        "claim": "it moves",
        "expected": 1,
        "measured": 1.0,
        "unit": "",
        "verdict": "holds",
        "why": "seen",
    }
    document = {
        "experiment": "x",
        "question": "?",
        "config": {},
        "environment": result.environment(1),
        "claims": [claim],
        "tables": {"t": [{"a": 1}]},
        "artifacts": [],
    }
    return document | changes


def test_malformed_results_are_refused(tmp_path):
    result.write(tmp_path / "good.json", _document())
    (claim,) = _document()["claims"]
    wrong = {
        "verdict 'maybe'.*holds, partly, refuted": [claim | {"verdict": "maybe"}],
        "claim.why is missing": [{k: v for k, v in claim.items() if k != "why"}],
        "claim.measured is None": [claim | {"measured": None}],
        "claim.note is not part": [claim | {"note": ""}],
    }
    for message, claims in wrong.items():
        with pytest.raises(ValueError, match=message):
            result.validate(_document(claims=claims))
    with pytest.raises(ValueError, match=r"environment\.date is missing"):
        result.validate(_document(environment={"jax": "", "platform": ""}))
    with pytest.raises(ValueError, match="JSON compliant"):
        result.write(tmp_path / "nan.json", _document(tables={"t": [{"a": math.nan}]}))


def test_variants_take_turns_after_warming_up():
    calls = []
    variants = {name: lambda name=name: calls.append(name) for name in "ab"}
    times = timing.interleaved(variants, repeats=3)
    warm_up = ["a"] * timing.WARM_UP + ["b"] * timing.WARM_UP
    assert calls == [*warm_up, "a", "b", "b", "a", "a", "b"]
    for time in times.values():
        assert 0 <= time.low_ms <= time.median_ms <= time.high_ms


@pytest.mark.parametrize(
    ("given", "written"),
    [(1234567, "1,234,567"), (0.000123456, "0.0001235"), (True, "yes"), (None, "")],
)
def test_values_in_words(given, written):
    assert wording.value(given) == written


def test_names_in_words():
    assert wording.heading("sent_bytes") == "sent (bytes)"
    assert wording.heading("walk_through") == "walk through"
    assert wording.slug("Step time, by design") == "step-time-by-design"


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_executed_ownership_is_that_of_the_schedule(count):
    schedule = algorithms.ring_reduce_scatter(count)
    left = ownership.executed(schedule, jaxdp.data_mesh(count))
    *_, foretold = holdings(schedule)
    assert left == foretold
    assert ownership.complete_chunks(left) == [[device] for device in range(count)]


def test_a_step_moves_what_the_docstring_says(run_tiny):
    _, document = run_tiny("dp")
    moved = {row["stage"]: row for row in document["tables"]["moved_in_a_step"]}
    phi, images, outputs = 4 * 618, 4 * 4 * 32 * 32 * 3, 4 * 4 * 10  # tiny: 4 rows
    assert {stage: row["moved_bytes"] for stage, row in moved.items()} == {
        "2 replicate": 3 * phi,
        "3 scatter": images,
        "5 gather": 3 * outputs // 4,
        "7 scatter back": 3 * outputs // 4,
        "8 reduce": 3 * phi,
    }
    assert all(row["expected_bytes"] == row["moved_bytes"] for row in moved.values())
    stages = document["tables"]["stages"]
    assert sum(row["moved_bytes"] for row in stages) == 4 * 4 + sum(  # labels too
        row["moved_bytes"] for row in moved.values()
    )
    differences = document["tables"]["same_step_as_one_device"]
    assert max(row["relative difference"] for row in differences) < 1e-5


def test_gradient_norms_differ_before_the_reduction_only(run_tiny):
    _, document = run_tiny("dp")
    norms = document["tables"]["gradient_norms"]
    assert [row["device"] for row in norms] == [f"cpu:{i}" for i in range(4)]
    assert len({row["before the reduction"] for row in norms}) == 4
    (everywhere,) = {row["after an all-reduce"] for row in norms}
    root, *others = (row["after gather-to-root"] for row in norms)
    np.testing.assert_allclose(float(root), everywhere, rtol=1e-6)
    assert others == ["no gradient"] * 3


def test_designs_stay_close_to_one_device(run_tiny):
    _, document = run_tiny("compare")
    rows = {row["run"]: row for row in document["tables"]["runs"]}
    assert max(row["apart, first 20 steps"] for row in rows.values()) < 1e-5
    assert {row["of them other bits"] for row in rows.values()} == {0}
    costs = {row["design"]: row for row in document["tables"]["designs"]}
    assert {name: row["rounds"] for name, row in costs.items()} == {
        "single device": 0,
        "gather to root": 2,
        "ring": 14,
        "native": 14,
        "Zero(3)": 21,
    }
    # 4 bytes of loss beside Φ
    np.testing.assert_allclose(costs["gather to root"]["busiest (Φ)"], 7, rtol=1e-4)
    np.testing.assert_allclose(costs["ring"]["busiest (Φ)"], 1.75, rtol=1e-3)


def test_links_carry_what_programs_send(run_tiny):
    _, document = run_tiny("bandwidth")
    times = {row["algorithm"]: row for row in document["tables"]["all_reduce"]}
    assert {"star", "2 servers", "recursive doubling", "ring"} < set(times)
    for row in times.values():
        assert (row["devices"], row["size_mb"]) == (2, 1)
        np.testing.assert_allclose(row["ratio"], row["time_ms"] / row["bound_ms"])
        assert row["ratio"] > 0.9  # a full bucket carries 0.08 of it at once
    # 2**20 bytes, twice for the star, at 50 bytes a microsecond.
    np.testing.assert_allclose(times["ring"]["bound_ms"], 2**20 / 50e3)
    np.testing.assert_allclose(times["star"]["bound_ms"], 2 * 2**20 / 50e3)
    for row in document["tables"]["bytes"]:
        assert row["program_bytes"] in (2**20, None)  # of PyTorch nobody knows
        for counted in (row["sent_bytes"], row["received_bytes"]):
            assert 1.04 < counted / 2**20 < 1.08  # headers, and signs of life
    for row in document["tables"]["training_on_2_hosts"]:
        alone = row["compute alone_ms"] + row["communication alone_ms"]
        np.testing.assert_allclose(row["hidden_ms"], alone - row["step_ms"])


def test_servers_share_the_load_to_the_byte(run_tiny):
    _, document = run_tiny("ps")
    served = document["tables"]["served_by_one_server"]
    assert {row["as expected to the byte"] for row in served} == {True}
    found = {
        (row["devices"], row["servers"], row["dedicated"]): (row["in/Φ"], row["out/Φ"])
        for row in served
    }
    assert found[8, 1, False] == (7, 7)
    assert found[8, 4, False] == (7 / 4, 7 / 4)
    assert found[8, 4, True] == (1, 7 / 4)
    trained = document["tables"]["training"]
    assert {row["copies that differ"] for row in trained} == {0}
    assert max(row["apart from one device"] for row in trained) < 1e-5


def test_predicted_times_of_servers_and_ring(run_tiny):
    """8 devices, 20 µs a round, 0.8 ns a byte."""
    _, document = run_tiny("ps")
    rows = {row["gradients"]: row for row in document["tables"]["predicted_times"]}
    mib = 2**20
    np.testing.assert_allclose(rows["1,024 KiB"]["1 server_ms"], 0.04 + 14 * mib * 8e-7)
    np.testing.assert_allclose(
        rows["1,024 KiB"]["4 servers_ms"], 0.04 + 14 / 4 * mib * 8e-7
    )
    np.testing.assert_allclose(
        rows["1,024 KiB"]["ring_ms"], 14 * 0.02 + 14 / 8 * mib * 8e-7
    )


def test_a_killed_training_comes_back_to_the_same_bits(run_tiny):
    _, document = run_tiny("faults")
    (killed,) = document["tables"]["kills"]
    assert killed["identical"] and killed["named"] == killed["rank"]
    assert 0 <= killed["steps lost"] <= 4  # since the last complete save
    (summary,) = document["tables"]["summary"]
    assert summary["steps compared"] >= 12 - killed["last step"] > 0
    assert summary["same parameters at the end"] and summary["named as killed"] == 1
    assert summary["hangs"] == summary["orphans"] == 0


def test_few_rows_of_many_columns_are_shown_turned(capsys, monkeypatch):
    rows = [
        {
            "device": f"cpu:{i}",
            **{f"kind {k} in full_mb": 1.5 * k + i for k in range(9)},
        }
        for i in range(2)
    ]
    for width, first in ((200, "device"), (60, "device")):
        monkeypatch.setattr(show.console, "_width", width)
        show.table("memory", rows)
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        header = next(line for line in lines if line and line[0] == first)
        turned = header == ["device", "cpu:0", "cpu:1"]
        assert turned == (width == 60)
    assert ["kind", "8", "in", "full", "(MiB)", "12", "13"] in lines


def test_rows_that_the_first_column_does_not_tell_apart_stay_rows(capsys, monkeypatch):
    monkeypatch.setattr(show.console, "_width", 60)
    wide = {f"kind {k} in full_mb": k for k in range(9)}
    rows = [{"model": "net", "way": way} | wide for way in ("early", "late")]
    show.table("ways", rows)
    shown = capsys.readouterr().out
    assert "early" in shown and "late" in shown
