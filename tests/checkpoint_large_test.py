"""Large states: a file for each array, read straight into memory for the device."""

import json

import jax
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.checkpoint import arrays, manifest
from tests.checkpoint_helpers import assert_same, restored, saved


def wide_fn(params, batch):
    """Gradients that differ from element to element."""
    return sum((x * x * batch.mean()).sum() for x in jax.tree.leaves(params)) + 0.0


@pytest.fixture
def large(tmp_path, monkeypatch):
    """A saved state of 3.6 MB that counts as large, its training, and its content."""
    monkeypatch.setattr(arrays, "LARGE", 1 << 20)
    train = jaxdp.data_parallel(wide_fn, optax.adam(0.1), jaxdp.data_mesh(2))
    random = np.random.default_rng(0)
    first = {
        "dense": {"w": random.normal(size=(300, 1000)).astype(np.float32)},
        "b": random.normal(size=10).astype(np.float32),
    }
    state, _ = train.step(train.init(first), np.ones(4, np.float32))
    saved(tmp_path, train, state)
    wanted = jax.tree.map(np.array, (state.params, state.opt_state))
    return tmp_path, train, train.init(first), wanted


def content(state):
    return jax.tree.map(np.array, (state.params, state.opt_state))


def test_arrays_lie_in_files_of_their_names(large, monkeypatch):
    folder, train, fresh, wanted = large
    file = folder / "00000001/arrays/params/dense/w/0.0"
    size = 300 * 1000 * 4
    assert file.stat().st_size == size
    assert file.read_bytes() == wanted[0]["dense"]["w"].tobytes()
    by_orbax = []
    read = arrays._by_orbax
    monkeypatch.setattr(
        arrays, "_by_orbax", lambda at, said: by_orbax.extend(said) or read(at, said)
    )
    back = restored(folder, train, fresh).state
    assert_same(content(back), wanted)
    assert "params/b" in by_orbax
    assert not any(name.endswith("dense/w") for name in by_orbax)


def test_what_was_read_is_not_written_to(large):
    """CPUs take memory over; a step copies what is donated to it."""
    folder, train, fresh, wanted = large
    back = restored(folder, train, fresh).state
    view = np.asarray(back.params["dense"]["w"])
    again, _ = train.step(back, np.ones(4, np.float32))
    twice = restored(folder, train, fresh).state
    twice, _ = train.step(twice, np.ones(4, np.float32))
    assert_same(content(again), content(twice))
    np.testing.assert_array_equal(view, wanted[0]["dense"]["w"])


@pytest.mark.parametrize("at", [0, 500_000, -1], ids=str)
def test_a_flipped_bit_of_a_large_file(large, at):
    folder, train, fresh, _ = large
    file = folder / "00000001/arrays/params/dense/w/0.0"
    flipped = bytearray(file.read_bytes())
    flipped[at] ^= 4
    file.write_bytes(flipped)
    with pytest.raises(ValueError, match=r"other bits.*params/dense/w"):
        restored(folder, train, fresh)


def test_a_large_file_that_was_cut_is_named(large):
    folder, train, fresh, _ = large
    file = folder / "00000001/arrays/params/dense/w/0.0"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"w/0\.0 has 1,199,999 bytes instead of"):
        restored(folder, train, fresh)


def test_large_files_are_read_once(large, monkeypatch):
    folder, train, fresh, _ = large
    read = []
    crc32 = manifest._crc32
    monkeypatch.setattr(
        manifest, "_crc32", lambda path: read.append(path) or crc32(path)
    )
    restored(folder, train, fresh)
    files = json.loads((folder / "00000001/manifest.json").read_text())["files"]
    assert len(read) == len([x for x in files.values() if x["bytes"] < manifest.SMALL])
    assert max(path.stat().st_size for path in read) < manifest.SMALL


def test_arrays_of_all_kinds_in_files(tmp_path, monkeypatch):
    monkeypatch.setattr(arrays, "LARGE", 0)
    monkeypatch.setattr(arrays, "DIRECT", 0)
    kinds = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64")
    kinds += ("int64", "uint32", "int8", "bool")
    written = {
        f"of {kind}/x{np.dtype(jax.numpy.dtype(kind)).itemsize}": np.arange(6)
        .reshape(3, 2)
        .astype(jax.numpy.dtype(kind))
        for kind in kinds
    }
    written |= {"scalar": np.asarray(7, np.int32), "zeros": np.zeros(5, np.float32)}
    written |= {"empty": np.zeros((0, 4), np.float32)}
    said = manifest.made_of(written, arrays.write(tmp_path / "arrays", written))
    assert not (tmp_path / "arrays" / "manifest.ocdbt").exists()
    assert_same(arrays.read(tmp_path / "arrays", said), written)
    monkeypatch.setattr(arrays, "DIRECT", 1 << 30)  # all of them by Orbax
    assert_same(arrays.read(tmp_path / "arrays", said), written)


@pytest.mark.parametrize(
    "names",
    [("a", "a/b"), ("..", "b"), ("x" * 300, "b"), ("a/", "b"), ("ü:*", "b")],
    ids=["below", "up", "long", "empty", "odd"],
)
def test_names_that_no_file_can_have(tmp_path, monkeypatch, names):
    """They go into a database, whatever the size."""
    monkeypatch.setattr(arrays, "LARGE", 0)
    train = jaxdp.data_parallel(wide_fn, optax.sgd(0.1), jaxdp.data_mesh(2))
    tree = {name: np.float32(i + 1) for i, name in enumerate(names)}
    saved(tmp_path, train, train.init(tree))
    back = restored(tmp_path, train, train.init(jax.tree.map(np.zeros_like, tree)))
    assert_same(
        jax.tree.map(np.asarray, back.state.params), jax.tree.map(np.asarray, tree)
    )
    assert (tmp_path / "00000000/arrays/manifest.ocdbt").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["00000000"]
