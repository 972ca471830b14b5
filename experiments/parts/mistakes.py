"""Typical mistakes with `nn.DataParallel`, made on purpose: what does `jaxdp` say?

Each comes with what its message must contain: numbers and names that tell the cause,
and the remedy.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments.harness.result import Rows
from jaxdp import DataParallel

ROWS = 4  # of every device
SAYS = "cause, fix: whether the message has the numbers and names of both"


class Mistake(NamedTuple):
    """A mistake, and what its message must say.

    Attributes:
        what: The mistake.
        make: Makes it.
        raises: The type of the exception.
        cause: What the message must contain about the cause.
        fix: The remedy that it must contain.
    """

    what: str
    make: Callable[[], Any]
    raises: type[Exception]
    cause: tuple[str, ...]
    fix: str


def linear(w: Any, x: Any) -> Any:
    """`[rows, 3]` to `[rows, 2]`."""
    return x @ w


class Setting:
    """Devices and a linear model; all numbers differ, and none is zero."""

    def __init__(self, devices: Sequence[Any]):
        """Makes a batch of `ROWS` rows for each device."""
        self.devices = devices
        self.ids = [device.id for device in devices]
        self.names = [f"{device.platform}:{device.id}" for device in devices]
        self.w = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
        self.x = np.arange(1, 12 * len(devices) + 1, dtype=np.float32).reshape(-1, 3)

    def model(self, apply_fn: Any = linear, **options: Any) -> DataParallel:
        """The model on all devices, or with other options."""
        options = {"device_ids": self.ids, **options}
        return DataParallel(apply_fn, self.w, **options)


def provoke(mistakes: Sequence[Mistake]) -> Rows:
    """Makes every mistake; tells what was raised, and whether it says enough."""
    rows = []
    for mistake in mistakes:
        kind, message = "nothing", ""
        try:
            mistake.make()
        except Exception as error:
            kind, message = type(error).__name__, str(error)
        named = all(part in message for part in mistake.cause)
        rows.append(
            {
                "mistake": mistake.what,
                "raises": kind,
                "message": message,
                "cause": named and kind == mistake.raises.__name__,
                "fix": mistake.fix in message,
                "label": SAYS,
            }
        )
    return rows


def about_devices(on: Setting) -> list[Mistake]:
    """Ids that no replica can run on."""
    known = [device.id for device in jax.local_devices()]
    twice = [*on.ids, on.ids[1]]
    unknown = max(known) + 1
    listed = f"{len(known)} devices of this process, which are {known}"

    def ids(given, raises, cause, fix):
        what = f"device_ids={given!r}"
        return Mistake(what, lambda: on.model(device_ids=given), raises, cause, fix)

    return [
        ids(
            twice,
            ValueError,
            (
                f"{len(twice)} ids and {len(on.ids)} devices",
                f"Given more than once: {on.ids[1]}.",
            ),
            "Name each device once",
        ),
        ids(
            [on.ids[0], unknown],
            ValueError,
            (f"device_ids[1]={unknown}", listed),
            "jax_num_cpu_devices",
        ),
        ids([-1], ValueError, ("device_ids[0]=-1", listed), "Choose one of those"),
        ids([], ValueError, ("device_ids=[]", "at least 1"), "pass None to take all"),
        ids(1, TypeError, ("device_ids=1", "a sequence"), "Put the ids into a list"),
        ids(
            ["cuda:0"],
            TypeError,
            ("device_ids[0]='cuda:0'", "an integer"),
            "Choose from jax.local_devices()",
        ),
        Mistake(
            f"output_device={unknown}",
            lambda: on.model(output_device=unknown),
            ValueError,
            (f"output_device={unknown}", listed),
            "Choose one of those",
        ),
    ]
