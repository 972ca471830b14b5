"""What every device holds, stage by stage, and what its programs need beside that.

After each transfer and program the arrays that are alive are counted by device and by
kind. XLA says what a program needs while it runs: that is added for its device. So the
numbers exist on every backend, also where `device.memory_stats()` is None. Counting
waits for the devices, so that a step under observation runs one program at a time.
"""

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from jaxdp.buckets import is_key
from jaxdp.program.memory import memory_of
from jaxdp.replicated.devices import Device, name
from jaxdp.replicated.observe import Event, observed_by
from jaxdp.replicated.views import tables

OTHER = "other arrays"
TEMPORARY = "program temporaries"


class Snapshot(NamedTuple):
    """What one device holds at one moment.

    Attributes:
        stage: Such as "7 backward".
        what: What had just been moved or made, anywhere.
        device: Such as "cpu:0".
        kinds: Bytes by kind, such as "activations"; what a running program needs in
            addition is "program temporaries".
    """

    stage: str
    what: str
    device: str
    kinds: dict[str, int]

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(self.kinds.values())


class Memory:
    """The snapshots of what ran inside `with model.memory() as memory:`."""

    def __init__(self):
        """Starts empty."""
        self.snapshots: list[Snapshot] = []
        self._kinds: dict[int, str] = {}  # by address of the buffer

    def see(self, event: Event) -> None:
        """Waits for the results, then counts."""
        jax.block_until_ready(event.made)
        for kind, arrays in event.made.items():
            for address, _, _ in _buffers(arrays):
                self._kinds[address] = kind
        held = self._held()
        if event.lower is not None:
            needs = memory_of(event.lower().compile())
            if needs is not None and needs.temporary_bytes:
                held[event.target][TEMPORARY] = needs.temporary_bytes
        for device in sorted(held, key=lambda device: device.id):
            kinds = dict(held[device])
            about = (event.stage, event.what, name(device))
            self.snapshots.append(Snapshot(*about, kinds))

    def settle(self) -> None:
        """Nothing is under way."""

    @property
    def devices(self) -> list[str]:
        """All devices that held something."""
        return list(dict.fromkeys(snapshot.device for snapshot in self.snapshots))

    def peak(self, device: str) -> Snapshot:
        """The moment when a device held most.

        Args:
            device: Such as "cpu:0".

        Raises:
            ValueError: No such device held anything.
        """
        found = [each for each in self.snapshots if each.device == device]
        if not found:
            raise ValueError(
                f"Memory.peak got device={device!r}. It must be one of the "
                f"{len(self.devices)} devices that held something: {self.devices}. "
                "Run a step inside `with model.memory() as memory:` first."
            )
        return max(found, key=lambda snapshot: snapshot.nbytes)

    def rows(self) -> list[dict[str, Any]]:
        """For each stage and device its fullest moment, by kind, in MiB."""
        fullest: dict[tuple[str, str], Snapshot] = {}
        for each in self.snapshots:
            key = (each.stage, each.device)
            if key not in fullest or each.nbytes > fullest[key].nbytes:
                fullest[key] = each
        kinds = list(dict.fromkeys(k for each in fullest.values() for k in each.kinds))
        return [
            {"stage": each.stage, "device": each.device, "all_mb": each.nbytes / 2**20}
            | {f"{kind}_mb": each.kinds.get(kind, 0) / 2**20 for kind in kinds}
            for each in fullest.values()
        ]

    def table(self) -> Any:
        """The peaks as a `rich.table.Table`."""
        kept = ("stage", "device", "all_mb")
        rows = [{k: v for k, v in row.items() if k in kept} for row in self.rows()]
        return tables.rich_table("Memory by stage and device, in MiB", rows)

    def __str__(self) -> str:
        """The table as text."""
        return tables.as_text(self.table())

    def _held(self) -> dict[Device, Counter[str]]:
        """Bytes alive by device and kind; a buffer counts once."""
        held: dict[Device, Counter[str]] = defaultdict(Counter)
        alive = {
            address: (device, nbytes)
            for address, device, nbytes in _buffers(jax.live_arrays())
        }
        for address, (device, nbytes) in alive.items():
            held[device][self._kinds.get(address, OTHER)] += nbytes
        self._kinds = {a: k for a, k in self._kinds.items() if a in alive}
        return held


@contextmanager
def watching() -> Iterator[Memory]:
    """Counts memory while `jaxdp.replicated` works inside the block.

    What nobody can reach any more is freed first: freed later, in the middle of a step,
    it would move a device's fullest moment.
    """
    gc.collect()
    memory = Memory()
    with observed_by(memory):
        yield memory


def _buffers(arrays: Any) -> Iterator[tuple[int, Device, int]]:
    """Address, device and bytes of all buffers of arrays."""
    for array in arrays:
        if is_key(array):
            array = jax.random.key_data(array)
        for shard in array.addressable_shards:
            data = shard.data
            if data.nbytes:
                yield data.unsafe_buffer_pointer(), shard.device, data.nbytes
