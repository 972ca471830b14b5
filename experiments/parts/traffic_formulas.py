"""How many bytes an exchange of gradients moves, in closed form.

Nothing here reads a program or a schedule of the library. `N` devices; `Φ` bytes of
gradients. An exchange carries a message: the gradients, what rides beside them (a loss,
flags), and zeros that fill the last chunk. Devices and links carry shares of it:

    exchange                  busiest device sends    others    link    all links
    ring                      2 (N-1) / N             same      same    2 (N-1)
    star                      N-1                     1         1       2 (N-1)
    S servers that work       (N+S-2) / S             1         2 / S   2 (N-1)
    S dedicated servers       (N-1) / S               1         1 / S   2N-S-1
    recursive doubling        log2 N                  same      1       N log2 N
    parts, to owners and back 2 (N-1) / N             same      1       2 (N-1)

Everybody receives as much as it sends. Of N devices that are no power of two, those
beyond the largest one P in it add to as many of the first before a recursive doubling
of P, and get the sum after: one message each way more, for N - P pairs.

Sources: Patarasuk and Yuan, JPDC 2009 (ring); Li et al., OSDI 2014 (servers); Thakur et
al., IJHPCA 2005 (recursive doubling); Tang et al., ICML 2021 (parts).
"""

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import NamedTuple

FLOAT, SHORT = 4, 2  # bytes of a float32; of a bfloat16
LOSS = 1  # float32 that rides along
BLOCK = 256  # integers that share a scale


class Share(NamedTuple):
    """What devices and links carry of one message; and rounds."""

    most: Fraction  # by the busiest device, in each direction
    least: Fraction  # by the least busy one
    link: Fraction  # the busiest link, in one direction
    total: Fraction  # all links together
    rounds: int


class Message(NamedTuple):
    """The bytes of a message, by what they are."""

    gradient: int
    beside: int
    padding: int


class Exchange(NamedTuple):
    """One message, and who carries it."""

    share: Share
    message: Message


class Expected(NamedTuple):
    """Bytes of one measure, by what they are; together a whole number."""

    gradient: Fraction
    beside: Fraction
    padding: Fraction

    @property
    def total(self) -> Fraction:
        """All of them."""
        return self.gradient + self.beside + self.padding


MEASURES = ("most", "least", "link", "total")
NOTHING = Share(Fraction(0), Fraction(0), Fraction(0), Fraction(0), 0)


def expected(exchanges: Iterable[Exchange], measure: str) -> Expected:
    """A measure of several exchanges, that load the same devices and links.

    Args:
        exchanges: All of a step.
        measure: A field of `Share`, such as "most".
    """
    parts = [Fraction(0)] * 3
    for share, message in exchanges:
        carried = getattr(share, measure)
        parts = [p + carried * x for p, x in zip(parts, message, strict=True)]
    return Expected(*parts)


def rounds(exchanges: Iterable[Exchange]) -> int:
    """Of the longest exchange: none waits for another."""
    return max(each.share.rounds for each in exchanges)


def ring(n: int) -> Share:
    """Reduce-scatter and all-gather, each (N - 1) / N of the message."""
    share = Fraction(2 * (n - 1), n)
    return Share(share, share, share, n * share, 2 * (n - 1))


def star(n: int) -> Share:
    """Everything into one device, and out of it again."""
    return servers(n, 1)


def servers(n: int, count: int) -> Share:
    """Each of `count` devices, that work too, is a star for its part of the message."""
    if n == 1:
        return NOTHING
    serving = Fraction(n - 1 + count - 1, count)
    least = Fraction(1) if n > count else serving
    link = Fraction(min(2, count), count)  # a server pushes to others, and they pull
    return Share(serving, least, link, Fraction(2 * (n - 1)), 2)


def dedicated(n: int, count: int) -> Share:
    """The same, for devices that push nothing: the others are the workers."""
    serving, working = Fraction(n - 1, count), Fraction(1)
    total = Fraction(n - count + n - 1)
    link = Fraction(1, count)
    return Share(max(serving, working), min(serving, working), link, total, 2)


def doubling(n: int) -> Share:
    """Whole messages, to a partner twice as far in every round."""
    if n == 1:
        return NOTHING
    log = n.bit_length() - 1
    beyond = n - 2**log
    more = 1 if beyond else 0
    least = Fraction(1 if beyond else log)
    total = Fraction(2**log * log + 2 * beyond)
    return Share(Fraction(log + more), least, Fraction(1), total, log + 2 * more)


def parts(n: int) -> Share:
    """A part to each of its owners at once; the owners' sums around a ring."""
    share = Fraction(2 * (n - 1), n)
    link = Fraction(1) if n > 1 else Fraction(0)  # one part, then N - 1 around
    return Share(share, share, link, n * share, n if n > 1 else 0)


def whole(leaves: Sequence[int]) -> Message:
    """Gradients and loss as they are."""
    return Message(FLOAT * sum(leaves), FLOAT * LOSS, 0)


def chunked(leaves: Sequence[int], n: int, beside: int = LOSS) -> Message:
    """Gradients with some numbers beside them, in N equal chunks."""
    padding = -(sum(leaves) + beside) % n
    return Message(FLOAT * sum(leaves), FLOAT * beside, FLOAT * padding)


def merged(leaves: Sequence[int], n: int, arrays: Sequence[int]) -> Message:
    """Gradients and loss in some arrays, each in N equal chunks."""
    padding = sum(-array % n for array in arrays)
    return Message(FLOAT * sum(leaves), FLOAT * LOSS, FLOAT * padding)


def served(leaves: Sequence[int], count: int, workers: int) -> Message:
    """Every leaf in `count` parts; to every server loss, weight and a flag a worker."""
    padding = sum(-leaf % count for leaf in leaves)
    beside = count * (LOSS + 1 + workers)
    return Message(FLOAT * sum(leaves), FLOAT * beside, FLOAT * padding)


def halved(leaves: Sequence[int], n: int) -> Message:
    """Every leaf as bfloat16, in N parts."""
    return Message(SHORT * sum(leaves), 0, SHORT * sum(-leaf % n for leaf in leaves))


def quartered(leaves: Sequence[int], n: int) -> Message:
    """Every leaf as 8-bit integers in N parts, with a bfloat16 for every block."""
    blocks = sum(math.ceil(math.ceil(leaf / n) / BLOCK) for leaf in leaves)
    scales = SHORT * n * blocks
    return Message(sum(leaves), scales, sum(-leaf % n for leaf in leaves))
