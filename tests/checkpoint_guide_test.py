"""The code of docs/checkpoints.md does what the page says."""

import numpy as np

import jaxdp
import jaxdp.checkpoint
from tests.readme_test import README, code_of


def test_the_script_goes_on_with_another_design(tmp_path, monkeypatch):
    script, other_tools = code_of(README.parent / "docs" / "checkpoints.md")
    names = {}
    exec(script, names)
    train = names["train_to_the_end"]
    ring, zero = jaxdp.RingAllReduce(), jaxdp.Zero(stage=3)
    whole = train(tmp_path / "whole", jaxdp.data_mesh(8), ring)
    names["STEPS"] = 20
    train(tmp_path / "parts", jaxdp.data_mesh(8), ring)
    names["STEPS"] = 40
    resumed = train(tmp_path / "parts", jaxdp.data_mesh(4), zero)
    np.testing.assert_allclose(resumed["w"], whole["w"], rtol=1e-4)
    folder = tmp_path / "parts"
    assert sorted(path.name for path in folder.iterdir()) == [
        *("00000020", "00000030", "00000040")
    ]
    monkeypatch.chdir(tmp_path)
    names = {"folder": folder, "jaxdp": jaxdp}
    exec(other_tools, names)
    np.testing.assert_array_equal(names["arrays"]["params/w"], resumed["w"])
    assert (tmp_path / "model.safetensors").stat().st_size > 32
