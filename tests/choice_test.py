"""The choice of an algorithm by cost: priced by hand, and made where it is traced."""

import math
import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import algorithms, choice, targets
from jaxdp.candidates import AT_ONCE
from jaxdp.cost import cost, time_s
from jaxdp.schedule import Schedule, bundles
from jaxdp.targets.kinds import HOST, hardware_here, hardware_of
from tests.compilers import needs_compiler, shape

ALPHA, BETA = 10e-6, 450e9  # nvlink4
CHOOSE = jaxdp.choose_algorithm


def candidates(chosen):
    return {candidate.algorithm: candidate for candidate in chosen.candidates}


@pytest.fixture
def two_algorithms(monkeypatch):
    """A world with the ring and recursive doubling alone."""
    every = algorithms.SCHEDULES["all_reduce"]
    two = {name: every[name] for name in ("ring", "recursive_doubling")}
    monkeypatch.setitem(algorithms.SCHEDULES, "all_reduce", two)
    choice._choice.cache_clear()
    yield
    choice._choice.cache_clear()


def test_prices_by_hand():
    chosen = CHOOSE(1 << 20, 8, "h100")
    ring, doubling = (candidates(chosen)[n] for n in ("ring", "recursive_doubling"))
    assert ring.seconds == pytest.approx(14 * (ALPHA + 2**17 / BETA))
    assert (ring.rounds, ring.sent_bytes) == (14, 14 * 2**17)
    assert doubling.seconds == pytest.approx(3 * (ALPHA + 2**20 / BETA))
    assert (doubling.rounds, doubling.sent_bytes) == (3, 3 * 2**20)
    assert chosen.native_s == pytest.approx(14 * (ALPHA + 2**17 / BETA))


@pytest.mark.parametrize("collective", algorithms.SCHEDULES)
@pytest.mark.parametrize(("devices", "size_bytes"), [(1, 100), (6, 0), (6, 4_000_001)])
def test_every_algorithm_is_priced_as_its_schedule(collective, devices, size_bytes):
    machine = targets.hardware("h100", network_name="ethernet-100g", devices_per_host=2)
    chosen = CHOOSE(size_bytes, devices, machine, collective)
    builders = dict(algorithms.SCHEDULES[collective])
    if collective == "all_reduce" and devices > 2:
        builders["hierarchical"] = lambda n: algorithms.hierarchical(n, hosts=n // 2)
    assert {*candidates(chosen)} == {*builders}
    for name, found in candidates(chosen).items():
        schedule = builders[name](devices)
        elements = -(-size_bytes // 4)
        assert found.seconds == time_s(schedule, elements, 4, machine)
        moved = cost(schedule, elements, 4)
        assert found[1:3] == (moved.rounds, max(moved.sent_bytes))
    others = [c.seconds for c in chosen.candidates[1:]]
    assert others == pytest.approx(sorted(others))
    assert chosen.seconds <= 1.05 * min(c.seconds for c in chosen.candidates)
    assert chosen.schedule.devices == devices


def test_crossover_by_hand(two_algorithms):
    """With a = alpha, k = K / beta, N = 4: doubling takes 2a + 2k, a ring 6a + 1.5k.

    The ring is chosen from 6a + 1.5k = 1.05 (2a + 2k) on: k = 6.5 a.
    """
    (found,) = choice.crossovers(4, "h100")
    assert found[1:] == ("recursive_doubling", "ring")
    exact = 6.5 * ALPHA * BETA
    assert exact <= found.size_bytes <= 1.01 * exact
    assert CHOOSE(int(0.999 * exact), 4, "h100").algorithm == "recursive_doubling"
    at = CHOOSE(int(1.001 * exact), 4, "h100")
    assert at.algorithm == "ring"  # though it is not the quickest
    assert at.seconds > candidates(at)["recursive_doubling"].seconds


def test_equal_times_go_by_rounds_then_by_order(monkeypatch):
    every = algorithms.SCHEDULES["all_reduce"]
    # Of 2 devices a ring of 2 rounds moves what the halves of a ring move one by one.
    ring, star, doubling = (every[n] for n in ("ring", "star", "recursive_doubling"))
    rows = {"star": star, "second": doubling, "third": doubling, "ring": ring}
    monkeypatch.setitem(algorithms.SCHEDULES, "all_reduce", rows)
    choice._choice.cache_clear()
    names = [c.algorithm for c in CHOOSE(2**28, 2, "h100").candidates]
    choice._choice.cache_clear()
    assert names == ["second", "third", "ring", "star"]


def test_between_hosts_that_share_an_adapter():
    """All 4 pairs of doubling's last round pass one adapter; of a ring one pair."""
    apart = targets.hardware("h100", network_name="ethernet-100g", devices_per_host=4)
    chosen = CHOOSE(2**22, 8, apart)
    found = {name: each.seconds for name, each in candidates(chosen).items()}
    across = 30e-6 + 2**19 / 12.5e9
    assert found["ring"] == pytest.approx(14 * across)
    assert found["recursive_doubling"] == pytest.approx(
        2 * (ALPHA + 2**22 / BETA) + 30e-6 + 4 * 2**22 / 12.5e9
    )
    hierarchical = 6 * (ALPHA + 2**20 / BETA) + 2 * (30e-6 + 4 * 2**19 / 12.5e9)
    assert found["hierarchical"] == pytest.approx(hierarchical)
    assert hierarchical < found["ring"] < found["recursive_doubling"]
    assert chosen.schedule != CHOOSE(2**22, 8, "h100").schedule


def test_the_hierarchical_one_is_chosen_with_as_many_hosts_as_there_are():
    apart = targets.hardware("h100", network_name="ethernet-100g", devices_per_host=4)
    chosen = CHOOSE(2**24, 12, apart)
    assert chosen.algorithm == "hierarchical"
    assert chosen.schedule == algorithms.hierarchical(12, hosts=3)
    for devices in (10, 4, 3):  # hosts are not equally full, or there is one
        assert "hierarchical" not in candidates(CHOOSE(2**24, devices, apart))


def test_cpu_devices_share_one_memory():
    """Latency by rounds, and what all send, unless one device sends most of it.

    Of 3 devices doubling sends 1 + 2 + 1 buffers in 3 messages, of 4 devices 8 in 2. A
    star's root takes part in each of its 2 (N - 1) messages.
    """
    alpha, rate, size = HOST.link.alpha_s, HOST.link.bytes_per_s, 12 * 2**20
    one, together = size / rate, size / (rate * AT_ONCE)
    for devices, doubling_s in (
        (3, 3 * alpha + 4 * together),
        (4, 2 * alpha + 8 * together),
    ):
        found = candidates(CHOOSE(size, devices, HOST))
        rounds = 2 * (devices - 1)
        assert found["ring"].seconds == pytest.approx(rounds * (alpha + together))
        assert found["star"].seconds == pytest.approx(rounds * (alpha + one))
        assert found["recursive_doubling"].seconds == pytest.approx(doubling_s)
    assert CHOOSE(size, 4, HOST).native_s is None


def test_two_devices_are_neighbours_whatever_they_do():
    """There a ring is one message more, and never chosen."""
    assert choice.crossovers(2, "h100") == choice.crossovers(2, HOST) == ()
    assert CHOOSE(2**30, 2, "h100").algorithm == "recursive_doubling"


def test_native_gathers_are_priced_by_their_shards():
    found = CHOOSE(2**20, 8, "h100", "all_gather")
    assert found.native_s == pytest.approx(7 * (ALPHA + 2**17 / BETA))
    assert found.native_s == pytest.approx(candidates(found)["ring"].seconds)
    assert CHOOSE(2**20, 8, "h100", "gather").native_s is None


def test_partial_sums_of_16_bits_travel_as_32():
    chosen = CHOOSE(2**21, 4, "h100", itemsize=2, partial_itemsize=4)
    # Of 2**20 elements: 3 rounds of own values or partial sums, 3 of complete chunks;
    # the first round of a ring sends what each device has, in 16 bits.
    assert candidates(chosen)["ring"].sent_bytes == 2**18 * (2 + 2 * 4 + 3 * 2)


@pytest.mark.parametrize(
    ("machine", "devices"),
    [("h100", 2), ("h100", 24), ("v100", 6), ("v100", 16), ("CPU devices", 8)],
)
def test_choices_change_at_crossovers_and_nowhere_else(machine, devices):
    machine = HOST if machine == HOST.name else machine
    low, expected = 2**10, CHOOSE(2**10, devices, machine).algorithm
    last = choice.Crossover(2**28, "", "")
    for found in (*choice.crossovers(devices, machine, most_bytes=2**28), last):
        for size in np.linspace(low, found.size_bytes / 1.02, 5).astype(int):
            assert CHOOSE(int(size), devices, machine).algorithm == expected
        assert found.before in ("", expected)
        assert found.size_bytes >= low
        low, expected = found.size_bytes, found.after


def test_prints_a_table_with_the_chosen_one_first():
    chosen = CHOOSE(1024, 6, "h100")
    first, heads, *rows = str(chosen).splitlines()
    assert first == (
        "all_reduce of 1,024 bytes on 6 devices, H100 (nvlink4): recursive_doubling"
    )
    assert heads.split("  ")[0] == "algorithm"
    assert rows[0].split() == ["recursive_doubling", "4", "3,072", "40.0"]
    assert rows[-1].split() == ["native", "100.0"]
    assert len(rows) == len(algorithms.SCHEDULES["all_reduce"]) + 1
    assert len({len(line) for line in (heads, *rows)}) == 1


def test_choices_are_kept_and_can_be_keys():
    chosen = CHOOSE(1024, 8, "h100")
    assert CHOOSE(1024, 8, targets.hardware("h100")) is chosen
    assert {chosen: 1}[CHOOSE(1024, 8, "h100")] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((-1, 8), r"got -1 bytes in elements of 4 on 8 devices.*at least 0 bytes"),
        ((8, 0), "on 0 devices.*at least 1 device"),
        ((8, 8, "h100", "reduce_all"), "'reduce_all'.*one of all_reduce, reduce_sc"),
        ((8, 8, "h1000"), "'h1000'.*Did you mean 'h100'"),
    ],
    ids=["bytes", "devices", "collective", "hardware"],
)
def test_bad_input(options, message):
    with pytest.raises(ValueError, match=message):
        CHOOSE(*options)


def test_crossovers_need_sizes():
    with pytest.raises(ValueError, match=r"least_bytes=9 and most_bytes=8.*<="):
        choice.crossovers(2, "h100", least_bytes=9, most_bytes=8)
    with pytest.raises(ValueError, match=r"crossovers got 1024 bytes.* on 0 devices"):
        choice.crossovers(0, "h100")


@pytest.mark.parametrize(
    ("kind", "platform", "name", "link"),
    [
        ("cpu", "cpu", "CPU devices", "host-memory"),
        ("NVIDIA H100 80GB HBM3", "gpu", "H100", "nvlink4"),
        ("NVIDIA H100 PCIe", "gpu", "NVIDIA H100 PCIe", "pcie4"),
        ("NVIDIA A100-SXM4-40GB", "gpu", "A100", "nvlink3"),
        ("Tesla V100-PCIE-32GB", "gpu", "V100", "pcie3"),
        ("Tesla V100-SXM2-16GB", "gpu", "Tesla V100-SXM2-16GB", "nvlink2"),
        ("NVIDIA L4", "gpu", "NVIDIA L4, taken for A100 on pcie4", "pcie4"),
        ("TPU v5 lite", "tpu", "TPU v5e", "ici-v5e"),
        ("TPU v9", "tpu", "TPU v9, taken for TPU v6e on ici-v6e", "ici-v6e"),
    ],
)
def test_hardware_of_a_device(kind, platform, name, link):
    found = hardware_of(SimpleNamespace(device_kind=kind, platform=platform))
    assert (found.name, found.link.name) == (name, link)


def all_reduced(mesh, algorithm: str | Schedule = "auto"):
    return jax.jit(
        jax.shard_map(
            lambda tree: jaxdp.all_reduce(tree, "data", algorithm),
            mesh=mesh,
            in_specs=P("data"),
            out_specs=P(),
        )
    )


def half(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float16)


def as_half(size_bytes, devices=6):
    return CHOOSE(size_bytes, devices, itemsize=2, partial_itemsize=4)


def permutes(text):
    return text.count('"stablehlo.collective_permute"')


def messages(chosen):
    """How many `ppermute`s it takes."""
    return sum(len(round_) for round_ in bundles(chosen.schedule))


@pytest.mark.parametrize("scale", [1, 2**8, 2**14])
def test_auto_chooses_for_each_buffer_when_it_is_traced(scale):
    """By bytes, and for 16 bits knowing that partial sums take 32."""
    tree = {"a": shape(6, 500 * scale), "b": half(6, 100 * scale)}
    of_a, of_b = CHOOSE(2000 * scale, 6), as_half(200 * scale)
    text = all_reduced(jaxdp.data_mesh(6)).lower(tree).as_text()
    assert permutes(text) == messages(of_a) + messages(of_b)


def test_leaves_of_one_dtype_are_one_buffer():
    tree = {"a": shape(6, 2**20), "b": shape(6, 2**20)}
    text = all_reduced(jaxdp.data_mesh(6)).lower(tree).as_text()
    assert CHOOSE(2**22, 6).algorithm != CHOOSE(2**23, 6).algorithm == "ring"
    assert permutes(text) == messages(CHOOSE(2**23, 6)) == 10


def test_partial_sums_count_when_auto_chooses():
    """A ring sends most of them; `direct` sends what each device has, in 16 bits."""
    ring, direct = (all_reduced(jaxdp.data_mesh(4), a) for a in ("ring", "direct"))
    x = half(4, 2**23)
    auto = all_reduced(jaxdp.data_mesh(4)).lower(x).as_text()
    assert as_half(2**24, 4).algorithm == "direct"
    assert CHOOSE(2**24, 4, itemsize=2).algorithm == "ring"
    assert auto == direct.lower(x).as_text() != ring.lower(x).as_text()


def test_auto_sums_as_the_algorithm_it_chose():
    x = np.random.default_rng(0).normal(size=(6, 1000)).astype(np.float32)
    mesh, chosen = jaxdp.data_mesh(6), CHOOSE(4000, 6)
    found = [
        np.asarray(all_reduced(mesh, algorithm)(x))
        for algorithm in ("auto", chosen.algorithm, chosen.schedule, "ring")
    ]
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()
    assert found[0].tobytes() != found[3].tobytes()  # another order of additions
    np.testing.assert_allclose(found[0][0], x.sum(axis=0, dtype=np.float64), 1e-4)


@needs_compiler("h100")
def test_the_mesh_that_is_traced_over_says_which_hardware():
    seen = []

    def look(x):
        seen.append(hardware_here().name)
        return x

    for mesh in (jaxdp.data_mesh(2), targets.mesh("h100", 2)):
        mapped = jax.shard_map(look, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        jax.jit(mapped).trace(shape(2))
    assert seen == ["CPU devices", "H100"]
    assert hardware_here() is HOST


@needs_compiler("h100")
def test_small_buckets_go_in_few_rounds_and_large_ones_around_the_ring():
    """For H100, though the training was made on CPUs, where the middle one is large."""
    sizes = {"small": (8, 4000), "middle": (4000, 550), "large": (550, 58_000)}
    params = {name: shape(*dims) for name, dims in sizes.items()}

    def loss_fn(params, batch):
        hidden = jnp.tanh(batch @ params["small"]) @ params["middle"]
        return jnp.mean(jnp.tanh(hidden) @ params["large"])

    design = jaxdp.AllReduce("auto", bucket_cap_mb=1.0, first_bucket_mb=None)
    train = jaxdp.data_parallel(
        loss_fn, optax.sgd(0.1), jaxdp.data_mesh(3), design=design
    )
    program = jaxdp.compile_for(train.step, params, shape(12, 8), devices=6)
    report = jaxdp.analyze(program)
    rounds = Counter(
        re.findall(r"bucket_\d+", op.op_name)[0] for op in report.collectives
    )
    bytes_ = {name: 4 * math.prod(dims) for name, dims in sizes.items()}
    chosen = {name: CHOOSE(size, 6, "h100") for name, size in bytes_.items()}
    names = [each.algorithm for each in chosen.values()]
    assert names == ["recursive_doubling", "recursive_doubling", "ring"]
    assert CHOOSE(bytes_["middle"], 6, HOST).algorithm == "ring"
    assert sorted(rounds.values()) == [4, 4, 4, 10]  # and the loss
    verdict = report.verify(train)
    assert verdict.kept and verdict.buckets_found == 4
