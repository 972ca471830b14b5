"""What a device holds at the moment when a training step needs the most memory.

Arguments are exact: they are the parameters of the compiled program, each with its size
on one device and with the name that it has in the train state. Temporaries are the
values that are alive at the peak (see `live`), told apart by the scopes in which jaxdp
traces a step:

    loss, forward      activations
    loss, backward     gradients, if of a parameter's size or read by the exchange;
                       activations otherwise
    exchange           buckets: what is packed, in flight, or back and not yet used
    gathered           parameters, that were in parts and are whole for some time
    update             update: the optimizer's intermediate results

"other" is the rest: counters, what the step returns beside the state, values that come
from no scope, and the difference between the values alive and the size that XLA reports
for temporaries, as far as it is not negative.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jaxdp.program.hlo.shapes import Array, arrays
from jaxdp.program.memory.live import Value, live_at_peak
from jaxdp.program.memory.placed import KIND_OF_FIELD
from jaxdp.program.memory.planned import Memory
from jaxdp.program.report import ProgramReport, module_behind
from jaxdp.program.trained import check_step, trainer_behind

KINDS = (
    *("parameters", "optimizer state", "model state", "batch"),
    *("gradients", "activations", "buckets", "update", "other"),
)
UNATTRIBUTED = "not attributed"


class Part(NamedTuple):
    """What of one kind a device holds.

    Attributes:
        nbytes: All of it.
        leaves: Names and bytes: arguments in the order of the tree, then temporaries,
            the largest first.
    """

    nbytes: int
    leaves: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Holdings:
    """What each device holds at the peak, by kind; prints as a table.

    Attributes:
        parts: By kind, in the order of `KINDS`; those that are empty too.
        memory: What XLA reports; None where it does not.
        live_bytes: Temporaries that are attributed, one by one.
    """

    parts: Mapping[str, Part]
    memory: Memory | None
    live_bytes: int

    def __getitem__(self, kind: str) -> int:
        """Bytes of a kind."""
        return self.parts[kind].nbytes

    @property
    def total_bytes(self) -> int:
        """All kinds together: the peak, unless more is alive than XLA reports."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def unattributed_bytes(self) -> int | None:
        """What XLA reports for temporaries, less those that are attributed.

        Positive: padding, gaps and scratch. Negative: XLA shared a buffer that is
        counted twice here. None where XLA does not report.
        """
        return self.memory and self.memory.temporary_bytes - self.live_bytes

    def __str__(self) -> str:
        """One line per kind, with its largest leaves."""
        lines = []
        for kind, part in self.parts.items():
            if part.nbytes:
                largest = sorted(part.leaves, key=lambda leaf: -leaf[1])[:3]
                names = ", ".join(f"{name} {size:,}" for name, size in largest)
                more = len(part.leaves) - len(largest)
                names += f", {more} more" if more else ""
                lines.append(f"{kind:16}{part.nbytes:16,} B  {names}")
        return "\n".join([*lines, f"{'all':16}{self.total_bytes:16,} B"])


def held(report: ProgramReport, train: Any) -> Holdings:
    """What a device holds at the peak of a training step.

    Args:
        report: Of the compiled step.
        train: What `jaxdp.data_parallel` made.

    Returns:
        What is held by kind. The same on every device: a program has one plan.

    Raises:
        TypeError: `train` is no training.
        ValueError: The program is the step of another training.
    """
    trainer = trainer_behind(train, "held")
    if report.arguments is not None:
        check_step(report, trainer, "held")
    leaves: dict[str, list[tuple[str, int]]] = defaultdict(list)
    params = []
    for name, array in _arguments(report):
        kind = _kind_of_argument(name)
        leaves[kind].append((_short(name), array.bytes))
        params += [_dims(array.dims)] if kind == "parameters" else []
    alive = live_at_peak(module_behind(report, "held"))
    temporaries: dict[tuple[str, str], int] = defaultdict(int)
    for value in alive:
        temporaries[_kind_of(value, params), _name_of(value)] += value.nbytes
    for (kind, name), size in sorted(temporaries.items(), key=lambda item: -item[1]):
        leaves[kind].append((name, size))
    live_bytes = sum(value.nbytes for value in alive)
    leaves["other"] += _rest(report.memory, live_bytes)
    parts = {
        kind: Part(sum(size for _, size in leaves[kind]), tuple(leaves[kind]))
        for kind in KINDS
    }
    return Holdings(parts, report.memory, live_bytes)


def _arguments(report: ProgramReport) -> Iterable[tuple[str, Array]]:
    """Names of the arguments as jit calls them, and what one device gets of each."""
    module = module_behind(report, "held")
    for one in module.computations[module.entry].values():
        if one.opcode == "parameter":
            name, _ = module.origin(one)
            for array in arrays(one.shape, one.line):
                yield name.replace("\\'", "'"), array


def _kind_of_argument(name: str) -> str:
    """What an argument of `step(state, batch)` is."""
    field = re.match(r"(?:state\.)?(\w+)", name)
    if ".in_flight" in name:
        return "gradients"
    if name.startswith("state.") and field is not None:
        return KIND_OF_FIELD.get(field[1], "other")
    return "batch" if name.startswith("batch") else "other"


def _kind_of(value: Value, params: list[tuple[int, ...]]) -> str:
    """What a temporary is, by the scope that it comes from, or else is read in."""
    for op_name in (value.op_name, *sorted(value.users)):
        scopes = set(op_name.split("/"))
        if op_name.startswith(("state.", "batch")):  # a copy, in another layout
            return _kind_of_argument(op_name.replace("\\'", "'"))
        if "gathered" in scopes:
            return "parameters"
        if "update" in scopes:
            return "update"
        if "exchange" in scopes:
            return "buckets"
        if "loss" in scopes:
            return "gradients" if _is_gradient(value, params) else "activations"
    return "other"


def _is_gradient(value: Value, params: list[tuple[int, ...]]) -> bool:
    """Whether a result of the loss is a gradient, by its size or its readers."""
    if "transpose(" not in value.op_name:
        return False
    exchanged = any("exchange" in user.split("/") for user in value.users)
    (array,) = arrays(value.shape, value.shape)
    return exchanged or _dims(array.dims) in params


def _dims(dims: tuple[int, ...]) -> tuple[int, ...]:
    """Dimensions in an order that transposing does not change, without ones."""
    return tuple(sorted(size for size in dims if size > 1))


def _name_of(value: Value) -> str:
    """A short name of a temporary: the bucket, or the last operation; and its shape."""
    name = value.op_name.split(";")[0].replace("\\'", "'")
    if name.startswith(("state.", "batch")):
        return f"copy of {_short(name)} {value.shape}"
    scopes = name.split("/")
    buckets = [scope for scope in scopes if scope.startswith("bucket_")]
    return f"{buckets[-1] if buckets else '/'.join(scopes[-2:])} {value.shape}".strip()


def _short(name: str) -> str:
    return name.removeprefix("state.")


def _rest(memory: Memory | None, live_bytes: int) -> list[tuple[str, int]]:
    """What XLA counts and nothing here explains."""
    if memory is None:
        return []
    rest = {
        "results": memory.output_bytes - memory.aliased_bytes,
        UNATTRIBUTED: memory.temporary_bytes - live_bytes,
    }
    return [(name, size) for name, size in rest.items() if size > 0]
