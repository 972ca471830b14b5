"""What travels together: transfers of a round along the same pairs are one bundle.

A transfer moves one chunk per pair. A device that sends half of its buffer to another
takes part in several transfers, one after the other in the round, with the same pairs;
they are one message: they go in one `ppermute` and wait for one latency.
"""

import dataclasses
import functools
import itertools
from typing import Literal

import numpy as np

from jaxdp.schedule.data import Pairs, Round, Schedule, Transfer

Kind = Literal["own", "partial", "complete"]


@dataclasses.dataclass(frozen=True)
class Bundle:
    """Transfers next to each other in a round, alike in pairs, op and kind.

    Attributes:
        transfers: One or several; each moves one chunk along every pair.
        kind: What they move: single contributions ("own"), sums some of which are not
            complete ("partial"), or complete chunks.
    """

    transfers: tuple[Transfer, ...]
    kind: Kind

    @property
    def pairs(self) -> Pairs:
        """Who sends to whom."""
        return self.transfers[0].pairs

    @property
    def op(self) -> Literal["add", "replace"]:
        """What targets do with all chunks of it."""
        return self.transfers[0].op


@functools.lru_cache(maxsize=256)
def bundles(schedule: Schedule) -> tuple[tuple[Bundle, ...], ...]:
    """The bundles of every round, in the order of its transfers.

    Args:
        schedule: Verified, or at least one that `jaxdp.schedule.holdings` accepts.
    """
    counts = np.zeros((schedule.devices, schedule.chunks), int)  # contributions held
    for chunk, starts in enumerate(schedule.starts):
        counts[list(starts), chunk] = 1
    every = np.array([len(starts) for starts in schedule.starts])
    return tuple(_bundled(round_, counts, every) for round_ in schedule.rounds)


def _bundled(
    round_: Round, counts: np.ndarray, every: np.ndarray
) -> tuple[Bundle, ...]:
    """The bundles of one round, which is then applied to `counts`."""
    places = [_places(transfer) for transfer in round_.transfers]
    sent = [counts[sources, chunks] for sources, _, chunks in places]
    labelled = []
    for transfer, (_, targets, chunks), moved in zip(
        round_.transfers, places, sent, strict=True
    ):
        labelled.append((transfer, _kind(moved, every[chunks])))
        kept = counts[targets, chunks] if transfer.op == "add" else 0
        counts[targets, chunks] = kept + moved
    return tuple(
        Bundle(tuple(transfer for transfer, _ in group), kind)
        for (_, _, kind), group in itertools.groupby(
            labelled, lambda item: (item[0].pairs, item[0].op, item[1])
        )
    )


def _kind(moved: np.ndarray, every: np.ndarray) -> Kind:
    """What a transfer moves, by how many contributions each of its chunks sums up."""
    if (moved == every).all():
        return "complete"
    return "partial" if (moved > 1).any() else "own"


def _places(transfer: Transfer) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Its sources, targets and chunks."""
    sources, targets = np.array(transfer.pairs).T
    return sources, targets, np.array(transfer.chunks)
