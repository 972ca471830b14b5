"""What goes wrong between processes: cases MP-1 to MP-6, DA-3, DA-4 and ST-3.

Two processes of two devices run `processes_cases_jobs`; some jobs have a start of their
own, since they wait or fail.
"""

import contextlib
import itertools
import time

import jax
import numpy as np
import pytest

import jaxdp
from tests import processes_helpers
from tests.processes_cases_jobs import PARAMS, rows
from tests.processes_scatter_jobs import LATE_S, ROUNDS

TOGETHER = (
    *("sizes", "fetching", "starting", "programs", "agreeing", "ends", "orders"),
    *("saving", "scattering", "missing"),
)
FAILURE_S = 60.0


@pytest.fixture(scope="module")
def starts():
    """The starts that wait, and the one that does everything else meanwhile."""
    with contextlib.ExitStack() as stack:

        def start(devices, *jobs):
            given = "processes_cases_jobs", 2, devices, *jobs
            return stack.enter_context(processes_helpers.started(*given))

        yield {
            "late": start(1, "late"),
            "failing": start(1, "failing"),
            "together": start(2, *TOGETHER),
        }


@pytest.fixture(scope="module")
def found(starts):
    """By job, what both processes saw, by rank."""
    results = starts["together"].results()
    return {job: [rank[job] for rank in results] for job in TOGETHER}


def losses_of(batch):
    """The loss of every row, by NumPy."""
    return (batch["x"].astype(np.float64) @ PARAMS["w"] + PARAMS["b"]) ** 2


@pytest.mark.parametrize("call", ["refused", "refused by step"])
def test_mp1_batches_of_different_sizes_are_refused_on_all(found, call):
    for rank in found["sizes"]:
        assert rank[call]["type"] == "ValueError"
        assert "rank 0 has 3 rows for 2 device(s)" in rank[call]["text"]
        assert "rank 1 has 5 rows for 2 device(s)" in rank[call]["text"]
        assert "remainder='pad'" in rank[call]["text"]


def test_mp1_batches_of_different_sizes_pad_to_the_largest(found):
    first, second = rows(3, 0)["x"], rows(5, 9)["x"]
    for rank in found["sizes"]:
        assert rank["mask"].tolist() == [True] * 3 + [False] * 3 + [True] * 5 + [False]
        np.testing.assert_array_equal(
            rank["padded"][rank["mask"]], np.concatenate([first, second])
        )
        expected = losses_of({"x": np.concatenate([first, second])}).mean()
        np.testing.assert_allclose(rank["loss"], expected, rtol=1e-6)
        np.testing.assert_array_equal(
            rank["dropped"], np.concatenate([first[:2], second[:2]])
        )


def test_mp2_fetched_arrays_are_whole_and_of_one_shape(found):
    expected = np.concatenate([rows(2, start)["x"] for start in (0, 6)])
    for rank in found["fetching"]:
        np.testing.assert_array_equal(rank["split"], expected)
        np.testing.assert_allclose(rank["whole"], expected.sum(), rtol=1e-6)
        assert rank["whole"].shape == () and rank["float"] == rank["whole"]
        assert rank["local"].shape == rank["host"].shape == (10,)
        assert rank["key"].tolist() == [0, 3]
        assert (rank["none"], rank["text"]) == (None, "as it is")
        arrays = {*rank["types"]} - {"none", "text"}
        assert {rank["types"][name] for name in arrays} == {"ndarray"}


def test_mp2_one_process_fetches_the_same_shapes():
    split = jaxdp.shard_batch(np.arange(16.0), jaxdp.data_mesh(8))
    kept = jaxdp.fetch({"split": split, "host": np.zeros(10), "key": jax.random.key(3)})
    np.testing.assert_array_equal(kept["split"], np.arange(16.0))
    assert kept["host"].shape == (10,) and kept["key"].tolist() == [0, 3]
    assert {type(leaf) for leaf in kept.values()} == {np.ndarray}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("params", "different values on some processes: params.w on rank 1."),
        ("model_state", "values on some processes: model_state.norm.mean on rank 1."),
        ("rng", "values on some processes: rng on rank 1."),
        ("structure", "structure on some processes: params.b on rank 1 (missing;"),
        ("dtype", "params.w on rank 1 (float16[3]; elsewhere float32[3])"),
    ],
    ids=["params", "model_state", "rng", "structure", "dtype"],
)
def test_mp3_what_differs_at_the_start_is_named_on_all(found, given, named):
    """A structure that differs comes before values that do."""
    for rank in found["starting"]:
        assert rank[given]["type"] == "ValueError"
        assert named in rank[given]["text"]
        assert "jaxdp.processes.copies_of_zero" in rank[given]["text"]
        assert rank[given]["seconds"] < 30


def test_mp3_parameters_may_be_those_of_process_zero(found):
    zero, one = found["starting"]
    assert (zero["own"] != one["own"]).any()
    for rank in (zero, one):
        np.testing.assert_array_equal(rank["copied"], zero["own"])


def test_mp4_process_zero_decides_what_all_restore(found):
    """It alone has the file that says so; all have saved, and all go on alike."""
    assert [rank["seen"] for rank in found["saving"]] == ["state", None]
    for rank in found["saving"]:
        assert rank["decided"] == "state"
        went_on, resumed = rank["losses"]
        assert went_on == resumed and went_on[0] != went_on[1]


def test_mp4_a_process_that_fails_where_all_save_ends_the_others(starts):
    start = time.monotonic()
    zero, one = starts["failing"].ends()
    assert time.monotonic() - start < FAILURE_S
    assert one[0] == 1 and "OSError: no room for the checkpoint" in one[1]
    assert zero[0] not in (0, None)
    assert "rank 1" in zero[1]


def test_mp5_initialize_refuses_a_jax_that_is_in_use():
    assert jax.device_count() == 8
    with pytest.raises(RuntimeError, match=r"had started with 8 device\(s\)"):
        jaxdp.initialize("127.0.0.1:1", 2, 0)


@pytest.mark.parametrize("at", ["agreement", "step"])
def test_mp5_a_process_that_does_not_come_is_named_in_time(found, at):
    waited, went_past = (rank[at] for rank in found["missing"])
    assert went_past["type"] is None
    assert waited["type"] == "TimeoutError"
    assert "rank 0 of 2 waited 1.5 s for rank 1 to come to" in waited["text"]
    assert 1.4 < waited["seconds"] < 10


def test_epochs_refuse_processes_with_fewer_working_devices(found):
    for rank in found["sizes"]:
        assert rank["serving"]["type"] == "ValueError"
        assert "(rank 0: 1, rank 1: 2)" in rank["serving"]["text"]


def test_mp5_an_agreement_that_timed_out_can_be_tried_again(found):
    assert [rank["late"] for rank in found["missing"]] == [["0, late", "1, late"]] * 2


@pytest.mark.parametrize(
    ("differs", "named"),
    [
        ("constant", "another program on rank 1 than on the other 1 of 2 processes"),
        ("dtype", "batches of the same dtypes"),
        ("devices", "[2049, 2048, 1, 0] on rank 1, and of [0, 1, 2048, 2049]"),
    ],
    ids=["constant", "dtype", "devices"],
)
def test_mp5_programs_that_differ_are_refused_on_all(found, differs, named):
    for rank in found["programs"]:
        assert rank[differs]["type"] == "ValueError"
        assert named in rank[differs]["text"]
        assert rank["same"]["type"] is None


@pytest.mark.parametrize("way", ["native", "ring"])
def test_mp6_chunks_of_any_size_are_summed_exactly(found, way):
    for rank in found["scattering"]:
        counts = {name: wrong for name, wrong in rank.items() if name.startswith(way)}
        assert len(counts) == 4 and ROUNDS == 8
        assert not any(counts.values()), counts


def test_mp6_a_process_may_come_31_seconds_late(starts):
    zero, one = (rank["late"] for rank in starts["late"].results())
    assert zero["wrong"] == one["wrong"] == [0, 0]
    assert zero["waited"] > LATE_S - 5 > 5 > one["waited"]


@pytest.mark.parametrize("devices", ["2", "4"])
@pytest.mark.parametrize("steps", ["3", "5", "7"])
def test_da3_resumed_runs_see_the_samples_of_the_whole_run(found, devices, steps):
    """In the middle of an epoch, at its end, and in the second one."""
    for rank in found["orders"]:
        whole = rank[devices]["0"]
        assert rank[devices][steps] == whole
        assert whole == found["orders"][0]["2"]["0"]
        for epoch in (whole[:5], whole[5:]):
            assert sorted(itertools.chain(*epoch)) == [*range(20)]
        assert whole[:5] != whole[5:]


def test_da4_processes_with_3_and_4_batches_stop_together(found):
    zero, one = found["ends"]
    assert zero["losses"] == one["losses"]
    assert len(zero["losses"]) == 3
    first = np.concatenate([losses_of(rows(2, start)) for start in (0, 50)])
    np.testing.assert_allclose(zero["losses"][0], first.mean(), rtol=1e-6)
    assert zero["empty"] == one["empty"] == 0


@pytest.mark.parametrize("job", ["ends", "saving"])
def test_st3_one_compilation_over_many_steps_and_after_a_restore(found, job):
    assert [rank["cached"] for rank in found[job]] == [1, 1]


def test_agreements_give_all_values_in_order_of_rank(found):
    """Process 0 comes last, and one name serves again and again."""
    for index, rank in enumerate(found["agreeing"]):
        assert rank["rounds"] == [
            [{"rank": 0, "round": i}, {"rank": 1, "round": i}] for i in range(3)
        ]
        assert rank["decision"] == "of 0"
        assert rank["zero"] is (index == 0)
