"""What compiled algorithms send, equal to what their schedules say, to the byte.

All algorithms of a device count and an element type are one program for H100s. Each
moves chunks of a length of its own, so that every message tells whose it is.
"""

import collections
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxdp
from jaxdp import algorithms, targets
from jaxdp.cost import cost
from jaxdp.executor import execute
from jaxdp.program import CollectiveOp, traffic
from jaxdp.schedule import local_rows
from jaxdp.targets.quiet import quietly
from tests.compilers import needs_compiler

MIXED = ("float32", "bfloat16", "float16", "float64", "int8")
MOVES = ("broadcast", "all_gather", "gather", "scatter")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
SERVERS = (
    algorithms.sharded_servers,
    algorithms.sharded_servers_push,
    algorithms.sharded_servers_collect,
)
STACKED = ("all_gather", "gather")


def schedules(devices):
    """Every algorithm of every collective, as (collective, schedule)."""
    for collective, of in algorithms.SCHEDULES.items():
        for name in of:
            root = devices - 1 if collective in ROOTED else 0
            yield collective, algorithms.build(collective, name, devices, root)
    hosts = 2 - devices % 2
    yield "all_reduce", algorithms.hierarchical(devices, hosts)
    servers = max(1, devices // 2)
    yield "execute", algorithms.sharded_servers_pull(devices, servers)
    for dedicated in (False, True) if devices > 1 else (False,):
        for build in SERVERS:
            yield "execute", build(devices, servers, dedicated)


def cases(devices, dtypes):
    """(collective, schedule, dtype, length of a chunk); lengths are distinct primes."""
    length = (n for n in itertools.count(101) if all(n % d for d in range(2, 101)))
    for dtype in dtypes:
        for collective, schedule in schedules(devices):
            if dtype != "int8" or collective in MOVES:  # integers are not summed
                yield collective, schedule, dtype, next(length)


def elements(schedule, length):
    """So many that the last chunk is padded, if there are several."""
    return schedule.chunks * length - (schedule.chunks - 1)


def leaf(collective, schedule, dtype, length):
    """What one device gives."""
    shape = (elements(schedule, length),)
    if collective in STACKED:
        shape = (length,)
    elif collective == "execute":
        shape = (local_rows(schedule.starts), length)
    elif collective == "scatter":
        shape = (schedule.chunks, length)
    return jax.ShapeDtypeStruct((schedule.devices, *shape), dtype)


def run(collective, schedule, x):
    if collective == "execute":
        return execute(schedule, x, "data", lambda total: total.astype(x.dtype))
    root = {"root": schedule.devices - 1} if collective in ROOTED else {}
    return getattr(jaxdp, collective)(x, "data", algorithm=schedule, **root)


def compiled(devices, found):
    def body(leaves):
        pairs = zip(found, leaves, strict=True)
        return [run(kind, schedule, x[0])[None] for (kind, schedule, *_), x in pairs]

    with jax.enable_x64(True):
        mapped = jax.shard_map(
            body,
            mesh=targets.mesh("h100", devices),
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,
        )
        lowered = jax.jit(mapped).lower([leaf(*case) for case in found])
        with quietly():
            return lowered.compile()


def by_length(report, lengths):
    """Bytes by link, for each length of a chunk; a message carries one or several."""
    found = collections.defaultdict(collections.Counter)
    for op in report.collectives:
        assert op.kind == "collective-permute" and not op.conditional
        for array in op.arrays:
            alone = CollectiveOp(op.kind, (array,), pairs=op.pairs)
            for link, size in traffic.links(alone).items():
                (length,) = (n for n in lengths if array.elements % n == 0)
                found[length][link] += op.count * size
    return found


def expected(schedule, dtype, length):
    itemsize = jnp.dtype(dtype).itemsize
    count = elements(schedule, length)
    return cost(schedule, count, itemsize, partial_itemsize=max(itemsize, 4))


@needs_compiler("h100")
@pytest.mark.parametrize(
    ("devices", "dtypes"),
    [
        (1, MIXED),
        (2, ("float16",)),
        (3, ("bfloat16", "float64", "int8")),
        (4, ("float32",)),
        (8, ("bfloat16",)),
    ],
    ids=lambda value: f"n{value}" if isinstance(value, int) else "",
)
def test_every_algorithm_sends_what_its_schedule_says(devices, dtypes):
    found = list(cases(devices, dtypes))
    report = jaxdp.analyze(compiled(devices, found))
    sent, received = [0] * devices, [0] * devices
    messages = by_length(report, [length for *_, length in found])
    for _, schedule, dtype, length in found:
        counted = expected(schedule, dtype, length)
        assert messages.pop(length, {}) == counted.link_bytes, schedule
        for device in range(devices):
            sent[device] += counted.sent_bytes[device]
            received[device] += counted.received_bytes[device]
    assert not messages
    assert report.sent_bytes == tuple(sent)
    assert report.received_bytes == tuple(received)


def network(params, batch):
    for weight in params:
        batch = jnp.tanh(batch @ weight)
    return (batch**2).mean()


@needs_compiler("h100")
@pytest.mark.parametrize(
    ("bucket_mib", "buckets"),
    [
        (4.0, [1] + [10**6] * 4),  # the loss travels alone, and each matrix
        (25.0, [1, 4 * 10**6]),
    ],
    ids=["a_bucket_a_matrix", "one_bucket"],
)
def test_a_ring_sends_its_padded_buckets_and_nothing_else(bucket_mib, buckets):
    weights = [jax.ShapeDtypeStruct((1000, 1000), jnp.float32)] * 4  # 3.8 MiB each
    batch = jax.ShapeDtypeStruct((8 * 64, 1000), jnp.float32)

    def report(design):
        mesh = jaxdp.data_mesh(1)
        train = jaxdp.data_parallel(network, optax.sgd(0.1), mesh, design)
        step = targets.compile_for(train.step, weights, batch, target="h100", devices=8)
        return jaxdp.analyze(step)

    ring = report(jaxdp.RingAllReduce(bucket_cap_mb=bucket_mib))
    assert {op.kind for op in ring.collectives} == {"collective-permute"}
    assert ring.count("collective-permute") == 14 * len(buckets)
    # 2 (N - 1) chunks of every bucket, each an eighth of it, of whole float32.
    assert ring.sent_bytes == (sum(14 * -(-size // 8) * 4 for size in buckets),) * 8
    assert ring.rounds == 14 * len(buckets)  # one travels after the other
    native = report(jaxdp.NativeAllReduce())
    assert ring.memory is not None and native.memory is not None
    more = ring.memory.temporary_bytes - native.memory.temporary_bytes
    assert more <= 2 * 4 * max(buckets)
