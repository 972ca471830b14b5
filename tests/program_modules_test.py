"""What real modules of CPUs, H100s and TPUs say, against numbers counted by hand.

`fixtures/programs.py` has the programs. Eight devices; a row is 1024 float32.
"""

import pytest

from jaxdp.program import analyze
from tests.modules import NAMES, module_text

MIB = 2**20
# Three buckets: 4096 weights, and 64, 128 and 133 others (a bias, flags, the loss).
RING = 14 * 4 * (512 + 520 + 529)
# Every leaf with chunks of its own; the loss is a chunk of one element.
NATIVE = 14 * 4 * (3 * (512 + 8) + 1)
# psum, reduce-scatter, all-gather and all-to-all of 4096 bytes; a permute.
KINDS = 14 * 512 + 7 * 512 + 7 * 512 + 7 * 512 + 4096
# 64 x 64 float32: gathered in each of 5 layers, forward and backward, and scattered.
LAYERS = 15 * 7 * 2048
# Contributions and complete sums as 2 bytes, partial sums as 4; the loss as float32.
BF16 = (8 * 2 + 6 * 4) * (32896 + 65600) + 14 * 4
EXPECTED = {
    "kinds": (KINDS, 14 + 7 + 7 + 7 + 1),
    "combined": (14 * 4 * (128 + 16) + 14 * 2, 14),  # the last one is a float16
    "loop": (7 * 4096, 7),
    "layers": (LAYERS, 5 * 7 + 5 * (7 + 7)),
    "branches": (4096, 1),
    "partitioned": (2 * 3 * 4096, 6),  # 16384 bytes in groups of 4
    "gathered": (4 * 7 * MIB + 4 * 7 * MIB, 14),
    "sharded": (4 * 7 * MIB + 4 * 7 * MIB, 14),
    "ring": (RING, 14),
    "native": (NATIVE, 14),
    "root": (12481 * 4, 2),  # of all devices but the root
    "bf16": (BF16, 14),
    "convolutions": (14 * 4 * 147, 14),  # 2 x (576 + 8) weights and the loss: 1169
}
# What a compiler does otherwise.
DIFFERENT = {
    # It reduces small arrays everywhere, and keeps a part.
    "tpu-v5e-kinds": (KINDS + 7 * 512, 14 + 14 + 7 + 7 + 1),
    "tpu-v6e-kinds": (KINDS + 7 * 512, 14 + 14 + 7 + 7 + 1),
    "tpu-v5e-layers": (LAYERS + 5 * 7 * 2048, 5 * 7 + 5 * (7 + 14)),
    # There a float16 is half of a u32.
    "tpu-v5e-combined": (14 * 4 * (128 + 16) + 14 * 4, 14),
    # Matrix products with one gather and four scatters in loops of permutes, 9 of 1 MiB
    # each, and three gathers of 7 MiB.
    "tpu-v5e-sharded": ((5 * 9 + 3 * 7) * MIB, 24),
    # On GPUs the gathers of the next layer do not wait for this one's gradient.
    "h100-layers": (LAYERS, 70),
    "h100-layers-jax0.12": (LAYERS, 70),
}


def program_of(name):
    target = next(
        t for t in ("tpu-v5e", "tpu-v6e", "h100", "cpu") if name.startswith(t)
    )
    return name.removeprefix(f"{target}-").removesuffix("-jax0.12")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_rounds(name):
    report = analyze(module_text(name))
    sent, rounds = DIFFERENT.get(name, EXPECTED[program_of(name)])
    assert report.devices == 8
    assert report.sent_bytes[1:] == report.received_bytes[1:] == (sent,) * 7
    root = 7 * sent if name.endswith("root") else sent
    assert report.sent_bytes[0] == report.received_bytes[0] == root
    assert sum(report.link_bytes.values()) == sum(report.sent_bytes)
    assert report.rounds == rounds


@pytest.mark.parametrize("name", NAMES)
def test_every_collective_says_where_it_comes_from(name):
    ops = analyze(module_text(name)).collectives
    sources = {op.source.rpartition(":")[0] for op in ops if op.source}
    assert all(path.startswith(("jaxdp/", "tests/fixtures/")) for path in sources)
    # What a compiler has combined, or made of another kind, has lost it.
    lost = {op.name for op in ops if not op.op_name}
    assert all(name.startswith(("all-reduce", "reduce-scatter")) for name in lost)


def test_the_busiest_link_of_a_root_is_in_the_table():
    printed = str(analyze(module_text("tpu-v6e-root")))
    assert "link      49924 B at most, from device 0 to 1" in printed
    assert "rounds    2 on the critical path" in printed
    assert "sent      49924 to 349468 B, the most by device 0" in printed


def test_the_table_has_the_type_on_the_wire_and_a_line_for_what_is_alike():
    lines = str(analyze(module_text("h100-bf16"))).splitlines()
    rows = [line.split()[:5] for line in lines[1:7]]
    assert rows[0] == ["kind", "dtype", "arrays", "bytes", "count"]
    kind = "collective-permute"
    assert rows[1:] == [
        [kind, "f32", "f32[1,1]", "4", "14"],
        [kind, "u16", "u16[1,32896]", "65792", "8"],
        [kind, "f32", "f32[1,32896]", "131584", "6"],
        [kind, "u16", "u16[1,65600]", "131200", "8"],
        [kind, "f32", "f32[1,65600]", "262400", "6"],
    ]


@pytest.mark.parametrize("name", ["tpu-v5e-gathered", "tpu-v5e-sharded"])
def test_a_gather_that_a_tpu_spreads_over_fusions_counts_once(name):
    text = module_text(name)
    assert text.count("AsyncCollectiveStart") == 3
    chained = text.count('"async_collective_fusion_config"')
    gathers = analyze(text).count("all-gather")
    assert text.count(" all-gather(") == gathers + chained - 3
    assert gathers == (4 if "gathered" in name else 3)


def test_a_combined_permute_has_two_operands_and_a_tuple_of_tuples():
    ops = analyze(module_text("h100-branches")).collectives
    assert sorted([str(array) for array in op.arrays] for op in ops) == [
        ["f32[1,1024]"],
        ["f32[1,512]", "f32[1,512]"],
    ]
