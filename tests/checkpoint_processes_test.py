"""Checkpoints of two processes, restored by one, and back."""

import jax
import numpy as np
import pytest

import jaxdp
from tests.checkpoint_helpers import restored, run, saved, training
from tests.processes_helpers import started


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A folder, what each of two processes found, and what one would have found."""
    folder = tmp_path_factory.mktemp("run")
    train, state = training("ring", 4)
    state, _ = run(train, state, range(3))
    saved(folder / "one", train, state, data={"epoch": 1})
    _, losses = run(train, state, [3])
    with started("checkpoint_processes_jobs", 2, 2, str(folder)) as group:
        return folder, group.results(), losses


@pytest.mark.parametrize("design", ["ring", "zero3", "server"])
def test_two_processes_save_and_one_restores(ran, design):
    folder, found, _ = ran
    train, fresh = training(design, 4)
    back = restored(folder / design, train, fresh)
    assert back.data == {"epoch": 3}
    state, losses = run(train, back.state, [3])
    wanted = jaxdp.fetch(train.params(state))["w"]
    for each in found:
        np.testing.assert_allclose(each[design]["losses"], losses, rtol=1e-5)
        np.testing.assert_allclose(each[design]["params"], wanted, rtol=1e-5)


def test_a_checkpoint_of_two_processes_is_that_of_one(ran):
    folder, _, _ = ran
    one, two = (jaxdp.checkpoint.load(folder / name) for name in ("one", "ring"))
    assert {*one} == {*two}
    for name in one:  # the processes compile without optimization, which rounds
        np.testing.assert_allclose(two[name], one[name], 1e-4, 1e-6, err_msg=name)


@pytest.mark.parametrize("design", ["ring", "zero3"])
def test_one_process_saves_and_two_restore(ran, design):
    _, found, losses = ran
    for each in found:
        assert each[f"from_one_{design}"]["data"] == {"epoch": 1}
        np.testing.assert_allclose(
            each[f"from_one_{design}"]["losses"], losses, rtol=1e-6
        )


def test_all_processes_must_save_the_same_position(ran):
    for each in ran[1]:
        assert (
            "other data or metadata on rank 1 than on rank 0"
            in each["disagreeing"]["error"]
        )
        assert not each["disagreeing"]["there"]


def test_all_processes_hear_of_a_full_disk(ran):
    for each in ran[1]:
        assert "could not save step 0" in each["failing"]["error"]


def test_all_processes_pass_over_what_one_cannot_read(ran):
    for each in ran[1]:
        assert each["damaged_for_one"]["data"] == "old"
        (told,) = each["damaged_for_one"]["told"]
        assert "rank 1: arrays cannot be read: a test" in told
    assert jax.process_count() == 1
