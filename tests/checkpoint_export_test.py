"""Other tools read what was saved."""

import json

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxdp
import jaxdp.checkpoint
from tests.checkpoint_helpers import params, run, saved, training


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    train, state = training("zero3", 4)
    state, _ = run(train, state, [0])
    return saved(tmp_path_factory.mktemp("run"), train, state), train.params(state)


def read_safetensors(path):
    """By the format's description: length, header, data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    dtypes = {"F32": np.float32, "I32": np.int32, "BF16": jnp.bfloat16}
    found, end = {}, 0
    for name, about in header.items():
        start, stop = about["data_offsets"]
        assert start == end  # without holes
        end = stop
        values = np.frombuffer(data[start:stop], dtypes[about["dtype"]])
        found[name] = values.reshape(about["shape"])
    assert end == len(data)
    assert (8 + length) % 8 == 0
    return found


def test_parameters_as_files(folder, tmp_path):
    run_folder, wanted = folder
    jaxdp.checkpoint.export(run_folder, tmp_path / "w.npz")
    jaxdp.checkpoint.export(run_folder, tmp_path / "w.safetensors", step=1)
    for found in (
        dict(np.load(tmp_path / "w.npz")),
        read_safetensors(tmp_path / "w.safetensors"),
    ):
        assert {*found} == {"dense/k", "s", "w"}
        np.testing.assert_array_equal(found["dense/k"], wanted["dense"]["k"])
        np.testing.assert_array_equal(found["w"], wanted["w"])
        assert found["s"].shape == ()
    assert len([*tmp_path.iterdir()]) == 2


def test_everything_as_one_file(folder, tmp_path):
    run_folder, _ = folder
    jaxdp.checkpoint.export(run_folder, tmp_path / "all.safetensors", part=None)
    found = read_safetensors(tmp_path / "all.safetensors")
    loaded = jaxdp.checkpoint.load(run_folder)
    assert {*found} == {*loaded} > {"step", "params/w", "opt_state/0/nu/dense/k"}
    for name, values in loaded.items():
        np.testing.assert_array_equal(found[name], values)


def test_sixteen_bits_in_a_file(tmp_path):
    def none(params, batch):
        return (params.sum() * batch.mean()).astype(jnp.float32)

    train = jaxdp.data_parallel(none, optax.sgd(0.1), jaxdp.data_mesh(2))
    values = jnp.asarray([1.5, -0.0, 3e38], jnp.bfloat16)
    saved(tmp_path / "run", train, train.init(values))
    jaxdp.checkpoint.export(tmp_path / "run", tmp_path / "w.safetensors")
    found = read_safetensors(tmp_path / "w.safetensors")["params"]
    assert found.tobytes() == np.asarray(values).tobytes()
    with pytest.raises(TypeError, match=r"params \(bfloat16\).*w\.npz.*\.safetensors"):
        jaxdp.checkpoint.export(tmp_path / "run", tmp_path / "w.npz")


def test_mistakes(folder, tmp_path):
    run_folder, _ = folder
    with pytest.raises(ValueError, match=r"target w\.pt.*\.npz or \.safetensors"):
        jaxdp.checkpoint.export(run_folder, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"part='weights'.*'params'"):
        jaxdp.checkpoint.export(run_folder, tmp_path / "w.npz", part="weights")
    with pytest.raises(FileNotFoundError, match=r"no step 4.*\[1\]"):
        jaxdp.checkpoint.load(run_folder, step=4)
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        jaxdp.checkpoint.load(tmp_path)
    (tmp_path / "00000003").mkdir()
    with pytest.raises(ValueError, match=r"damaged.*manifest\.json is missing"):
        jaxdp.checkpoint.load(tmp_path)
    assert params()["w"].size == 10
