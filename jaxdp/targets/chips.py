"""What is published about a chip, read from `data/chips`."""

import difflib
import functools
import pathlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

DATA = pathlib.Path(__file__).with_name("data")
NAMES = ("h100", "h200", "a100", "b200", "v100", "tpu-v5e", "tpu-v6e")
# What every CUDA GPU since 7.0 has: CUDA C++ Programming Guide, "Compute
# Capabilities".
_EVERY_GPU = {
    "threads_per_warp": 32,
    "threads_per_block_limit": 1024,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 65535,
    "block_dim_limit_z": 65535,
    "registers_per_block_limit": 65536,
    "shared_memory_per_block": 49152,
}
_VERSIONS = (
    "runtime_version { major: 12 minor: 8 }\ndnn_version_info { major: 9 minor: 8 }"
)


@dataclass(frozen=True)
class Chip:
    """One accelerator.

    Attributes:
        target: What `compile_for` calls it, such as "h100".
        name: What people call it.
        backend: Of XLA: "cuda" or "tpu".
        kind: What JAX calls it: `jax.Device.device_kind`.
        devices_per_host: How many a server usually has.
        memory_bytes: Of one.
        memory_bytes_per_s: The published bandwidth of its memory.
        flops_per_s: The published peak by element type, in HLO's names ("bf16").
        link: What joins those of a host, a name in `links.toml`.
        network: What joins hosts.
        generation: Of a TPU, such as "v5e"; else "".
        gpu: Of a GPU, what XLA's cost models ask for; else empty.
    """

    target: str
    name: str
    backend: Literal["cuda", "tpu"]
    kind: str
    devices_per_host: int
    memory_bytes: int
    memory_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    link: str
    network: str
    generation: str = ""
    gpu: Mapping[str, Any] | None = None

    def target_config(self) -> str:
        """The chip as XLA describes a GPU: a `GpuTargetConfigProto` in text form."""
        gpu = dict(self.gpu or {})
        major, minor = gpu.pop("capability")
        fields = gpu | _EVERY_GPU
        fields["device_memory_size"] = self.memory_bytes
        fields["memory_bandwidth"] = int(self.memory_bytes_per_s)
        lines = [f"  {name}: {value}" for name, value in fields.items()]
        capability = f"cuda_compute_capability {{ major: {major} minor: {minor} }}"
        device = "\n".join([f"gpu_device_info {{\n  {capability}", *lines, "}"])
        return (
            f'{device}\nplatform_name: "CUDA"\n{_VERSIONS}\n'
            f'device_description_str: "{self.kind}"\n'
        )


@functools.cache
def chip(target: str) -> Chip:
    """The chip of a target.

    Raises:
        ValueError: There is none of that name; lists those that there are.
    """
    _check_name(target)
    path = DATA / "chips" / f"{target}.toml"
    return Chip(target=target, **tomllib.loads(path.read_text(encoding="utf-8")))


def _check_name(target: Any) -> None:
    """Refuses a target that is none."""
    if target in NAMES:
        return
    close = difflib.get_close_matches(str(target).lower(), NAMES, n=1)
    remedy = f"Did you mean {close[0]!r}?" if close else "Choose one of them."
    raise ValueError(
        f"jaxdp.targets has no chip for target={target!r}. It must be one of "
        f"{', '.join(NAMES)}. {remedy}"
    )
