"""A damaged checkpoint is never used: the one before is, or an error says why not."""

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

import jaxdp
from jaxdp.checkpoint import Checkpoints, CheckpointWarning, folders, manager, manifest
from tests.checkpoint_helpers import assert_same, params, restored, run, saved, training
from tests.processes_helpers import end

# Where one array fails, Orbax closes the event loop that threads for others report to.
LATE = "ignore::pytest.PytestUnraisableExceptionWarning"
DAMAGES = ("first", "middle", "last", "cut", "gone", "longer")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with steps 1 and 2, its training, and what the steps hold."""
    folder = tmp_path_factory.mktemp("good")
    train, state = training("ring", 2)
    wanted = []
    for number in (0, 1):
        state, _ = run(train, state, [number])
        saved(folder, train, state)
        wanted.append(jax.tree.map(np.array, (state.params, state.opt_state)))
    return folder, train, train.init(params()), wanted


def files_of(step):
    return sorted(str(p.relative_to(step)) for p in step.rglob("*") if p.is_file())


def damage(path, how):
    content = bytearray(path.read_bytes())
    if how == "gone":
        path.unlink()
        return
    if how == "cut":
        content = content[: len(content) // 2]
    elif how == "longer":
        content += b"x"
    else:
        at = {"first": 0, "middle": len(content) // 2, "last": len(content) - 1}[how]
        content[at] ^= 0x10
    path.write_bytes(content)


@pytest.mark.parametrize("how", DAMAGES)
def test_damage_in_any_file_is_found(good, tmp_path, how):
    folder, train, fresh, wanted = good
    names = files_of(folder / "00000002")
    assert len(names) > 5
    for number, name in enumerate(names):
        copy = tmp_path / str(number)
        shutil.copytree(folder, copy)
        damage(copy / "00000002" / name, how)
        with pytest.warns(CheckpointWarning, match="damaged.*00000002") as told:
            back = restored(copy, train, fresh)
        # The files of Orbax are small here: each is named.
        assert name in str(told[0].message)
        assert_same(
            jax.tree.map(np.array, (back.state.params, back.state.opt_state)), wanted[0]
        )
        with pytest.raises(ValueError, match=r"no checkpoint that is whole.*00000002"):
            restored(copy, train, fresh, step=2)


@pytest.mark.filterwarnings(LATE)
def test_any_byte_of_large_files_is_found_by_their_arrays(good, tmp_path, monkeypatch):
    """Without checksums of files: what is used has the bits that were saved."""
    _, train, fresh, wanted = good
    monkeypatch.setattr(manifest, "SMALL", 0)
    copy = tmp_path / "copy"
    train_again, state = training("ring", 2)
    saved(copy, train_again, run(train_again, state, [0, 1])[0])
    step, found = copy / "00000002", 0
    random = np.random.default_rng(0)
    for name in files_of(step):
        path = step / name
        content = path.read_bytes()
        for at in random.integers(0, len(content), 3):
            flipped = bytearray(content)
            flipped[at] ^= 1 << int(random.integers(8))
            path.write_bytes(flipped)
            try:
                back = restored(copy, train, fresh)
                state = back.state.params, back.state.opt_state
                assert_same(jax.tree.map(np.array, state), wanted[1])  # harmless
            except ValueError as error:
                assert "no checkpoint that is whole" in str(error)
                found += 1
        path.write_bytes(content)
    assert found > 5


def test_other_bits_of_an_array_are_named(good, tmp_path, monkeypatch):
    folder, train, fresh, _ = good
    monkeypatch.setattr(manager.arrays, "checksum", lambda array: array.size)
    with pytest.raises(
        ValueError,
        match=r"arrays has other bits.*params/dense/k.*8 more|params/dense/k",
    ):
        restored(folder, train, fresh, step=2)


def test_all_damaged_is_an_error_that_lists_them(good, tmp_path):
    folder, train, fresh, _ = good
    shutil.copytree(folder, tmp_path / "copy")
    damage(tmp_path / "copy/00000002/manifest.json", "cut")
    damage(tmp_path / "copy/00000001/arrays/_METADATA", "gone")
    with pytest.warns(CheckpointWarning):
        with pytest.raises(
            ValueError,
            match=r"2: manifest\.json is not.*00001: arrays/_METADATA is missing",
        ):
            restored(tmp_path / "copy", train, fresh)


def test_interrupted_saves_are_ignored_and_said(good, tmp_path):  # CK-4
    folder, train, fresh, _ = good
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    shutil.copytree(copy / "00000002", copy / "tmp-00000003")
    (copy / "tmp-00000003" / "manifest.json").unlink()
    with pytest.warns(CheckpointWarning, match="does not look at.*tmp-00000003"):
        back = restored(copy, train, fresh)
    assert int(back.state.step) == 2
    saved(copy, train, run(train, back.state, [2])[0])  # which clears it away
    assert sorted(p.name for p in copy.iterdir()) == [
        "00000001",
        "00000002",
        "00000003",
    ]


@pytest.mark.parametrize("when", ["arrays", "manifest", "rename"])
def test_the_old_one_stays_until_the_new_one_is_complete(
    good, tmp_path, monkeypatch, when
):
    folder, train, fresh, wanted = good
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    state = restored(copy, train, fresh).state

    def full(*given):
        raise OSError(errno.ENOSPC, "No space left on device")

    place = {
        "arrays": (manager.arrays, "write"),
        "manifest": (manager.manifest, "write"),
        "rename": (pathlib.Path, "rename"),
    }[when]
    with monkeypatch.context() as patched:
        patched.setattr(*place, full)
        checkpoints = Checkpoints(copy, keep=1)
        checkpoints.save(train, state, data="new")
        with pytest.raises(OSError, match=r"could not save step 2.*No space.*bytes"):
            checkpoints.wait()
    assert sorted(p.name for p in copy.iterdir()) == ["00000001", "00000002"]
    back = restored(copy, train, fresh)
    assert_same(
        jax.tree.map(np.array, (back.state.params, back.state.opt_state)), wanted[1]
    )
    checkpoints.save(train, state, data="new")  # and it can be tried again
    checkpoints.wait()
    assert sorted(p.name for p in copy.iterdir()) == ["00000002-2"]


def test_a_full_disk_is_named_before_anything_is_written(good, tmp_path, monkeypatch):
    _, train, _, _ = good
    monkeypatch.setattr(folders, "free_bytes", lambda folder: 100)
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(train, train.init(params()))
    with pytest.raises(
        OSError,
        match=r"step 0 to .*run: .*No space.*takes 2\d\d bytes.*100 are free",
    ):
        checkpoints.save(train, train.init(params()))
    assert not (tmp_path / "run").exists()


@pytest.mark.filterwarnings(LATE)
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_loses_nothing(tmp_path, monkeypatch):
    """A file system of 1 MiB, which a second checkpoint of 700 kB does not fit into."""

    def wide(params, batch):
        return (params["w"] * batch.mean()).sum()

    train = jaxdp.data_parallel(wide, optax.sgd(0.1), jaxdp.data_mesh(2))
    first = {"w": np.random.default_rng(0).normal(size=150_000).astype(np.float32)}
    state = train.init(first)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", tmp_path], timeout=30
    )
    if mount.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        free = folders.free_bytes
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(train, state)
        with monkeypatch.context() as patched:  # it fills up in the middle of a save
            patched.setattr(folders, "free_bytes", lambda folder: 1 << 40)
            state, _ = train.step(state, np.ones(4, np.float32))
            checkpoints.save(train, state)
            with pytest.raises(OSError, match="could not save step 1"):
                checkpoints.wait()
        assert free(tmp_path) > 200_000  # nothing is left of it
        fresh = train.init(jax.tree.map(np.zeros_like, first))
        back = restored(tmp_path, train, fresh)
        assert_same(jax.tree.map(np.array, back.state.params), first)
    finally:
        subprocess.run(["umount", "-l", tmp_path], timeout=30, check=True)


def test_a_folder_that_cannot_be_made(good, tmp_path):
    _, train, _, _ = good
    (tmp_path / "file").write_text("")
    checkpoints = Checkpoints(tmp_path / "file" / "run")
    checkpoints.save(train, train.init(params()))
    with pytest.raises(
        OSError, match=r"step 0 to .*file/run.*Not a dir.*are free.*writable"
    ):
        checkpoints.wait()
    checkpoints.wait()  # an error is told once


KILLED = """
import os, signal, sys
import jax
jax.config.update("jax_platforms", "cpu")
from jaxdp.checkpoint import Checkpoints, manager
from tests.checkpoint_helpers import run, training
train, state = training("ring", 1)
checkpoints = Checkpoints(sys.argv[1])
checkpoints.save(train, state, data="whole")
checkpoints.wait()
write = getattr(manager, sys.argv[2]).write
def killed(*given):
    write(*given)
    os.kill(os.getpid(), signal.SIGKILL)
getattr(manager, sys.argv[2]).write = killed
checkpoints.save(train, run(train, state, [0])[0], data="half")
checkpoints.wait()
"""


@pytest.mark.parametrize("when", ["arrays", "manifest"])
def test_killed_in_the_middle_of_a_save(tmp_path, when):
    """After the arrays, or after the manifest: one rename is missing."""
    root = pathlib.Path(__file__).parent.parent
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, tmp_path, when],
        cwd=root,
        stderr=subprocess.PIPE,
    )
    try:
        _, told = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == -signal.SIGKILL, told
    with pytest.warns(CheckpointWarning, match="tmp-00000001"):
        back = restored(tmp_path, *training("ring", 2))
    assert (int(back.state.step), back.data) == (0, "whole")


def test_a_checkpoint_of_another_model_lists_what_differs(good):  # CK-2
    folder, _, _, _ = good
    other = params()
    other["dense"]["k"] = np.zeros((3, 5), np.float32)
    other["w"] = other["w"].astype(np.float16)
    other["new"] = other.pop("s")

    def none(params, batch):
        return jax.numpy.float32(0) + sum(x.sum() for x in jax.tree.leaves(params))

    train = jaxdp.data_parallel(none, optax.adam(0.1), jaxdp.data_mesh(2))
    with pytest.raises(ValueError) as error:
        restored(folder, train, train.init(other))
    text = str(error.value)
    assert "differs from this training in 12 of 11 leaves" in text
    for part in (
        "params/new is not in the checkpoint",
        "opt_state/0/mu/new is not in the checkpoint",
        "params/s is only in the checkpoint",
    ):
        assert part in text
    other = params()
    other["dense"]["k"] = np.zeros((3, 5), np.float32)
    other["w"] = np.zeros(10, np.float16)
    with pytest.raises(ValueError) as error:
        restored(folder, train, train.init(other))
    for part in (
        "params/dense/k is float32[3, 4], here float32[3, 5]",
        "params/w is float32[10], here float16[10]",
    ):
        assert part in str(error.value)
    assert "cast=True" not in str(error.value)


def test_dtypes_change_only_when_asked(tmp_path):  # CK-2
    """Counts never do: 16,777,217 is no float32."""

    def none(params, batch):
        return (params["w"].sum() * batch.mean()).astype("float32")

    def make(dtype, count):
        train = jaxdp.data_parallel(none, optax.sgd(0.1), jaxdp.data_mesh(2))
        values = {"w": np.asarray([1.0, 1 / 3], dtype)}
        return train, train.init(values, model_state={"count": count})

    train, state = make("float32", np.int32(16777217))
    saved(tmp_path, train, state)
    train, fresh = make(jax.numpy.bfloat16, np.int32(0))
    with pytest.raises(
        ValueError,
        match=r"in 1 of .*params/w is float32\[2\], here bfloat16\[2\].*cast=True",
    ):
        restored(tmp_path, train, fresh)
    back = restored(tmp_path, train, fresh, cast=True).state
    assert back.params["w"].dtype == jax.numpy.bfloat16
    assert np.asarray(back.params["w"], np.float32).tolist() == [1.0, 0.333984375]
    train, fresh = make("float32", np.float32(0))
    for cast in (False, True):
        with pytest.raises(
            ValueError, match=r"model_state/count is int32\[\], here float32"
        ):
            restored(tmp_path, train, fresh, cast=cast)


def test_precision_and_keys_must_be_those_that_were_saved(tmp_path):
    train, state = training("ring", 2)
    state = train.init(params(), rng=jax.random.key(1))
    saved(tmp_path, train, state)
    raw = train.init(params(), rng=jax.random.PRNGKey(1))
    with pytest.raises(
        ValueError, match=r"rng is a key of kind fry|rng is a key of kind th"
    ):
        restored(tmp_path, train, raw)
    with pytest.raises(ValueError, match="rng is only in the checkpoint"):
        restored(tmp_path, train, train.init(params()))
    scaled, fresh = training(
        "ring", 2, precision=jaxdp.Precision("fp16", loss_scale="dynamic")
    )
    with pytest.raises(ValueError, match="loss_scale/scale is not in the checkpoint"):
        restored(tmp_path, scaled, fresh)


def test_a_manifest_of_a_later_format_is_not_guessed_at(good, tmp_path):
    folder, train, fresh, _ = good
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    facts = json.loads((copy / "00000002" / "manifest.json").read_text())
    (copy / "00000002" / "manifest.json").unlink()
    del facts["crc32"], facts["files"]
    step = copy / "00000002"
    manifest.write(step, facts | {"format": 2})
    with pytest.warns(CheckpointWarning, match="format 2.*reads format 1"):
        restored(copy, train, fresh)
