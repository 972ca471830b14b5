"""The hardware of devices that JAX names: of those here, or of those traced for.

While JAX traces a function over a mesh, the mesh says what kind its devices are, those
of `compile_for` too: so what is chosen by hardware is chosen for the right one.
"""

import dataclasses
from typing import Any

import jax

from jaxdp.targets.chips import NAMES, Chip, chip
from jaxdp.targets.hardware import Hardware, hardware, link

# What is assumed of an accelerator that `data/chips` does not describe.
UNKNOWN = {"gpu": "a100", "tpu": "tpu-v6e"}
# What joins GPUs of a form other than that which `data/chips` describes.
FORMS = {"PCIE": "pcie4", "SXM2": "nvlink2"}
# CPU devices share the memory of their process, and its cores. Their link was fitted to
# which algorithm is quickest among 2, 4 and 8 of them on two cores: docs/algorithms.md
# says how well. The rest is what one of them reached.
HOST = Hardware(
    name="CPU devices",
    flops_per_s=(("f32", 40e9),),
    memory_bytes_per_s=2e9,
    memory_bytes=3 * 2**30,
    link=link("host-memory"),
    network=link("ethernet-10g"),
    devices_per_host=2**16,
)


def hardware_here() -> Hardware:
    """The hardware of the mesh that is traced over; else of JAX's first device.

    A host holds as many devices as the usual server: a mesh does not tell while JAX
    traces over it.

    Example:
        >>> hardware_here().name
        'CPU devices'
    """
    described = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return hardware_of(described or jax.devices()[0])


def hardware_of(device: Any) -> Hardware:
    """The hardware of a device.

    A chip that no data sheet here describes counts as one that has it, on PCIe if it is
    a GPU, and the name says so.

    Args:
        device: With a `device_kind` and a `platform`, as a `jax.Device` has them.
    """
    kind = device.device_kind
    if device.platform == "cpu":
        return HOST
    for about in map(chip, NAMES):
        if _is(kind, about):
            found = hardware(about.target, link_name=_link_name(kind, about))
            return dataclasses.replace(found, name=_name(kind, about))
    taken = UNKNOWN.get(device.platform, UNKNOWN["gpu"])
    pcie = FORMS["PCIE"] if chip(taken).backend == "cuda" else None
    found = hardware(taken, link_name=pcie)
    name = f"{kind}, taken for {found.name} on {found.link.name}"
    return dataclasses.replace(found, name=name)


def _is(kind: str, about: Chip) -> bool:
    """Whether JAX's name for a device is that of a chip, or has its name in it."""
    words = kind.replace("-", " ").split()
    return kind == about.kind or (about.backend == "cuda" and about.name in words)


def _link_name(kind: str, about: Chip) -> str | None:
    """The link of a chip in another form; None for that of its data sheet."""
    if kind == about.kind:
        return None
    forms = [name for form, name in FORMS.items() if form in kind.upper()]
    if not forms or forms[0][:4] == about.link[:4]:  # PCIe of another generation
        return None
    return forms[0]


def _name(kind: str, about: Chip) -> str:
    """A chip's name, or the device's if it has another form."""
    return kind if _link_name(kind, about) else about.name
