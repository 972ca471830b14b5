"""Every design by one name, and the names that experiments have for it."""

import re
from typing import NamedTuple

SERVERS = "N servers"
# What `compare` calls them is what the site calls them.
ALIASES = {
    "DP, main device": "DataParallel",
    "DDP, every device": "ring",
    "GatherToRoot": "gather to root",
    "LocalSGD, every 8": "local SGD",
    "NativeAllReduce": "native",
    "NativeAllReduce 25 MB": "native, 25 MB",
    "RingAllReduce": "ring",
    "recursive doubling": "doubling",
    "stage 0": "ring",
    **{f"stage {stage}": f"Zero({stage})" for stage in (1, 2, 3)},
}


class Design(NamedTuple):
    """One design.

    Attributes:
        name: For tables and pictures.
        family: One of `FAMILIES`: its colour.
        code: How the library has it.
        note: What must be known beside numbers.
    """

    name: str
    family: str
    code: str
    note: str = ""


FAMILIES = {
    "one": "through one device",
    "several": "through several servers",
    "equals": "between equal devices",
    "xla": "as XLA likes",
    "seldom": "only now and then",
    "parts": "parts instead of copies",
}
DESIGNS = (
    Design("DataParallel", "one", "DataParallel(...)", "nn.DataParallel, ported"),
    Design("gather to root", "one", "GatherToRoot()", "the same as one program"),
    Design("1 server", "one", "ParameterServer(1)"),
    Design(SERVERS, "several", "ParameterServer(N)", "every device serves a part"),
    Design("ring", "equals", "RingAllReduce()", "as in DDP"),
    Design("doubling", "equals", 'AllReduce("recursive_doubling")'),
    Design("halving-doubling", "equals", 'AllReduce("halving_doubling")'),
    Design("native", "xla", "NativeAllReduce()", "merged as XLA likes"),
    Design("native, 25 MB", "xla", "NativeAllReduce(25.0)", "in buckets"),
    Design("local SGD", "seldom", "LocalSGD(8)", "exchanges in one step of 8"),
    Design("Zero(1)", "parts", "Zero(1)", "optimizer state in parts"),
    Design("Zero(2)", "parts", "Zero(2)", "gradients too"),
    Design("Zero(3)", "parts", "Zero(3)", "parameters too"),
)


def canonical(name: object, devices: int) -> str:
    """The name that the site has for what an experiment calls so.

    Args:
        name: In a table.
        devices: N there: as many servers are every device.
    """
    known = ALIASES.get(str(name), str(name))
    servers = re.fullmatch(r"(?:ParameterServer, )?(\d+) servers", known)
    return SERVERS if servers and int(servers[1]) == devices else known
