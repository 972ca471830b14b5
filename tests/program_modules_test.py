"""What real modules of CPUs, H100s and TPUs say, against numbers counted by hand.

`fixtures/programs.py` has the programs. Eight devices; a row is 1024 float32.
"""

import pytest

from jaxdp.program import analyze
from tests.modules import NAMES, module_text

MIB = 2**20
# 2 * 7 chunks of an eighth: three buckets of 4096 weights and what rides along.
RING = 14 * 4 * (512 + 520 + 529)
# The same leaves, each with chunks of its own; the loss has one of one element.
NATIVE = 3 * 14 * 4 * (512 + 8) + 14 * 4
# psum, reduce-scatter, all-gather, all-to-all of 4096 bytes, and a permute.
KINDS = 14 * 512 + 7 * 512 + 7 * 512 + 7 * 512 + 4096
# Below some size, a TPU reduces everything and keeps a part: 14 chunks instead of 7.
KINDS_TPU = KINDS + 7 * 512
COMBINED = 14 * (512 + 64) + 14 * 2  # and a float16
LAYERS = 15 * 7 * 2048  # 64 x 64 float32, gathered twice and scattered, 5 times
GATHERED = 7 * 7 * MIB  # 4 weights of 8 MiB gathered, but the first... see below
EXPECTED = {
    "kinds": (KINDS, 36),
    "combined": (COMBINED, 14),
    "loop": (7 * 4096, 7),
    "branches": (4096, 1),
    "partitioned": (2 * 3 * 4096, 6),  # 16384 bytes in groups of 4
    "ring": (RING, 14),
    "native": (NATIVE, 14),
    "bf16": (None, 14),
    "convolutions": (14 * 4 * 147, 14),  # 2 x (576 + 8) weights and a loss: 1169
}
