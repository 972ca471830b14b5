"""Exchanges between ranks that differ in one bit: log2 N rounds.

p is the largest power of two that is not above N. The N - p ranks beyond it hand what
they have to another rank before, and get the sum after.

Recursive doubling exchanges whole buffers. Halving-doubling exchanges half of what is
left, N = 8, ranks 0 to 3 in the first half:

    round      partner     rank 0 sends    rank 1    rank 2    rank 3    and adds
    halving    r XOR 1       4 to 7        0 to 3    4 to 7    0 to 3    the others
               r XOR 2       2 and 3       6 and 7   0 and 1   4 and 5
               r XOR 4         1             5         3         7
    owns                       0             4         2         6

The largest blocks go to the nearest rank, which is in the same host if any is. Then all
runs backwards: complete blocks go the same ways, and double.
"""

from jaxdp.algorithms.building import blocks, everywhere, for_any_devices, whole
from jaxdp.schedule import Round, Schedule


@for_any_devices
def recursive_doubling(devices: int) -> Schedule:
    """Recursive doubling: in round s everybody adds what rank r XOR 2^s has.

    Few rounds of whole buffers: for small ones, where latency is what costs. Both of a
    pair add the same two numbers, so all end with the same bits. If N is no power of
    two, the ranks beyond the largest one in it add to the first ranks before, and get
    the sum after.

    Cost: log2 N rounds, K bytes sent and received in each; floor(log2 N) + 2 if N is no
    power of two.

    References:
        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
        Operations in MPICH", IJHPCA 2005, section 4.4.
    """
    power = 1 << (devices.bit_length() - 1)
    beyond = [(r, r - power) for r in range(power, devices)]
    steps = [1 << s for s in range(power.bit_length() - 1)]
    swaps = [[(r, r ^ step) for r in range(power)] for step in steps]
    rounds = [whole(pairs, "add") for pairs in ([beyond] if beyond else []) + swaps]
    if beyond:
        rounds.append(whole([(low, high) for high, low in beyond], "replace"))
    name = f"recursive_doubling({devices})"
    all_ = everywhere(devices, 1)
    return Schedule(name, devices, 1, all_, all_, tuple(rounds))


@for_any_devices
def halving_doubling(devices: int) -> Schedule:
    """Reduce-scatter by recursive halving, then all-gather by recursive doubling.

    The fewest rounds and, if N is a power of two, the ring's bytes. If not, the first
    2 (N - p) ranks are pairs of neighbours: the odd one gives its buffer to the even
    one, which takes part for both.

    Cost: 2 log2 N rounds and 2 (N - 1) K / N bytes sent and received per device. If N
    is no power of two, 2 log2 p + 2 rounds; the even rank of a pair sends and receives
    2 (p - 1) K / p + K bytes, the odd one K, the others 2 (p - 1) K / p.

    References:
        Rabenseifner, "Optimization of Collective Reduction Operations", ICCS 2004, of
        which this is the all-reduce by vector halving and distance doubling.
    """
    bits = devices.bit_length() - 1
    power = 1 << bits
    beyond = devices - power
    # Rank of each of the p that take part: the even one of a pair, or itself.
    ranks = [2 * i if i < beyond else i + beyond for i in range(power)]
    rounds = [_exchange(ranks, bit, "add") for bit in range(bits)]
    rounds += [_exchange(ranks, bit, "replace") for bit in reversed(range(bits))]
    if beyond:
        given = [(2 * i + 1, 2 * i) for i in range(beyond)]
        taken = [(2 * i, 2 * i + 1) for i in range(beyond)]
        rounds.insert(0, blocks(given, [0] * beyond, power, "add"))
        rounds.append(blocks(taken, [0] * beyond, power, "replace"))
    all_ = everywhere(devices, power)
    name = f"halving_doubling({devices})"
    return Schedule(name, devices, power, all_, all_, tuple(rounds))


def _exchange(ranks: list[int], bit: int, op) -> Round:
    """Each adds to what its partner keeps, or gives its partner what it has kept."""
    power = len(ranks)
    partners = [i ^ 1 << bit for i in range(power)]
    keepers = partners if op == "add" else range(power)
    firsts = [_first(i, bit + 1, power) for i in keepers]
    pairs = [(ranks[i], ranks[partner]) for i, partner in enumerate(partners)]
    return blocks(pairs, firsts, power >> (bit + 1), op)


def _first(i: int, bits: int, power: int) -> int:
    """Where the block begins that `i` keeps after `bits` halvings.

    Bit `s` of `i` says which half it kept in round `s`.
    """
    return sum(power >> (s + 1) for s in range(bits) if i >> s & 1)
