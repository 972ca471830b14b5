"""The scripts in docs/examples learn, and compute what one device does."""

import importlib.util
import pathlib

import jax
import numpy as np
import pytest

from tests.helpers import assert_replicas_bit_equal

FOLDER = pathlib.Path(__file__).parent.parent / "docs" / "examples"
SCRIPTS = ("char_transformer", "linen_resnet", "nnx_digits", "own_pmap")


@pytest.fixture(autouse=True)
def _as_users_have_it():
    """The tests' own setting refuses `[rows, columns] + [columns]`."""
    with jax.numpy_rank_promotion("allow"):
        yield


def script(name):
    """The script as a module; what stands under `if __name__` is not run."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def assert_same_losses(found, alone, steps, rtol):
    """Of the first steps: later ones amplify how sums were rounded."""
    assert min(len(found), len(alone)) >= steps
    np.testing.assert_allclose(found[:steps], alone[:steps], rtol=rtol)


def test_every_script_is_tested():
    assert {*SCRIPTS} == {path.stem for path in FOLDER.glob("*.py")}


def test_nnx_digits():
    found = script("nnx_digits").main(epochs=6)
    assert found["accuracy"] > 0.95
    assert_replicas_bit_equal(found["state"].params)
    alone = script("nnx_digits").main(epochs=1, devices=1)
    assert_same_losses(found["losses"], alone["losses"], 20, rtol=1e-4)


def test_linen_resnet():
    small = {"widths": (8, 16), "lr": 1e-2}
    found = script("linen_resnet").main(epochs=3, **small)
    assert found["accuracy"] > 0.9
    assert_replicas_bit_equal((found["state"].params, found["state"].model_state))
    alone = script("linen_resnet").main(epochs=1, **small, devices=1)
    assert_same_losses(found["losses"], alone["losses"], 6, rtol=1e-3)
    local = script("linen_resnet").main("local", epochs=2, **small)
    assert_replicas_bit_equal((local["state"].params, local["state"].model_state))
    assert local["losses"][0] > 2 and local["losses"][-1] < 0.8
    assert abs(local["losses"][0] - found["losses"][0]) > 2e-3  # of other statistics


def test_char_transformer(capsys):
    module = script("char_transformer")
    found = module.main(steps=50, blocks=2, devices=4)
    frequencies = np.bincount(module.load_text()[:, 0]) / len(module.load_text())
    kept = frequencies[frequencies > 0]
    entropy = -np.sum(kept * np.log(kept))  # who knows nothing but frequencies
    assert np.mean(found["losses"][-10:]) < entropy - 0.2
    assert_replicas_bit_equal(found["params"])
    assert found["written"].startswith("The for statement ")
    assert "step 50: loss 2." in capsys.readouterr().out
    alone = module.main(steps=12, blocks=2, precision="f32", devices=1)
    assert_same_losses(found["losses"], alone["losses"], 12, rtol=2e-3)  # 16 bits


def test_own_pmap():
    found = script("own_pmap").main(algorithm="halving_doubling")
    assert found["losses"][0] > 0.4 and found["losses"][-1] < 0.02
    for leaf in jax.tree.leaves(found["params"]):
        assert len({np.asarray(copy).tobytes() for copy in leaf}) == 1
    alone = script("own_pmap").main(steps=20, devices=1)
    assert_same_losses(found["losses"], alone["losses"], 20, rtol=1e-4)


def test_a_script_runs_as_one(monkeypatch, capsys):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")  # as the launcher does
    code = compile((FOLDER / "own_pmap.py").read_text(), "own_pmap.py", "exec")
    exec(code, {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("8 devices: loss 0.46")
