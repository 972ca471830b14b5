import pytest

from jaxdp import targets
from jaxdp.targets import chips

GPUS = [name for name in targets.NAMES if not name.startswith("tpu")]
WANTED = {"f64", "f32", "bf16", "f16", "s8"}


@pytest.mark.parametrize("name", targets.NAMES)
def test_every_chip_is_described(name):
    chip = targets.chip(name)
    assert chip.target == name
    assert {*chip.flops_per_s} >= WANTED
    assert all(peak >= 1e12 for peak in chip.flops_per_s.values())
    assert 15 <= chip.memory_bytes / 2**30 <= 192
    assert 0.8e12 <= chip.memory_bytes_per_s <= 8e12
    assert chip.devices_per_host == 8
    assert bool(chip.gpu) == (chip.backend == "cuda") == (not chip.generation)
    assert targets.link(chip.link).bytes_per_s > 0
    assert targets.link(chip.network).alpha_s > 0


def test_every_file_is_a_target():
    files = {path.stem for path in (chips.DATA / "chips").iterdir()}
    assert files == {*targets.NAMES}
    assert len({targets.chip(name).kind for name in targets.NAMES}) == len(files)


@pytest.mark.parametrize("name", GPUS)
def test_clock_and_units_give_the_published_peak(name):
    """Multiprocessors x lanes x clock x 2 (a multiply and an add) is f32's peak."""
    chip = targets.chip(name)
    assert chip.gpu is not None
    units = chip.gpu["core_count"] * chip.gpu["fpus_per_core"]
    peak = 2 * units * chip.gpu["clock_rate_ghz"] * 1e9
    assert peak == pytest.approx(chip.flops_per_s["f32"], rel=0.02)


def test_the_description_of_a_gpu_for_xla():
    text = targets.chip("v100").target_config()
    for line in (
        *("core_count: 80", "memory_bandwidth: 900000000000", "threads_per_warp: 32"),
        *("device_memory_size: 16935682048", "major: 7 minor: 0", '"CUDA"'),
        'device_description_str: "Tesla V100-PCIE-16GB"',
    ):
        assert line in text


def test_an_h100_by_hand():
    h100 = targets.hardware("h100")
    # Half of the published 989.4 TFLOP/s, nine tenths of 3.35 TB/s.
    assert h100.flops_of("bf16") == pytest.approx(494.7e12)
    assert h100.flops_of("f32") == pytest.approx(247.35e12)  # as TF32
    assert h100.flops_of("f8e4m3fn") == h100.flops_of("s8") == h100.flops_of("u8")
    assert h100.flops_of("f64") == h100.flops_of("s32") == pytest.approx(33.45e12)
    assert h100.memory_bytes_per_s == pytest.approx(3.015e12)
    # 2 x 8192^3 FLOPs of bf16: 1.0995e12 / 494.7e12 s.
    assert h100.kernel_s({"bf16": 2 * 8192**3}, 1e6) == pytest.approx(
        2.22258e-3, rel=1e-5
    )
    assert h100.kernel_s({"bf16": 2}, 3.015e9) == pytest.approx(1e-3)
    assert h100.kernel_s({}, 64) == 2e-6
    both = h100.kernel_s({"bf16": 494_700_000_000, "f64": 33_450_000_000}, 0)
    assert both == pytest.approx(2e-3)


def test_a_v100_by_hand():
    v100 = targets.hardware("v100")
    assert v100.flops_of("f16") == pytest.approx(56e12)
    assert v100.flops_of("bf16") == v100.flops_of("f32") == pytest.approx(7e12)
    assert v100.link.transfer_s(15.75e9) == pytest.approx(1 + 15e-6)
    assert v100.network.shared
    assert not v100.link.shared


def test_a_tpu_rounds_float32_to_bfloat16():
    tpu = targets.hardware("tpu-v5e")
    assert tpu.flops_of("f32") == tpu.flops_of("bf16") == pytest.approx(98.5e12)
    assert tpu.link == tpu.network


def test_links_between_hosts():
    h100 = targets.hardware("h100", network_name="ethernet-100g", devices_per_host=4)
    assert [h100.host(device) for device in (0, 3, 4, 11)] == [0, 0, 1, 2]
    assert h100.link_between(1, 3).name == "nvlink4"
    assert h100.link_between(3, 4).name == "ethernet-100g"
    assert h100.link_between(4, 3).bytes_per_s == 12.5e9
    assert targets.hardware("h100", link_name="pcie4").link.bytes_per_s == 31.5e9
    assert targets.hardware(h100) is h100
    assert {h100: 1}[h100] == 1  # a key


def test_unknown_names():
    with pytest.raises(ValueError, match=r"link got 'nvlink9'.* one of nvlink2, .*v6e"):
        targets.hardware("h100", network_name="nvlink9")
    with pytest.raises(
        ValueError, match=r"^jaxdp\.targets has .*'h1000'.* mean 'h100'\?"
    ):
        targets.hardware("h1000")
