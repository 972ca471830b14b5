"""Which rows of a data set make which batch, for a length that nothing divides.

An order is a permutation by seed and epoch, the same on all processes; each takes its
share of every global batch, so that all have equally many batches of the same shape and
nobody waits for a process that has run out. What the last batch lacks is filled with
copies of its rows, and a mask says so: a loss, a metric or a `jaxdp.BatchNorm` that
reads the mask counts every row once.

Why not Grain: its samplers shuffle inside a fixed share of each process, so the rows of
a global batch depend on the number of processes, and shares differ by a row or lose it;
its `batch_and_pad` makes no mask. It can read what is chosen here:
`grain.MapDataset.source([*sampler.epoch(0)])`.

Orders outlive NumPy's versions: the streams of `PCG64` and of `RandomState` are
guaranteed never to change, and those of `Generator` are not.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import numpy as np

LEAST = {
    "length": (1, "Pass the number of rows of the data set, such as len(labels)."),
    "batch_size": (1, "Pass the rows of one step over all processes, such as 64."),
    "seed": (0, "Pass a number of your choice, such as 0."),
    "process_count": (1, "Pass jax.process_count()."),
    "process_index": (0, "Pass jax.process_index()."),
}


class Rows(NamedTuple):
    """What one process reads for one batch.

    Attributes:
        indices: `[rows]`, int64, rows of the data set.
        mask: `[rows]`, bool, False for rows that only pad.
    """

    indices: np.ndarray
    mask: np.ndarray


@dataclasses.dataclass(eq=False)
class Sampler:
    """Batches of row numbers, epoch after epoch, from any position on.

    A `for` loop gives what is left of the epoch that the sampler stands in, and leaves
    it at the start of the next one. Making one costs nothing; an epoch takes
    8 * `length` bytes and, for a million rows, 50 ms.

    Attributes:
        length: Rows of the data set.
        batch_size: Rows of one step over all processes.
        seed: Of the order.
        shuffle: Whether each epoch has an order of its own; else rows come as they are.
        remainder: What becomes of a last batch with fewer rows. `"pad"` repeats them,
            with a False in the mask, up to `batch_size`; `"drop"` leaves it out;
            `"keep"` gives it as it is, of another shape, to one process only.
        process_index: Which process this is; it takes the i-th slice of a batch.
        process_count: How many processes there are.

    Raises:
        ValueError: A number out of range, a `batch_size` that the processes do not
            divide, an unknown `remainder`, or nothing left after dropping.

    Example:
        >>> import jaxdp
        >>> sampler = jaxdp.Sampler(5, batch_size=4, shuffle=False)
        >>> for rows in sampler:
        ...     print(rows.indices, rows.mask)
        [0 1 2 3] [ True  True  True  True]
        [4 4 4 4] [ True False False False]
        >>> sampler.state()["epoch"]
        1
    """

    length: int
    batch_size: int
    _: dataclasses.KW_ONLY
    seed: int = 0
    shuffle: bool = True
    remainder: Literal["pad", "drop", "keep"] = "pad"
    process_index: int = 0
    process_count: int = 1

    def __post_init__(self):
        """Checks the options, and starts at the first batch."""
        for name, (least, remedy) in LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(
                    f"Sampler got {name}={value!r}. It must be an integer of at least "
                    f"{least}. {remedy}"
                )
            setattr(self, name, int(value))  # JSON has no numbers of NumPy
        self._check_processes()
        if self.remainder not in ("pad", "drop", "keep"):
            raise ValueError(
                f"Sampler got remainder={self.remainder!r}. It must be 'pad', 'drop' "
                "or 'keep'. Use 'pad' to use every row in batches of one shape."
            )
        if not len(self):
            raise ValueError(
                f"Sampler got length={self.length}, batch_size={self.batch_size} and "
                f"remainder='drop'. An epoch has {self.length} // {self.batch_size} = "
                f"0 batches. Use remainder='pad', or a batch_size of at most "
                f"{self.length}."
            )
        self._epoch = self._batch = 0

    def __len__(self) -> int:
        """Batches of one epoch, the same on all processes."""
        whole, rest = divmod(self.length, self.batch_size)
        return whole + (rest > 0 and self.remainder != "drop")

    def __iter__(self) -> Iterator[Rows]:
        """What is left of this epoch; the position moves before a batch is given."""
        epoch = self._epoch
        order = self._order(epoch)
        while self._epoch == epoch:
            rows = self._rows(order, self._batch)
            self._batch += 1
            if self._batch == len(self):
                self._epoch, self._batch = epoch + 1, 0
            yield rows

    def epoch(self, epoch: int) -> Iterator[Rows]:
        """All batches of any epoch; the position stays.

        Raises:
            ValueError: `epoch` is negative.
        """
        if epoch < 0:
            raise ValueError(
                f"Sampler.epoch got {epoch}. Epochs are counted from 0. Pass 0 for the "
                "first one."
            )
        order = self._order(epoch)
        return (self._rows(order, batch) for batch in range(len(self)))

    def state(self) -> dict[str, Any]:
        """The position and what the order depends on, to be saved with a checkpoint.

        It is the same on all processes, and fits any number of them.
        """
        return {"epoch": self._epoch, "batch": self._batch} | self._made_of()

    def restore(self, state: dict[str, Any]) -> None:
        """Goes to where a sampler of the same rows stood.

        Args:
            state: From `state()`.

        Raises:
            ValueError: Another sampler's, or no state.
        """
        made_of = self._made_of()
        missing = [name for name in ("epoch", "batch", *made_of) if name not in state]
        if missing:
            raise ValueError(
                f"Sampler.restore got a state without {', '.join(missing)}. It must "
                f"have {', '.join(self.state())}. Pass what Sampler.state() returned."
            )
        other = [name for name, value in made_of.items() if state[name] != value]
        if other:
            saved, here = (
                ", ".join(f"{name}={each[name]!r}" for name in other)
                for each in (state, made_of)
            )
            raise ValueError(
                f"Sampler.restore got the state of a sampler with {saved}, and this "
                f"one has {here}. In another order, rows would be skipped or repeated. "
                "Make the sampler as that one was made, or start a new epoch with it."
            )
        epoch, batch = int(state["epoch"]), int(state["batch"])
        if epoch < 0 or not 0 <= batch < len(self):
            raise ValueError(
                f"Sampler.restore got epoch {epoch} and batch {batch}. Epochs are "
                f"counted from 0, and an epoch of {self.length} rows has batches 0 to "
                f"{len(self) - 1}. Pass what Sampler.state() returned."
            )
        self._epoch, self._batch = epoch, batch

    def _made_of(self) -> dict[str, Any]:
        """What an order and its batches depend on."""
        names = ("length", "batch_size", "seed", "shuffle", "remainder")
        return {name: getattr(self, name) for name in names}

    def _order(self, epoch: int) -> np.ndarray:
        """All rows, in the order of an epoch."""
        if not self.shuffle:
            return np.arange(self.length)
        bits = np.random.PCG64((self.seed, epoch))
        return np.random.RandomState(bits).permutation(self.length)

    def _rows(self, order: np.ndarray, batch: int) -> Rows:
        """This process's share of a global batch."""
        real = order[batch * self.batch_size : (batch + 1) * self.batch_size]
        size = self.batch_size if self.remainder == "pad" else len(real)
        mask = np.arange(size) < len(real)
        each = size // self.process_count
        share = slice(self.process_index * each, (self.process_index + 1) * each)
        return Rows(np.resize(real, size)[share], mask[share])

    def _check_processes(self) -> None:
        """Every process takes equally many rows, and there is such a process."""
        whole, rest = divmod(self.batch_size, self.process_count)
        if rest:
            below, above = whole * self.process_count, (whole + 1) * self.process_count
            sizes = f"{below} or {above}" if below else f"{above}"
            raise ValueError(
                f"Sampler got batch_size={self.batch_size} for {self.process_count} "
                f"processes. Each takes equally many rows, and {self.batch_size} = "
                f"{self.process_count} x {whole} + {rest}. Use a batch_size of {sizes}."
            )
        if self.process_index >= self.process_count:
            raise ValueError(
                f"Sampler got process_index={self.process_index} of "
                f"{self.process_count} processes. Their indices are 0 to "
                f"{self.process_count - 1}. Pass jax.process_index() and "
                "jax.process_count()."
            )
        if self.remainder == "keep" and self.process_count > 1:
            raise ValueError(
                f"Sampler got remainder='keep' for {self.process_count} processes. "
                "Their shares of the last batch could differ, and they would wait for "
                "each other. Use remainder='pad' or 'drop'."
            )
