"""The experiment `gpu`: what is read from programs for GPUs that are not here.

`scaling` runs here, too: it finds its programs compiled.
"""

import gzip
import json
import math

import jax
import pytest

from experiments import gpu
from experiments.harness import saving
from experiments.harness.result import Result
from experiments.parts import gpu_models, gpu_steps
from jaxdp import program, targets
from tests import experiments_contract as contract
from tests.compilers import needs_compiler

DEVICES = 8
MODEL = gpu_models.resnet50(tiny=True)
PHI = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(MODEL.params))
STATE = 4 * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(MODEL.model_state))


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A tiny run."""
    return contract.run("gpu", tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def scaled(ran, tmp_path_factory):
    """A tiny run of `scaling`, after that of `gpu`."""
    return contract.run("scaling", tmp_path_factory.mktemp("results"))


@pytest.fixture(scope="module")
def found(ran):
    """What a tiny run found."""
    return ran.found


def _faster(rows):
    """The verdict of CA5; what so small programs gain depends on the version of XLA."""
    gains = [
        100 - 100 * ring["step_ms"] / root["step_ms"]
        for root, ring in ((rows[0], rows[1]), (rows[3], rows[4]))
    ]
    assert min(gains) > 0
    return "holds" if all(15 <= gain <= 30 for gain in gains) else "partly"


@needs_compiler("h100")
def test_what_is_written(ran, scaled):
    contract.check(ran, {"CB1": "holds", "CA5": _faster(ran.found.tables["designs"])})
    contract.check(scaled, {"CA5": "refuted", "CA6": "partly"})


@needs_compiler("h100")
def test_rows_say_what_is_promised(found):
    rows = found.tables["designs"]
    models = ["ResNet-50"] * 3 + ["GPT-2 small"] * 3
    assert [row["model"] for row in rows] == models
    root, ring, native = rows[:3]
    for row in (root, ring, native):
        assert row["devices"] == DEVICES
        assert 0 <= row["exposed_fraction"] <= 1
        assert row["peak_bytes_per_device"] > 2 * PHI  # parameters and momentum
    # Loss, its weights and statistics ride along; chunks are padded to 8 elements.
    everything = PHI + STATE
    for row in (ring, native):
        sent = row["sent_bytes_per_device"] / (2 * 7 / 8)
        assert everything < sent < everything + 64
    assert everything < root["sent_bytes_per_device"] / 7 < everything + 64


@needs_compiler("h100")
def test_times_add_up(found):
    designs = found.tables["designs"]
    steps = [
        *found.tables["ResNet-50: one step"],
        *found.tables["GPT-2 small: one step"],
    ]
    for row, took in zip(designs, steps, strict=True):
        compute_ms = took["products_ms"] + took["other kernels_ms"]
        exposed_ms = row["exposed_fraction"] * took["communication_ms"]
        assert compute_ms + exposed_ms == pytest.approx(row["step_ms"])
        rows_per_s = DEVICES * 2 / row["step_ms"] * 1e3
        assert took["rows per s"] == pytest.approx(rows_per_s, rel=1e-3)
        assert took["rounds"] == (2 if row["design"] == gpu_steps.ROOT else 14)


@needs_compiler("h100")
def test_designs_are_kept_and_their_memory_is_named(found):
    for row in found.tables["ResNet-50: kept by the compiler"]:
        assert row["kept"] and row["findings"] == "none"
        assert row["buckets asked"] == row["buckets found"]
    for row in found.tables["ResNet-50: memory of a device"]:
        parts = [v for k, v in row.items() if k.endswith("_mb") and k != "all_mb"]
        assert sum(parts) == pytest.approx(row["all_mb"], abs=3)  # each is rounded


@needs_compiler("h100")
def test_traces_and_pictures_of_timelines(found):
    assert set(found.files) == {
        f"{model}-{design}.trace.json"
        for model in ("resnet-50", "gpt-2-small")
        for design in ("gathertoroot", "ringallreduce", "nativeallreduce-25-mb")
    }
    for text in found.files.values():
        assert json.loads(text)["traceEvents"]
    titles = [title for title in found.figures if title.startswith("Timeline")]
    assert len(titles) == 6
    assert {"Memory of ResNet-50", "Memory of GPT-2 small"} < set(found.figures)


@needs_compiler("h100")
def test_claims_rest_on_the_programs(found):
    claims = {claim.id: claim for claim in found.claims}
    assert claims["CB1"].expected == 1.75  # 2 (8 - 1) / 8
    root, ring, *_ = found.tables["designs"]
    gain = 100 * (1 - ring["step_ms"] / root["step_ms"])
    assert str(claims["CA5"].measured).startswith(f"{gain:.0f} and ")


def test_every_design_is_compiled_but_in_tiny_form():
    assert len(gpu_steps.designs(8)) == 7
    assert list(gpu_steps.designs(8, tiny=True)) == list(gpu_steps.TINY)


def test_sizes_of_the_models():
    resnet, transformer = gpu_models.resnet50(), gpu_models.transformer()
    for model, count in ((resnet, 25_557_032), (transformer, 124_439_808)):
        leaves = jax.tree.leaves(model.params)
        assert sum(math.prod(leaf.shape) for leaf in leaves) == count
        assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    assert (resnet.rows, transformer.rows) == (64, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, r"--devices got 1 and --hosts 1"),
        ({"devices": 8, "hosts": 3}, r"--devices got 8 and --hosts 3"),
        ({"rows": 0}, r"--rows got 0.*64 images or 8 sequences"),
    ],
    ids=["devices", "hosts", "rows"],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        gpu.Config(**options).check()


def test_a_missing_compiler_is_refused_with_its_remedy(monkeypatch):
    monkeypatch.setattr(targets, "missing", lambda target: f"{target}: pip install it")
    with pytest.raises(ValueError, match=r"--target got a100. a100: pip install it"):
        gpu.Config(target="a100").check()


def test_a_long_program_is_a_compressed_file_beside_the_page(monkeypatch, tmp_path):
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    monkeypatch.setattr(saving, "LONG", 100)
    found = Result(
        claims=[], programs={"a step": compiled}, files={"note.txt": "hello"}
    )
    document = saving.save(gpu, gpu.Config(), found, tmp_path / "gpu")
    assert document["artifacts"] == ["report.html", "a-step.hlo.txt.gz", "note.txt"]
    text = gzip.decompress((tmp_path / "gpu" / "a-step.hlo.txt.gz").read_bytes())
    assert program.analyze(text.decode()).devices == 1
    assert (tmp_path / "gpu" / "note.txt").read_text() == "hello"
    page = (tmp_path / "gpu" / "report.html").read_text()
    assert 'href="a-step.hlo.txt.gz"' in page and "HloModule" not in page
