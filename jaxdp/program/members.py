"""Who takes part in a collective of a program: its groups or pairs, checked."""

from collections.abc import Mapping

from jaxdp.program.hlo import Module
from jaxdp.program.hlo.groups import Groups, parse_groups, parse_pairs, to_devices
from jaxdp.program.hlo.shapes import quote

# All devices take part in these.
EVERYBODY = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all")


def members(
    module: Module, attributes: Mapping[str, str], kind: str, line: str
) -> Groups:
    """The groups, or the pairs of a permute, in logical devices and checked."""
    names = ("source_target_pairs", "replica_groups", "use_global_device_ids")
    key = (kind, "channel_id" in attributes, *map(attributes.get, names))
    if key not in module.found:
        module.found[key] = _new_members(module, attributes, kind, line)
    return module.found[key]


def _new_members(
    module: Module, attributes: Mapping[str, str], kind: str, line: str
) -> Groups:
    if kind == "collective-permute":
        written = parse_pairs(attributes["source_target_pairs"], line)
        if not written:
            return ()
    else:
        written = parse_groups(attributes["replica_groups"], line)
    try:
        found = to_devices(
            written, kind, attributes, module.replicas, module.partitions
        )
    except IndexError as error:
        highest = max(number for group in written for number in group)
        raise ValueError(
            f"analyze found device {highest} in {quote(line)}. The module header says "
            f"replica_count={module.replicas} and num_partitions={module.partitions}, "
            f"so a {kind} can name fewer. Pass the text of the whole program, header "
            "included."
        ) from error
    # Each device is in one group; in a permute, it is one source and one target.
    lists = [[device for group in found for device in group]]
    if kind == "collective-permute":
        lists = list(zip(*found, strict=True))
    if any(len(set(devices)) != len(devices) for devices in lists):
        raise ValueError(
            f"analyze found a device twice in {quote(line)}. A {kind} has each device "
            "in one group, once; a permute, once as source and once as target. Pass "
            "compiled.as_text() unchanged."
        )
    if kind in EVERYBODY and len(lists[0]) != module.devices:
        raise ValueError(
            f"analyze found {len(lists[0])} of {module.devices} devices in the groups "
            f"of {quote(line)}. All take part in a {kind}, some in groups of one. Pass "
            "compiled.as_text() unchanged."
        )
    return found
