"""Where numbers of designs stand in results, and how they are read."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from experiments.harness.result import Document
from experiments.site.designs import canonical

DEVICES = 8
ROWS = {"ResNet-50": 64, "GPT-2 small": 8}  # of a device, in programs for H100
# What titles below say; results with other options have other numbers.
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "compare": {"devices": DEVICES},
    "traffic": {},
    "gpu": {"tiny": False, "target": "h100", "hosts": 1, "rows": None},
    "overlap": {"tiny": False},
    "zero": {"tiny": False},
    "scaling": {"tiny": False, "images": 64, "sequences": 8},
    "memory": {"tiny": False, "devices": 4, "batch_size": 64, "image_size": 224},
}
Read = Callable[[Document], dict[str, float]]  # by design


class Source(NamedTuple):
    """An experiment that has numbers of a measure, and the column they stand in."""

    experiment: str
    table: str
    value: str
    read: Read


def column(
    experiment: str,
    table: str,
    value: str,
    key: str = "design",
    scale: float = 1.0,
    prefix: str = "",
    label: str = "",
    **only: Any,
) -> Source:
    """Reads one column of a table, of results with the options of `OPTIONS`.

    Args:
        experiment: Whose result it is.
        table: Its name.
        value: The column with the numbers.
        key: The column with the designs.
        scale: What numbers are multiplied with.
        prefix: What stands before the content of `key` to make a name.
        label: What the text below the table must contain.
        **only: What other columns must have.
    """

    def read(document: Document) -> dict[str, float]:
        config = {"tiny": False} | document["config"]
        options = OPTIONS[experiment].items()
        if any(config.get(name) != wanted for name, wanted in options):
            return {}
        return {
            canonical(f"{prefix}{row.get(key)}", DEVICES): scale * row[value]
            for row in document["tables"].get(table, ())
            if all(row.get(name) == wanted for name, wanted in only.items())
            and label in str(row.get("label"))
            and _finite(row.get(value))
        }

    return Source(experiment, table, value, read)


def kept(document: Document) -> dict[str, float]:
    """What devices keep between steps in `compare`, in multiples of the gradients."""
    kept = column("compare", "designs", "kept_mb").read(document)
    phi = column("compare", "sent_in_a_step", "Φ_bytes").read(document)
    return {
        name: size * 2**20 / phi[name] for name, size in kept.items() if phi.get(name)
    }


def port(model: str) -> Source:
    """Milliseconds of a step of `DataParallel`, from the samples/s in `scaling`."""
    where = {"hardware": "H100, NVLink", "model": model, "N": DEVICES}
    rates = column("scaling", "throughput", "DP", key="model", **where)

    def read(document: Document) -> dict[str, float]:
        samples = 1e3 * DEVICES * ROWS[model]
        rate = rates.read(document).get(model, 0)
        return {"DataParallel": samples / rate} if rate > 0 else {}

    return rates._replace(read=read)


def _finite(value: Any) -> bool:
    """Whether it is a number that can be drawn."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < 1e18 and math.isfinite(value)


def models(value: str, scale: float = 1.0) -> Mapping[str, tuple[Source, ...]]:
    """A number of compiled steps: in `gpu`, and of ZeRO in `overlap`, by model."""
    return {
        model: (
            column("gpu", "designs", value, scale=scale, model=model, devices=DEVICES),
            *(
                column(
                    *("overlap", "steps", value),
                    scale=scale,
                    model=model,
                    devices=DEVICES,
                    variant=variant,
                )
                for variant in ("after", "as it is")
            ),
        )
        for model in ROWS
    }
