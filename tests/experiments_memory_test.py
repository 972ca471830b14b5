"""The experiment `memory`: what is counted, how it is split, and what is refused."""

import jax
import numpy as np
import pytest
from flax import nnx

from experiments import memory, models
from experiments.harness import devices as machine
from experiments.parts import footprint, room
from tests import experiments_contract as contract
from tests.compilers import needs_compiler

DEVICES, ROWS, CLASSES = 3, 2, 1000  # of the tiny run; rows on each device
NAMES = ["cpu:0", "cpu:1", "cpu:2"]
# Stem, one block and head of the tiny ResNet, layer by layer, then their norms.
CONVOLUTIONS = 7 * 7 * 3 * 4 + 4 * 4 + 3 * 3 * 4 * 4 + 4 * 16 + 4 * 16
PHI = 4 * (CONVOLUTIONS + 2 * (3 * 4 + 2 * 16) + 16 * CLASSES + CLASSES)
STATISTICS = 4 * 2 * (3 * 4 + 2 * 16)
IMAGES = 4 * ROWS * 32 * 32 * 3
LOGITS = 4 * ROWS * CLASSES
LEFT = 2**20  # bytes on the first device that are not the step's


@pytest.fixture(scope="module")
def before():
    """The bytes that were alive before the run."""
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.fixture(scope="module")
def ran(before, tmp_path_factory):
    """A tiny run, in a process that holds more than the step does."""
    del before
    folder = tmp_path_factory.mktemp("results")
    options = "--devices", str(DEVICES), "--batch-size", str(DEVICES * ROWS)
    left = jax.block_until_ready(jax.numpy.ones(LEFT // 4))
    result = contract.run("memory", folder, *options)
    del left
    return result


@pytest.fixture(scope="module")
def found(ran):
    """What a tiny run found."""
    return ran.found


def test_what_is_written(ran):
    verdicts = {"CA3": "partly", "CA4": "holds", "CA7": "partly", "CA15": "holds"}
    contract.check(ran, verdicts)


def parts_of(rows):
    """The numbers of a table by part, without what tests before have left."""
    parts = {row["part"]: [row[f"{name}_bytes"] for name in NAMES] for row in rows}
    parts.pop(footprint.OTHER, None)
    return parts


def test_main_device_holds_what_it_received_and_the_optimizer_state(found):
    parts = parts_of(found.tables["training_all_gradients_received"])
    assert parts["received gradients"] == [2 * PHI, 0, 0]
    assert parts["optimizer state"] == [PHI, 0, 0]
    assert parts["gather buffer"] == [DEVICES * LOGITS, 0, 0]
    assert parts["gradients"] == [PHI] * 3
    assert parts["parameters"] == [PHI, 0, 0]  # the replicas are gone
    assert "activations" not in parts


def test_nothing_but_the_step_holds_arrays(found, before):
    for rows in (
        found.tables["training_each_device_at_its_peak"],
        found.tables["training_all_gradients_received"],
        found.tables["inference_each_device_at_its_peak"],
    ):
        others = [row for row in rows if row["part"] == footprint.OTHER]
        assert (
            sum(row[f"{name}_bytes"] for row in others for name in NAMES)
            <= before + LEFT
        )
        assert others[0]["cpu:0_bytes"] >= LEFT


def test_training_peak_has_activations_and_gradients_everywhere(found):
    backward, early, _, article = found.tables["difference_of_the_main_device"]
    assert backward["received gradients_mb"] == 0
    for row in (backward, early):
        assert row["optimizer state_mb"] == PHI / 2**20
        assert row["gather buffer_mb"] == DEVICES * LOGITS / 2**20
    assert early["received gradients_mb"] == 2 * PHI / 2**20
    assert early["main_mb"] - backward["main_mb"] == pytest.approx(2 * PHI / 2**20)
    assert early["others_mb"] == backward["others_mb"]
    assert (article["main_mb"], article["others_mb"]) == (806, 452)
    parts = parts_of(found.tables["training_each_device_at_its_peak"])
    _, first, second = parts["activations"]
    assert first == second > IMAGES
    assert parts["gradients"] == [PHI] * 3


@needs_compiler("h100")
def test_main_device_on_h100_holds_three_parts_more(found):
    main, other, distributed = found.tables["the_step_on_h100"]
    gathered = 2 * DEVICES * LOGITS  # received, and joined
    assert main["received gradients_mb"] == 2 * PHI / 2**20
    assert main["optimizer state_mb"] == PHI / 2**20
    assert main["gather buffer_mb"] == gathered / 2**20
    more = main["all_mb"] - other["all_mb"]
    assert more == pytest.approx((3 * PHI + gathered) / 2**20)
    assert main["more than DP's others (%)"] == pytest.approx(
        100 * more / other["all_mb"]
    )
    for row in (main, other):
        assert row["parameters_mb"] == row["gradients_mb"] == PHI / 2**20
    assert other["optimizer state_mb"] == 0
    assert distributed["optimizer state_mb"] == PHI / 2**20
    assert distributed["all_mb"] > 3 * PHI / 2**20
    (claim,) = (claim for claim in found.claims if claim.id == "CA3")
    assert f"{main['all_mb']:,.1f} MiB on the main device" in claim.why


def test_inference_keeps_nothing_for_a_backward_program(found):
    parts = parts_of(found.tables["inference_each_device_at_its_peak"])
    assert parts["parameters"] == [PHI] * 3
    assert parts["batch"] == [IMAGES] * 3
    assert parts["buffers"] == [2 * STATISTICS] * 3  # before and after
    assert not {"activations", "gradients", "optimizer state"} & set(parts)


def test_what_inference_saves_is_the_sum_of_its_parts(found):
    for row in found.tables["saved_without_gradients"]:
        peaks = row["training_mb"], row["inference_mb"]
        parts = [size for name, size in row.items() if name.endswith("_mb")]
        assert sum(parts) - sum(peaks) == pytest.approx(peaks[0] - peaks[1])
        assert row["saved (%)"] == pytest.approx(100 * (1 - peaks[1] / peaks[0]))


def test_every_column_adds_up(found):
    for name, rows in found.tables.items():
        if "part" in rows[0] and "cpu:0_bytes" in rows[0]:
            *parts, total, others = rows
            assert others["part"] == footprint.OTHER
            for device in NAMES:
                column = f"{device}_bytes"
                assert sum(row[column] for row in parts) == total[column], name
    for row in found.tables["difference_of_the_main_device"]:
        parts = [row[f"{part}_mb"] or 0 for part in (*footprint.THREE, "rest")]
        assert row["main_mb"] - row["others_mb"] == pytest.approx(row["more_mb"])
        assert sum(parts) == pytest.approx(row["more_mb"])


def test_stages_stand_in_their_order_with_their_fullest_moment(found):
    rows = found.tables["training_by_stage"]
    stages = [row["stage"] for row in rows]
    assert stages[0] == "1 place" and stages[-1] == "8 optimizer"
    *_, total, _ = found.tables["training_all_gradients_received"]
    reduce = rows[stages.index("8 reduce")]
    assert reduce["cpu:0_mb"] == total["cpu:0_bytes"] / 2**20
    assert [row["stage"] for row in found.tables["inference_by_stage"]][
        -1
    ] == "5 gather"


def test_one_program_needs_the_same_everywhere(found):
    rows = found.tables["the_step_as_one_program"]
    for row in rows:
        assert row["all_mb"] == rows[0]["all_mb"]
        assert row["parameters_mb"] == row["optimizer state_mb"] == PHI / 2**20
        assert row["batch_mb"] == (IMAGES + 4 * ROWS) / 2**20
        assert row["buffers_mb"] == STATISTICS / 2**20
        assert 0 < row["outputs_mb"] < 2**-10  # the step and the loss: nothing is lost
    assert rows[0]["gets_mb"] == pytest.approx(2 * rows[1]["gets_mb"])


def test_claims_have_the_measured_numbers(found):
    claims = {claim.id: claim for claim in found.claims}
    more = [r["more (%)"] for r in found.tables["difference_of_the_main_device"][:2]]
    on_h100 = found.tables.get("the_step_on_h100", [])[:1]
    more += [row["more than DP's others (%)"] for row in on_h100]
    assert claims["CA3"].measured == f"{min(more):.1f} to {max(more):.1f}"
    assert claims["CA4"].measured == claims["CA4"].expected == DEVICES * LOGITS
    assert claims["CA15"].measured == 97.49
    assert found.tables["resnet_50"][0]["numbers"] == 25_557_032
    verdicts = {name: claim.verdict for name, claim in claims.items()}
    assert verdicts == dict(CA3="partly", CA4="holds", CA7="partly", CA15="holds")


def test_norms_of_the_resnet_survive_a_mean_far_from_zero():
    x = 1e4 + np.array([-1.0, 1.0, -1.0, 1.0], np.float32)[:, None]
    norms = []
    for _, module in nnx.iter_modules(models.ResNet50(nnx.Rngs(0), stages=((1, 1),))):
        if isinstance(module, nnx.BatchNorm):
            norms.append(module)
    assert len(norms) == 5
    for norm in norms:
        wide = np.tile(x, (1, norm.num_features))
        np.testing.assert_allclose(norm(wide), wide - 1e4, rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 1}, "--devices got 1.*at least 2.*--devices 4"),
        ({"image_size": 31}, r"--image-size got 31.*2\^5 = 32.*--image-size 32"),
        ({"batch_size": 66}, "got 66 for 4 devices.*--batch-size 68"),
    ],
    ids=lambda given: "" if isinstance(given, str) else next(iter(given)),
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(ValueError, match=message):
        memory.Config(platform="cpu", **options).check()


def test_a_host_without_room_is_told_what_fits(monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda: 8 * 2**30)
    message = (
        r"--image-size got 224 with --batch-size 64.*8\.0 GiB of free memory.*"
        r"4 forced devices.*3 GiB \+ 3,211,264 pixels x 4,000 bytes.*= 15\.0 GiB.*"
        r"--image-size 128\."
    )
    with pytest.raises(ValueError, match=message):
        memory.Config(platform="cpu").check()
    memory.Config(platform="cpu", image_size=128).check()
    with pytest.raises(ValueError, match="--image-size got 160"):
        memory.Config(platform="cpu", image_size=160).check()
    monkeypatch.setattr(room, "available_bytes", lambda: 2**30)
    with pytest.raises(ValueError, match=r"or use --tiny\."):
        memory.Config(platform="cpu").check()


@pytest.mark.parametrize(
    ("available", "gpus", "options"),
    [
        (None, 0, {}),
        (2**30, 4, {}),
        (2**30, 0, {"tiny": True}),
        (16 * 2**30, 0, {}),
    ],
    ids=["unknown", "GPUs", "tiny", "enough"],
)
def test_room_is_asked_for_only_where_it_matters(monkeypatch, available, gpus, options):
    monkeypatch.setattr(room, "available_bytes", lambda: available)
    monkeypatch.setattr(machine, "count_gpus", lambda: gpus)
    memory.Config(**options).check()


def test_fewer_gpus_than_devices_do_not_make_room(monkeypatch):
    monkeypatch.setattr(room, "available_bytes", lambda: 2**30)
    monkeypatch.setattr(machine, "count_gpus", lambda: 3)
    with pytest.raises(ValueError, match=r"1\.0 GiB of free memory"):
        memory.Config().check()


def test_available_memory_is_read_where_linux_tells(monkeypatch, tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal: 9 kB\nMemAvailable:    5 kB\nMemFree: 7 kB\n")
    monkeypatch.setattr(room, "MEMORY", told)
    assert room.available_bytes() == 5 * 1024
    told.write_text("MemTotal: 9 kB\n")
    assert room.available_bytes() is None
    monkeypatch.setattr(room, "MEMORY", tmp_path / "none")
    assert room.available_bytes() is None
